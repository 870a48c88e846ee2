"""The formats of JSON schema that jsonschema checks here, without the further packages that it needs for some."""

import datetime
import re
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema


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
