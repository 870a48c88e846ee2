"""The graph of a program, found by running its function once on placeholders.

An argument that is not bound, and a variable that is read, is a `Placeholder`: it can be added to the state, joined to
texts, and formatted into them. A function that must know the value (a condition, a loop over it, arithmetic) cannot be
traced any further: the graph ends there and says why. So does a tool that `shoal.in_thread` calls. Other side effects
of the function happen once more.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NoReturn

from shoal.lang import loop
from shoal.lang.ir import ConstantText, Expr, ExprList, Gen, Select, Unordered, parts_of
from shoal.lang.state import ProgramState, ProgramStateGroup
from shoal.lang.statements import JoinPoint, program_line

# A placeholder that is formatted into a text leaves its key between these two, which no text has (private use area).
_OPEN, _CLOSE = "\ue0f0", "\ue0f1"
_MARK = re.compile(f"{_OPEN}([^{_CLOSE}]*){_CLOSE}")


class NeedsValue(Exception):
    """The program's function wants the value of a placeholder."""


class Placeholder(Expr):
    """A value that is not known while a program is traced. `branch` is None for an argument, otherwise the number of
    the branch whose variable it is."""

    def __init__(self, name: str, branch: int | None = None) -> None:
        self.name = name
        self.branch = branch

    def __str__(self) -> str:
        return f"{_OPEN}{'' if self.branch is None else self.branch}:{self.name}{_CLOSE}"

    def __format__(self, spec: str) -> str:
        if spec:
            self._needed(f"formatted as {spec!r}")
        return str(self)

    def __repr__(self) -> str:
        return self.label

    @property
    def label(self) -> str:
        """How the placeholder is shown."""
        return f"{{{self.name}}}" if self.branch is None else f"s{self.branch}[{self.name!r}]"

    def _needed(self, what: str) -> NoReturn:
        raise NeedsValue(f"{self.label} is {what}")

    def __bool__(self) -> bool:
        self._needed("a condition")

    def __eq__(self, other: object) -> bool:
        self._needed("compared")

    __hash__ = object.__hash__

    def __len__(self) -> int:
        self._needed("measured")

    def __iter__(self) -> Any:
        self._needed("iterated over")

    def __getitem__(self, key: object) -> Any:
        self._needed("indexed")

    def __contains__(self, item: object) -> bool:
        self._needed("searched")

    def __int__(self) -> int:
        self._needed("made a number")

    __float__ = __index__ = __lt__ = __gt__ = __le__ = __ge__ = __int__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._needed(f"asked for .{name}")


@dataclass(frozen=True)
class TracedStatement:
    """A statement of a program. `reads`: the placeholders in it."""

    number: int
    branch: int
    expr: Expr
    place: str
    reads: tuple[Placeholder, ...] = ()


@dataclass
class ProgramGraph:
    """The statements of a program, as far as they can be known before it runs.

    `nodes` are in the order of the program; those of one branch run one after the other, and wait for what they read.
    `parents` has the branch that each branch was forked from. `stop` says where and why tracing ended, "" if the graph
    is whole; `returns`: the function returns a value. `assumed` are the arguments whose values are in the graph.
    """

    nodes: list[TracedStatement] = field(default_factory=list)
    parents: list[int | None] = field(default_factory=lambda: [None])
    assumed: dict[str, Any] = field(default_factory=dict)
    stop: str = ""
    returns: bool = False

    @property
    def last_node(self) -> "ProgramGraph":
        """The graph itself: SGLang's scripts draw it from its last statement."""
        return self

    def print_graph_dfs(self) -> str:
        """The statements in order, a line each."""
        return "\n".join(f"%{node.number} branch {node.branch}: {node.expr!r}" for node in self.nodes)

    def prefix(self) -> str:
        """The constant text with which every run begins, up to the first placeholder or call."""
        texts: list[str] = []
        for node in self.nodes:
            if node.branch == 0:
                for part in flat(node.expr):
                    if not isinstance(part, ConstantText):
                        return "".join(texts)
                    texts.append(part.value)
        return "".join(texts)


def trace(func: Any, bound: Mapping[str, Any]) -> ProgramGraph:
    """The graph of a program's function, with some of its arguments given."""
    graph = ProgramGraph()
    parameters = list(inspect.signature(func).parameters.values())[1:]
    graph.assumed = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(bound)
    arguments = {p.name: graph.assumed.get(p.name, Placeholder(p.name)) for p in parameters}
    if inspect.iscoroutinefunction(func):
        graph.stop = "the program is a coroutine function: it runs as it is"
        return graph
    calls_no_tool = loop.without_threads.set(_refuse_tools)
    try:
        graph.returns = func(_TracedState(_TracedBranch(graph, 0)), **arguments) is not None
    except Exception as error:
        reason = str(error) if isinstance(error, NeedsValue) else f"{type(error).__name__}: {error}"
        graph.stop = f"{_place_in(func, error)}: {reason}"
    finally:
        loop.without_threads.reset(calls_no_tool)
    return graph


