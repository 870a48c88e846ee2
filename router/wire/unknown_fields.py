"""The fields of a body that no type knows, where they may be passed over: in messages, their parts, and tools.

Bodies are read strictly first. Only what that refuses comes here, so that a body without such fields costs nothing.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec.inspect as inspected

from router.wire.errors import invalid
from router.wire.requests import Lenient

_INDEX = re.compile(r"\[\d+\]")


@dataclass(frozen=True)
class _Struct:
    """An object of a type. `open`: whether its unknown fields are passed over."""

    fields: Mapping[str, "_Shape | None"]
    open: bool
    hosted: re.Pattern[str] | None
    needs_others: bool


@dataclass
class _Shape:
    """The parts of a type that matter here: what its objects are, by the tag in `tag_field`, and the items of its
    lists."""

    tag_field: str | None = None
    structs: dict[Any, _Struct] = field(default_factory=dict)
    items: "_Shape | None" = None

    def struct(self, value: Mapping[str, Any]) -> _Struct | None:
        """The type of an object; None if it is none of those that are known."""
        tag = None if self.tag_field is None else value.get(self.tag_field)
        return self.structs.get(tag) if isinstance(tag, str | None) else None


def without_unknown(value: Any, kind: Any, path: str = "") -> tuple[Any, Collection[str]]:
    """A value for the type `kind`, without the unknown fields and the hosted tools that may be passed over, and their
    names: those of fields below `path`, without the numbers of list items, as `messages[].content[].x`. Raises
    ApiError where hosted tools are all that there is, and the type does not allow that."""
    passed: dict[str, None] = {}
    kept = _kept(value, _shape(kind), _INDEX.sub("[]", path), passed)
    return kept, passed.keys()


def hosted(path: str, kind: str) -> str:
    """The name under which an item of the list `path` is passed over because a hosted service would run it, or has."""
    return f"{path}[type={kind}]"


def _kept(value: Any, shape: _Shape | None, path: str, passed: dict[str, None]) -> Any:
    if shape is None:
        return value
    if isinstance(value, list) and shape.items is not None:
        items = shape.items
        return [_kept(item, items, f"{path}[]", passed) for item in _run_here(value, items, path, passed)]
    if not isinstance(value, dict) or (struct := shape.struct(value)) is None:
        return value
    before = f"{path}." if path else ""
    kept = {}
    for name, inside in value.items():
        if name in struct.fields:
            kept[name] = _kept(inside, struct.fields[name], before + name, passed)
        elif struct.open and name != shape.tag_field:
            passed[before + name] = None
        else:
            kept[name] = inside
    return kept


def _run_here(items: list[Any], shape: _Shape, path: str, passed: dict[str, None]) -> list[Any]:
    """The items of a list without those that a hosted service would run, or has."""
    struct = next((each for each in shape.structs.values() if each.hosted is not None), None)
    if struct is None or struct.hosted is None:
        return items
    kept, left_out = [], []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and struct.hosted.fullmatch(kind):
            left_out.append(kind)
        else:
            kept.append(item)
    if struct.needs_others and left_out and not kept:
        where = f"{path}[0].type"
        message = f"{where!r} is {left_out[0][:100]!r}: this server runs no tools, and the request has no others."
        raise invalid(message, where, "unsupported_tool")
    passed |= {hosted(path, kind): None for kind in left_out}
    return kept


@cache
def _shape(kind: Any) -> _Shape | None:
    return _of(inspected.type_info(kind))


def _of(kind: inspected.Type) -> _Shape | None:
    match kind:
        case inspected.Metadata(type=inside):
            return _of(inside)
        case inspected.ListType(item_type=item):
            items = _of(item)
            return None if items is None else _Shape(items=items)
        case inspected.UnionType(types=types):
            united = _Shape()
            for shape in filter(None, map(_of, types)):
                united.tag_field = united.tag_field or shape.tag_field
                united.structs |= shape.structs
                united.items = united.items or shape.items
            return united if united.structs or united.items else None
        case inspected.StructType(cls=cls, fields=fields, tag=tag, tag_field=tag_field):
            shapes = {each.encode_name: _of(each.type) for each in fields}
            struct = _Struct(
                shapes, issubclass(cls, Lenient), getattr(cls, "hosted", None), getattr(cls, "needs_others", False)
            )
            return _Shape(tag_field, {tag: struct})
    return None
