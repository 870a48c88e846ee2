"""Entries of a branch's queue, which are expressions with the lines of the program that added them; and variables."""

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from shoal.lang.ir import Expr

Branch = Any  # `shoal.lang.branch.Branch`, which imports this module

_OWN = (__name__.rpartition(".")[0] + ".", "contextlib")  # modules whose lines are not the program's


class Segment(NamedTuple):
    """A part of a branch's text. `name`: the variable that it is the value of; `generated`: by the model."""

    text: str
    generated: bool = False
    name: str | None = None


class Statement(NamedTuple):
    """An expression, and the line of the program that added it."""

    expr: Expr
    place: str


@dataclass
class Variable:
    """A variable of a program. `value` grows while its output is streamed; `done` once it is whole."""

    value: Any = None
    meta: Any = None
    done: bool = False


@dataclass(frozen=True)
class ForkPoint(Expr):
    """Children begin with what the branch holds here."""

    children: tuple[Branch, ...]


@dataclass(frozen=True)
class JoinPoint(Expr):
    """Waits for branches. `append`: their text since the fork is appended; otherwise their new variables are gathered,
    each as the list of the branches' values."""

    branches: tuple[Branch, ...]
    append: bool


@dataclass(frozen=True)
class VariableRef(Expr):
    """Appends the value of a branch's variable, once it is there."""

    branch: Branch
    name: str


def place_of(error: BaseException) -> str:
    """Where in the program an exception came from: the innermost line outside of this package."""
    place = ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            place = f"{frame.f_code.co_filename}:{trace.tb_lineno}, in {frame.f_code.co_name}"
        trace = trace.tb_next
    return place


def program_line() -> str:
    """The file and line of the nearest caller outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OWN):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
