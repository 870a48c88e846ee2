"""Command-line flags made from a pydantic model, so that a setting has one name, type, default and description."""

import argparse
import json
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo


def _table(text: str) -> dict[str, str]:
    """A table of texts, as NAME=TEXT,... or as a JSON object. Raises ValueError."""
    if text.startswith("{"):
        return dict(json.loads(text))
    return dict(pair.split("=", 1) for pair in text.split(","))


TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "N"),
    float: (float, "X"),
    str: (str, "TEXT"),
    Path: (Path, "FILE"),
    SecretStr: (str, "SECRET"),
    dict[str, str]: (_table, "NAME=TEXT,..."),
    tuple[str, ...]: (lambda text: tuple(text.split(",")), "TEXT,..."),
}


def add(
    parser: argparse.ArgumentParser,
    model: type[BaseModel],
    without: Collection[str] = (),
    as_typed: Collection[str] = (),
) -> None:
    """Adds a flag for every field of `model` except `without` and lists of tables: `served_model_name` becomes
    `--served-model-name`.

    The parsed arguments hold only the settings that were given (`given` extracts them). Ranges and combinations are
    checked by the model, and of the fields `as_typed` all that is typed. Flags are grouped by the class that declares
    the fields; the first line of its docstring is the title. Raises TypeError for a field of a type that has no flag.
    """
    for owner in model.__mro__:
        if not (issubclass(owner, BaseModel) and owner is not BaseModel):
            continue
        own = owner.__annotations__.keys() - set(without)
        fields = {name: field for name, field in model.model_fields.items() if name in own and not _has_tables(field)}
        if fields:
            title = (owner.__doc__ or owner.__name__).strip().split("\n")[0].rstrip(".")
            group = parser.add_argument_group(title[0].lower() + title[1:])
            for name, field in fields.items():
                _flag(group, name, field, name in as_typed)


def given(args: argparse.Namespace, model: type[BaseModel]) -> dict[str, Any]:
    """The settings that the command line set, by field."""
    return {name: value for name, value in vars(args).items() if name in model.model_fields}


def _flag(group: argparse._ArgumentGroup, name: str, field: FieldInfo, as_typed: bool) -> None:
    flag = f"--{name.replace('_', '-')}"
    text = (field.description or "").replace("%", "%%")
    kind = _bare(field.annotation)
    default = field.get_default(call_default_factory=True)
    if default not in (None, (), {}):
        # Without quotes, as a user types it. `str` keeps a secret hidden.
        text += f" (default: {str(default).lower() if kind is bool else default})".replace("%", "%%")
    common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
    if kind is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
    elif get_origin(kind) is Literal:
        # Python 3.11 compares the typed string with the choices themselves: all of them are strings.
        group.add_argument(flag, choices=get_args(kind), **common)
    elif kind in TYPES:
        convert, metavar = TYPES[kind]
        group.add_argument(flag, type=str if as_typed else convert, metavar=metavar, **common)
    else:
        raise TypeError(f"{name}: no flag for a field of type {field.annotation}")


def _has_tables(field: FieldInfo) -> bool:
    """Whether the field is a list of tables, which only a file can have."""
    return get_origin(field.annotation) is tuple and field.annotation not in TYPES


def _bare(annotation: Any) -> Any:
    """The type without its `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(annotation) if kind is not type(None)]
        return kinds[0] if len(kinds) == 1 else annotation
    return annotation
