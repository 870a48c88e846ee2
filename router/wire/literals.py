"""The values that a body's type allows where it names them one by one, for errors that say what to send."""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec.inspect as inspected

_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]]+")


@cache
def allowed_values(kind: Any, path: str) -> tuple[str | int, ...]:
    """The literals that the type `kind` allows at `path`, such as `tools[0].type`; empty if it names none there.
    `[...]` stands for any key of an object. The tags that tell a union's members apart count as literals too."""
    here: list[inspected.Type] = [inspected.type_info(kind)]
    tags: list[Any] = []
    for step in _STEPS.findall(path):
        tags = [each.tag for each in _single(here) if isinstance(each, inspected.StructType) and each.tag_field == step]
        here = [inside for each in _single(here) for inside in _inside(each, step)]
    values = [value for each in _single(here) if isinstance(each, inspected.LiteralType) for value in each.values]
    return tuple(dict.fromkeys([*values, *tags]))


def _single(types: Iterable[inspected.Type]) -> Iterable[inspected.Type]:
    """The types, without what is around them: unions and descriptions."""
    for each in types:
        if isinstance(each, inspected.UnionType):
            yield from _single(each.types)
        elif isinstance(each, inspected.Metadata):
            yield from _single([each.type])
        else:
            yield each


def _inside(kind: inspected.Type, step: str) -> Iterable[inspected.Type]:
    match kind:
        case inspected.StructType(fields=fields):
            yield from (field.type for field in fields if field.encode_name == step)
        case inspected.ListType(item_type=item) if step.startswith("["):
            yield item
        case inspected.DictType(value_type=value):
            yield value
