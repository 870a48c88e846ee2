"""Differences between older drafts of JSON Schema and 2020-12, the draft that schemas are read as."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jsonschema.exceptions import SchemaError

DRAFT = "2020-12"
_READ = (DRAFT, "04", "06", "07", "2019-09")  # drafts that `modern` reads by their own rules
_READ_AS = f"schemas are read as draft {DRAFT}"
_BOUND = "write the bound itself as {0}, a number, instead of {1} (and leave {0} out where it is false)"


class _Former(NamedTuple):
    """A form of a keyword that 2020-12 does not have.

    | field | meaning |
    | --- | --- |
    | `is_meant` | whether a value has this form |
    | `was` | the draft that had it, for the message |
    | `today` | what to write instead, for the message |
    """

    is_meant: Callable[[Any], bool]
    was: str
    today: str


_FORMER = {
    "items": _Former(
        lambda value: isinstance(value, list),
        "a list as items is of drafts before 2020-12",
        "write prefixItems for the list, and items for what was additionalItems",
    ),
    "exclusiveMinimum": _Former(
        lambda value: isinstance(value, bool),
        "a boolean exclusiveMinimum is of draft-04",
        _BOUND.format("exclusiveMinimum", "minimum"),
    ),
    "exclusiveMaximum": _Former(
        lambda value: isinstance(value, bool),
        "a boolean exclusiveMaximum is of draft-04",
        _BOUND.format("exclusiveMaximum", "maximum"),
    ),
    "required": _Former(
        lambda value: isinstance(value, bool),
        "a boolean required is of draft-03",
        "list the names of the properties that an object needs in its own required",
    ),
    "type": _Former(lambda value: value == "any", "type any is of draft-03", "leave type out"),
    "$id": _Former(
        lambda value: isinstance(value, str) and value.startswith("#"),
        "an $id that names a part of a schema is of draft-06 and draft-07",
        "name that part with $anchor",
    ),
}
# Keywords that 2020-12 does not have at all. They are valid in a schema only because unknown keywords are.
_GONE = {
    "dependencies": (
        f"is of drafts up to draft-07, and {_READ_AS}: write dependentRequired or dependentSchemas, or declare the "
        "draft with $schema"
    ),
    "$recursiveRef": f"is of draft 2019-09, and {_READ_AS}: write $ref",
}


def gone(keyword: str) -> str | None:
    """The message for a keyword that only older drafts have, or None for other keywords."""
    return _GONE.get(keyword)


def former(error: SchemaError) -> str | None:
    """The message for an invalid part of a schema that is in an older draft's form, or None for other errors."""
    path = list(error.absolute_schema_path)
    if "properties" not in path[:-1]:
        return None
    keyword = path[len(path) - path[::-1].index("properties")]  # the innermost of the metaschema's properties
    known = _FORMER.get(str(keyword))
    if known is None or not known.is_meant(error.instance):
        return None
    return f"{known.was}, and {_READ_AS}: {known.today}"


def named(ref: str) -> str:
    """The message for a reference by name, such as #address."""
    return (
        f"no part of the schema, or more than one, has the name {ref!r}, which drafts up to draft-07 give with $id "
        f"(draft-04 with id) and draft {DRAFT} with $anchor"
    )


def remark(schema: Any, message: str) -> str:
    """The message of a refusal. If the schema's `$schema` declares another draft and the message mentions no draft, a
    remark about that is added."""
    declared = schema.get("$schema") if isinstance(schema, dict) else None
    match = re.search(r"json-schema\.org/(draft[-/]([\d-]+))/", declared) if isinstance(declared, str) else None
    if match is None or match[2] in _READ or DRAFT in message:
        return message
    draft = match[1].replace("draft/", "draft ")
    return f"{message} (its $schema is that of {draft}, and {_READ_AS})"