def _refuse_tools() -> None:
    raise NeedsValue("a function is called in a thread")


def flat(expr: Expr) -> list[Expr]:
    """The parts of an expression, those of lists within it too."""
    if isinstance(expr, ExprList | Unordered):
        return [part for outer in expr.parts for part in flat(outer)]
    return [expr]


class _TracedBranch:
    """Records statements in place of `interpreter.Branch`."""

    def __init__(self, graph: ProgramGraph, number: int) -> None:
        self.graph = graph
        self.number = number
        self.run = None

    def submit(self, expr: Expr) -> None:
        marked = _with_placeholders(expr)
        if isinstance(expr, JoinPoint):
            branches = tuple(branch.number for branch in expr.branches)
            marked = TracedJoin(branches, expr.append)
        reads = tuple(part for part in flat(marked) if isinstance(part, Placeholder))
        self.graph.nodes.append(TracedStatement(len(self.graph.nodes), self.number, marked, program_line(), reads))

    def fork(self, size: int) -> "list[_TracedBranch]":
        first = len(self.graph.parents)
        self.graph.parents += [self.number] * size
        self.submit(TracedFork(tuple(range(first, first + size))))
        return [_TracedBranch(self.graph, first + i) for i in range(size)]

    def close(self) -> None:
        return

    def set_variable(self, name: str, value: Any) -> None:
        raise NeedsValue(f"s[{name!r}] is set by the function")


@dataclass(frozen=True)
class TracedFork(Expr):
    """`interpreter.ForkPoint`, with the numbers of the branches."""

    children: tuple[int, ...]


@dataclass(frozen=True)
class TracedJoin(Expr):
    """`interpreter.JoinPoint`, with the numbers of the branches."""

    branches: tuple[int, ...]
    append: bool


class _TracedState(ProgramState):
    """The state that a function is traced on."""

    def __init__(self, branch: Any) -> None:
        self._branch = branch
        self.run = None  # type: ignore[assignment]
        self.ret_value = None

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> ProgramStateGroup:
        return ProgramStateGroup([_TracedState(branch) for branch in self._branch.fork(int(size))], self)

    def __getitem__(self, name: str) -> Any:
        return Placeholder(name, self._branch.number)

    def __contains__(self, name: str) -> bool:
        raise NeedsValue(f"whether {name!r} is set is asked")

    def _synced(self) -> Any:
        raise NeedsValue("the state's text is read")

    def _wait(self, awaitable: Any) -> Any:
        if inspect.iscoroutine(awaitable):
            awaitable.close()
        raise NeedsValue("the state is waited for")

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        raise NeedsValue(f"details of {name!r} are read")

    def text_iter(self, var_name: str | None = None) -> Any:
        raise NeedsValue("the state's text is read")

    def error(self) -> Any:
        raise NeedsValue("the state's error is asked for")


def _with_placeholders(expr: Expr) -> Expr:
    """The expression, with placeholders taken out of the texts that they were formatted into."""
    if isinstance(expr, ExprList):
        return ExprList(tuple(part for outer in expr.parts for part in parts_of(_with_placeholders(outer))))
    if isinstance(expr, Unordered):
        return Unordered(tuple(_with_placeholders(part) for part in expr.parts))
    if isinstance(expr, ConstantText) and _OPEN in expr.value:
        parts: list[Expr] = []
        for i, text in enumerate(_MARK.split(expr.value)):
            if i % 2:
                branch, _, name = text.partition(":")
                parts.append(Placeholder(name, int(branch) if branch else None))
            elif text:
                parts.append(ConstantText(text))
        return ExprList(tuple(parts))
    if isinstance(expr, Gen | Select) and _is_marked(expr):
        raise NeedsValue("an argument of gen or select depends on a value")
    return expr


def _is_marked(value: Any) -> bool:
    if isinstance(value, str):
        return _OPEN in value
    if isinstance(value, tuple):
        return any(_is_marked(part) for part in value)
    return is_dataclass(value) and any(_is_marked(getattr(value, f.name)) for f in fields(value))


def _place_in(func: Any, error: BaseException) -> str:
    """The line of the program at which tracing ended."""
    place = f"{func.__code__.co_filename}:{func.__code__.co_firstlineno}"
    trace_back = error.__traceback__
    while trace_back is not None:
        if trace_back.tb_frame.f_code is func.__code__:
            place = f"{func.__code__.co_filename}:{trace_back.tb_lineno}"
        trace_back = trace_back.tb_next
    return place
