"""Places in a JSON value where a schema may ask for `uniqueItems`, as an automaton over the names of members.

A state stands for the set of the schema's parts that may apply to a value. Alternatives are not told apart: a place is
one of unique items if any alternative says so. So an array may be held to more than its schema asks, never to less.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from worker.structured_output.error import GrammarError
from worker.structured_output.json_schema.references import SchemaReferences

NOWHERE = -1
_MAX_PLACES = 2_000
_LISTS = ("allOf", "anyOf", "oneOf")
_SINGLE = ("if", "then", "else")
_NARROWS_TEXT = frozenset(
    ("enum", "const", "pattern", "format", "maxLength", "$ref", "$dynamicRef", "not", *_LISTS, *_SINGLE)
)


class Place(NamedTuple):
    """A state.

    | field | meaning |
    | --- | --- |
    | `unique` | whether the items of an array must differ |
    | `ample` | whether the items may be any string: then every string that is begun can become a new one |
    | `items` | the state of an array's items |
    | `names` | the states of members, by their names |
    | `other` | the state of all other members |

    `NOWHERE` is the state of values that have no unique items in them.
    """

    unique: bool
    ample: bool
    items: int
    names: dict[str, int]
    other: int


def unique_places(root: Any) -> list[Place]:
    """The states, the one of the whole value first. `root`: the schema in the words of 2020-12. Raises GrammarError if
    there are too many."""
    return _Places(root).places()


class _Places:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._references = SchemaReferences(root)
        self._parts: dict[int, dict[str, Any]] = {}
        self._closures: dict[tuple[int, ...], frozenset[int]] = {}
        self._numbers: dict[frozenset[int], int] = {}
        self._todo: list[frozenset[int]] = []

    def places(self) -> list[Place]:
        self._number([self._root])
        found: list[Place] = []
        while len(found) < len(self._todo):
            if len(found) >= _MAX_PLACES:
                raise GrammarError(f"uniqueItems is not supported in a schema of more than {_MAX_PLACES} places")
            found.append(self._place([self._parts[each] for each in self._todo[len(found)]]))
        useful = _leading_to_unique(found)
        new = {old: number for number, old in enumerate(each for each in range(len(found)) if each in useful)}
        return [_renumbered(place, new) for number, place in enumerate(found) if number in useful]

    def _number(self, schemas: Iterable[Any]) -> int:
        closure = self._closure([each for each in schemas if isinstance(each, dict)])
        if closure not in self._numbers:
            self._numbers[closure] = len(self._todo)
            self._todo.append(closure)
        return self._numbers[closure]

    def _closure(self, schemas: list[dict[str, Any]]) -> frozenset[int]:
        key = tuple(map(id, schemas))
        if key not in self._closures:
            found: dict[int, dict[str, Any]] = {}
            todo: list[Any] = [*schemas]
            while todo:
                part = todo.pop()
                if not isinstance(part, dict) or id(part) in found:
                    continue
                found[id(part)] = part
                todo += [self._references.resolve(part[k], "#", k)[0] for k in ("$ref", "$dynamicRef") if k in part]
                todo += [each for k in _LISTS for each in part.get(k, ())]
                todo += [part[k] for k in _SINGLE if k in part]
                todo += part.get("dependentSchemas", {}).values()
            self._parts |= found
            self._closures[key] = frozenset(found)
        return self._closures[key]

    def _place(self, parts: list[dict[str, Any]]) -> Place:
        unique = any(each.get("uniqueItems") and each.get("maxItems", 2) > 1 for each in parts)
        items = [each for part in parts for each in (*part.get("prefixItems", ()), part.get("items", True))]
        other = self._number(self._members(parts, None))
        named = dict.fromkeys(name for part in parts for name in part.get("properties", {}))
        names = {name: self._number(self._members(parts, name)) for name in named}
        names = {name: number for name, number in names.items() if number != other}
        return Place(unique, unique and self._is_ample(parts), self._number(items), names, other)

    @staticmethod
    def _members(parts: list[dict[str, Any]], name: str | None) -> list[Any]:
        out: list[Any] = []
        for part in parts:
            out += part.get("patternProperties", {}).values()
            if name is not None and name in part.get("properties", {}):
                out.append(part["properties"][name])
            else:
                out += [part[key] for key in ("additionalProperties", "unevaluatedProperties") if key in part]
        return out

    def _is_ample(self, parts: list[dict[str, Any]]) -> bool:
        spoken = [part for part in parts if "items" in part or "prefixItems" in part]
        if len(spoken) != 1 or "prefixItems" in spoken[0]:
            return False
        items = spoken[0]["items"]
        for _ in range(8):
            if not isinstance(items, dict) or "$ref" not in items or _NARROWS_TEXT & (items.keys() - {"$ref"}):
                break
            items = self._references.resolve(items["$ref"], "#")[0]
        return isinstance(items, dict) and items.get("type") == "string" and not _NARROWS_TEXT & items.keys()


def _leading_to_unique(places: list[Place]) -> set[int]:
    useful: set[int] = set()
    while True:
        more = {
            number
            for number, each in enumerate(places)
            if each.unique or useful & {each.items, each.other, *each.names.values()}
        }
        if more == useful:
            return useful
        useful = more


def _renumbered(place: Place, new: dict[int, int]) -> Place:
    names = {name: new.get(number, NOWHERE) for name, number in place.names.items()}
    return place._replace(items=new.get(place.items, NOWHERE), names=names, other=new.get(place.other, NOWHERE))
