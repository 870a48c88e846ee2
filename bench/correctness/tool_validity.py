"""Judgement of calls of tools: their arguments against the tools' schemas, by jsonschema."""

import datetime
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonschema

from bench.results import Figure


@dataclass(frozen=True)
class Called:
    """A call of an answer, with its arguments as they came."""

    name: str
    arguments: str


@dataclass(frozen=True)
class CallingAnswer:
    """The answer to a request with tools.

    `mode`: how the request asked for a call. `error`, `status`: the server's words and HTTP status if there is no
    answer.
    """

    mode: str
    calls: tuple[Called, ...] = ()
    finish_reason: str | None = None
    tokens: int = 0
    error: str | None = None
    status: int = 200


@dataclass
class Validity:
    """Counts over answers and their calls.

    | field | meaning |
    | --- | --- |
    | `answers`, `called` | answers, and those with a call, by mode |
    | `calls`, `cut` | whole calls; answers that the token limit cut |
    | `refused` | the server's words on requests that it refuses for their schemas |
    | `failed` | its words on requests that failed otherwise |
    | `wrong` | what is wrong with calls that are not valid |
    | `missing` | answers without the call that they must have |
    """

    answers: Counter[str] = field(default_factory=Counter)
    called: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    cut: int = 0
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def add(self, tools: Iterable[dict[str, Any]], answer: CallingAnswer) -> None:
        """Counts one answer, and judges its calls. The last call of an answer that was cut is no whole one."""
        self.answers[answer.mode] += 1
        if answer.error is not None:
            (self.refused if answer.status == 400 else self.failed).append(answer.error)
            return
        is_cut = answer.finish_reason == "length"
        self.cut += is_cut
        calls = answer.calls[:-1] if is_cut else answer.calls
        self.calls += len(calls)
        self.called[answer.mode] += bool(calls)
        if answer.mode != "auto" and not calls and not is_cut:
            self.missing.append(f"{answer.mode}: no call, finish_reason {answer.finish_reason!r}")
        for call in calls:
            if (problem := problem_of(tools, call)) is not None:
                self.wrong.append(f"{problem}, in {call.name} of {call.arguments}")

    @property
    def share(self) -> float:
        """The share of the calls that are valid. One that is missing is not."""
        judged = self.calls + len(self.missing)
        return (self.calls - len(self.wrong)) / judged if judged else 0.0

    @property
    def figures(self) -> list[Figure]:
        """`protocols.tools.*`, all but those of throughput."""
        asked = max(1, sum(self.answers.values()))
        auto_called = self.called["auto"] / max(1, self.answers["auto"])
        return [
            Figure("protocols.tools.valid", self.share, "ratio", True),
            Figure("protocols.tools.calls", self.calls, "calls", True),
            Figure("protocols.tools.refused", len(self.refused) / asked, "ratio", False),
            Figure("protocols.tools.cut", self.cut / asked, "ratio", False),
            Figure("protocols.tools.auto_called", auto_called, "ratio", True),
        ]


def problem_of(tools: Iterable[dict[str, Any]], call: Called) -> str | None:
    """The fault of a call; None if it is valid. `tools`: as chat completions take them."""
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    if call.name not in schemas:
        return f"no tool is called {call.name!r}"
    try:
        arguments = json.loads(call.arguments)
        jsonschema.Draft202012Validator(schemas[call.name], format_checker=FORMATS).validate(arguments)
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error).splitlines()[0][:300]
    return None if isinstance(arguments, dict) else "the arguments are no object"


def _time(value: str) -> object:
    return datetime.datetime.fromisoformat(f"2000-01-01T{value}")


def _matching(pattern: str) -> Callable[[str], object]:
    def read(value: str) -> object:
        if re.fullmatch(pattern, value) is None:
            raise ValueError(value)
        return value

    return read


# Of formats for whose checks jsonschema needs further packages. Each raises ValueError.
_READERS: dict[str, Callable[[str], object]] = {
    "time": _time,
    "date-time": datetime.datetime.fromisoformat,
    "hostname": _matching(r"(?=.{1,253}$)(?!-)[A-Za-z0-9-]{1,63}(?:\.[A-Za-z0-9-]{1,63})*"),
    "duration": _matching(r"P(?=.)(?:\d+W|(?:\d+Y)?(?:\d+M)?(?:\d+D)?(?:T(?=.)(?:\d+H)?(?:\d+M)?(?:\d+S)?)?)"),
}


def _formats() -> jsonschema.FormatChecker:
    checker = jsonschema.FormatChecker(formats=())
    checker.checkers = dict(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)

    def checked(read: Callable[[str], object], *, error: type[Exception]) -> tuple[Any, Any]:
        return lambda value: not isinstance(value, str) or read(value) is not None, error

    checker.checkers |= {name: checked(read, error=ValueError) for name, read in _READERS.items()}
    checker.checkers["uri"] = checked(httpx.URL, error=httpx.InvalidURL)
    return checker


FORMATS = _formats()
