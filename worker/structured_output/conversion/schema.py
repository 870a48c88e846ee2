"""JSON schemas (drafts 4 to 2020-12) as grammars whose every text validates.

A grammar may be narrower than its schema:

- Objects have their properties in the schema's order, and no others unless `additionalProperties` says so.
- Whitespace is at most one space after a comma or a colon.
- Integers have no point and no exponent. A number with a limit has one digit before the point if it has an exponent. It
  differs within 15 digits from a limit that is exclusive.
- Characters that need no escape are not escaped where a string has limits, nor in names that are not declared; `/`,
  `<`, `>`, `&`, `'` and those beyond ASCII may be.
- Formats have the forms that every reader accepts (`formats.py`).
- Where `not`, or the other branches of `oneOf`, leave out more than keywords can say, the rest is left out.
- Within items that must differ (`uniqueItems`), each value has one spelling, and objects have named properties only, or
  one member of any name.

A grammar is never wider: a keyword that a grammar cannot enforce is an error that names it.

Shoal promises that an output never violates its schema. The converter of xgrammar 0.2.8 does not keep that promise. It
ignores some keywords with a warning (`not`, `if`, `then`, `dependent*`, `uniqueItems`, `contains`, `multipleOf` of
numbers), turns `allOf` with several branches into any value, and drops siblings of `$ref` and `anyOf`. In a test of 310
published schemas its grammars accepted 20 of 778 instances that do not fit, and those of this module none of 686.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError

from worker.structured_output.conversion import values
from worker.structured_output.conversion.spelling import JSON, Spelling
from worker.structured_output.conversion.value_counts import ValueCounts
from worker.structured_output.conversion.values import COLON, COMMA
from worker.structured_output.error import ANY, GrammarError, KeywordError
from worker.structured_output.json_schema import drafts
from worker.structured_output.json_schema.combinations import COMBINED, Combinations
from worker.structured_output.json_schema.conjunction import Schema, both
from worker.structured_output.json_schema.keywords import ASSERTIONS, KEYWORDS_OF, generated_types
from worker.structured_output.json_schema.modern import FORMATS, modern
from worker.structured_output.json_schema.references import SchemaReferences
from worker.structured_output.json_schema.unique_places import Place, unique_places
from worker.structured_output.matching.intersections import intersection
from worker.structured_output.rules.ebnf import (
    EMPTY,
    NEVER,
    START,
    Alt,
    Complement,
    Node,
    Ref,
    Repeat,
    Terminal,
    UniqueItems,
    alt,
    dead_end,
    optional,
    prune,
    seq,
    to_text,
)

_MAX_RULES = 5_000
_MAX_COUNTED_MEMBERS = 8
_MAX_PATTERNS_TOLD_APART = 4  # of `patternProperties`: names are told apart by all sets of them
_MAX_SHUFFLED_VALUES = 6  # values of which all orders have a rule: one for each set of them


def schema_to_ebnf(text: str) -> str:
    """The grammar of the JSON schema `text`, in xgrammar's EBNF. Raises GrammarError."""
    return to_text(schema_rules(text), START)


class SchemaGrammar(NamedTuple):
    """The rules of a JSON schema, from `START` on, and where its grammar is narrower: keywords with their places."""

    rules: dict[str, Node]
    narrowed: list[str]


def schema_rules(text: str) -> dict[str, Node]:
    """The rules of the JSON schema `text`, from `START` on. Raises GrammarError."""
    return schema_grammar(text).rules


def schema_grammar(text: str) -> SchemaGrammar:
    """The grammar of the JSON schema `text`. Raises GrammarError."""
    schema = parsed(text)
    try:
        with refusals():
            converter = SchemaConverter(schema)
            return SchemaGrammar(converter.rules(converter.whole), converter.narrowed)
    except GrammarError as error:
        raise GrammarError(drafts.remark(schema, str(error))) from None


def schema_places(text: str) -> list[Place]:
    """The places of unique items in the JSON schema `text`, which has rules. Raises GrammarError."""
    return unique_places(SchemaConverter(json.loads(text)).root)


def parsed(text: str) -> Any:
    """The JSON schema `text`, which need not be valid. Raises GrammarError if it is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not valid JSON: {error}") from None


def any_object_rules() -> dict[str, Node]:
    """The rules of any JSON object, from `START` on."""
    return prune({**values.common_rules(), START: Ref("object")}, START) or {}


def any_value_rules() -> dict[str, Node]:
    """The rules of any JSON value, from `START` on."""
    return prune({**values.common_rules(), START: Ref("any")}, START) or {}


@contextmanager
def refusals() -> Iterator[None]:
    """Raises GrammarError in place of other errors that a converter has with a wrong schema."""
    try:
        yield
    except SchemaError as error:
        where = "/".join(["#", *map(str, error.absolute_path)])
        why = drafts.former(error) or str(error.cause or error.message)[:300]
        raise GrammarError(f"the JSON schema is not valid at {where}: {why}") from None
    except re.error as error:
        raise GrammarError(f"a regular expression of the JSON schema is not supported: {error}") from None
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


class SchemaConverter:
    """Converts one schema, and the parts of it, to nodes and the rules that these refer to."""

    def __init__(
        self, root: Any, *, spelling: Spelling = JSON, rules: dict[str, Node] | None = None, prefix: str = ""
    ) -> None:
        """`rules`: those of a larger grammar, which get the new ones too. The names of these begin with `prefix`.
        Raises SchemaError (of jsonschema) if `root` is not a schema."""
        root = modern(root)
        Draft202012Validator.check_schema(root, format_checker=FORMATS)
        self._root = root
        self._references = SchemaReferences(root)
        self._validator = Draft202012Validator(root)
        self.combinations = Combinations(root, self._references, self._validator)
        self._counts = ValueCounts(self.combinations.simple, self.listed)
        self._distinct = False  # whether each value has one spelling
        self._orders: set[tuple[str, str]] = set()  # of names of members, where values have one spelling
        self._spelling = spelling
        self._prefix = prefix
        self._names: dict[str, str] = {}
        self._places: dict[str, str] = {}
        self._narrowed: dict[str, None] = {}
        self._rules = values.common_rules(spelling) if rules is None else rules

    @property
    def root(self) -> Any:
        """The whole schema, in the words of 2020-12."""
        return self._root

    @property
    def narrowed(self) -> list[str]:
        """Keywords, with their places, of which the grammar does not have all values. `other members`: those that an
        object's schema does not name and does not speak of."""
        return [*self._narrowed, *self.combinations.narrowed_at]

    @property
    def whole(self) -> Node:
        """The node for the whole schema."""
        return self.value(self._root, "#")

    def rules(self, root: Node) -> dict[str, Node]:
        """All rules, from `START` on, which matches what `root` does. Raises GrammarError if nothing does."""
        rules = prune({**self._rules, START: root}, START)
        if rules is None:
            raise self.nothing(root)
        return rules

    def nothing(self, root: Node) -> GrammarError:
        """The refusal of `root`, which matches nothing."""
        way = dead_end({**self._rules, START: root}, START)
        at = next((self._places[name] for name in reversed(way) if name in self._places), "#")
        return GrammarError(
            "no value satisfies the JSON schema" + (f": none satisfies its part at {at}" if at != "#" else "")
        )

    def value(self, schema: Any, at: str) -> Node:
        """The node for a schema. Schemas with the same text share a rule, so a schema may contain itself."""
        if schema is True or schema == {}:
            return Ref("distinct_any" if self._distinct else "any")
        if schema is False:
            return NEVER
        key = ("distinct " if self._distinct else "") + json.dumps(schema)
        if key not in self._names:
            if len(self._names) >= _MAX_RULES:
                raise KeywordError(f"the JSON schema has more than {_MAX_RULES} parts", ANY, at)
            self._names[key] = name = f"{self._prefix}v{len(self._names)}"
            self._places[name] = at
            self._rules[name] = self._build(schema, at)
        return Ref(self._names[key])

    # ------------------------------------------------------------ combinations

    def _build(self, schema: Schema, at: str) -> Node:
        self.combinations.refuse(schema, at)
        combined = [key for key in COMBINED if key in schema]
        own = {k: v for k, v in schema.items() if k in ASSERTIONS}
        if not combined:
            return self._typed(own, at)
        if not own and len(combined) == 1:
            key = combined[0]
            if key in ("$ref", "$dynamicRef"):
                return self.value(*self._references.resolve(schema[key], at, key))
            if key == "oneOf":
                exclusive = self.combinations.one_of(schema["oneOf"], at)
                if exclusive is not None:
                    return alt(self._typed(each, at) for branch in exclusive for each in branch)
            if key in ("anyOf", "oneOf") or (key == "allOf" and len(schema[key]) == 1):
                return alt(self.value(branch, f"{at}/{key}/{i}") for i, branch in enumerate(schema[key]))
        return alt(self._typed(simple, at) for simple in self.combinations.simple(schema, at))

    # ------------------------------------------------------------ one schema by itself

    def _typed(self, schema: Schema, at: str) -> Node:
        if "enum" in schema or "const" in schema:
            return alt(map(self.constant, self.listed(schema)))
        types = generated_types(schema) or ([] if "not" not in schema else [*KEYWORDS_OF, "boolean", "null"])
        return alt(self._of_type(t, schema, at) for t in types) if types else self.value(True, at)

    def listed(self, schema: Schema) -> list[Any]:
        """The values of `enum` or `const` that satisfy the rest of the schema, which has neither reference nor
        combination."""
        listed = schema["enum"] if "enum" in schema else [schema["const"]]
        validator = self._validator.evolve(schema=schema)
        return [value for value in listed if validator.is_valid(value)]

    def constant(self, value: Any) -> Node:
        """Exactly this value."""
        if self._distinct:
            value = values.simple_number(value)
        return self._spelling.constant(value)

    def _of_type(self, type_: str, schema: Schema, at: str) -> Node:
        match type_:
            case "object":
                return self._object(schema, at)
            case "array":
                return self._array(schema, at)
            case "string":
                return self._string(schema, at)
            case "boolean":
                return Alt(tuple(map(Terminal, self._spelling.words[:2])))
            case "null":
                return Terminal(self._spelling.words[2])
        if type_ == "number":
            self._narrow([key for key in ("exclusiveMinimum", "exclusiveMaximum") if key in schema], at)
        number = values.number(schema, at, whole=type_ == "integer")
        return values.distinct_number(number) if self._distinct else number

    def _narrow(self, keywords: Iterable[str], at: str) -> None:
        self._narrowed |= {f"{keyword} at {at}": None for keyword in keywords}

    def _string(self, schema: Schema, at: str) -> Node:
        self._narrow(values.narrowed_of_string(schema), at)
        return self._one_way(values.string(schema, at, self._spelling))

    def _name(self, name: str) -> Node:
        """The name of a member."""
        return self._spelling.constant(name)

    def _any_name(self) -> Node:
        return self._one_way(Ref("string"))

    def _array(self, schema: Schema, at: str) -> Node:
        prefix = schema.get("prefixItems", [])
        items = schema.get("items", not prefix)
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        if most is not None and most < least:
            return NEVER
        if schema.get("uniqueItems") and (most is None or most > 1):
            return self._unique(prefix, items, least, most, at)
        return self._any_items(prefix, items, least, most, at)

    def _any_items(self, prefix: list[Any], items: Any, least: int, most: Any, at: str) -> Node:
        shown = prefix if most is None else prefix[: int(most)]
        nodes = [self.value(s, f"{at}/prefixItems/{i}") for i, s in enumerate(shown)]
        return values.array(nodes, self.value(items, f"{at}/items"), least, None if most is None else int(most))

    def _unique(self, prefix: list[Any], items: Any, least: int, most: Any, at: str) -> Node:
        """An array of unique items. If they are a few given values, its grammar says so. Otherwise, it writes each
        value in one way, so that their texts can be compared."""
        listed = None if prefix else self._all_values(items, f"{at}/items")
        if listed is not None and (len(listed) <= _MAX_SHUFFLED_VALUES or most is None or most >= len(listed)):
            return self._given(listed, least, most)
        for i, each in enumerate([*prefix, *[items] * (least > len(prefix))]):
            if not self._counts.has(each, i + 1 if i < len(prefix) else least, at):
                raise KeywordError(
                    f"uniqueItems at {at} is not supported: there may be too few different items", "uniqueItems", at
                )
        self._narrow(["uniqueItems"], at)
        self._rules |= values.distinct_rules()
        before, self._distinct = self._distinct, True
        array = self._any_items(prefix, items, least, most, at)
        self._distinct = before
        return UniqueItems(array, f"uniqueItems at {at}")

    def _all_values(self, items: Any, at: str) -> list[Any] | None:
        """All values that satisfy a schema, each once. None unless the schema lists them, and they are simple."""
        found: dict[str, Any] = {}
        for simple in self.combinations.simple(items, at):
            if "enum" in simple or "const" in simple:
                listed = self.listed(simple)
            elif simple.get("type") == "boolean":
                listed = [False, True]
            else:
                return None
            if any(isinstance(each, list | dict | float) for each in listed):
                return None
            found.update({json.dumps(each): each for each in listed})
        return list(found.values())

    def _given(self, listed: list[Any], least: int, most: Any) -> Node:
        """An array of `least` to `most` of these values, each at most once: in any order if there are few values, and
        otherwise in theirs."""
        nodes = [self.constant(each) for each in listed]
        most = len(nodes) if most is None else min(int(most), len(nodes))
        if least > most:
            return NEVER
        if len(nodes) > _MAX_SHUFFLED_VALUES:
            body = self.members([(node, False) for node in nodes], None, least)
        else:
            body = self._shuffled(nodes, least, most)
        return seq(Terminal("["), body, Terminal("]"))

    def _shuffled(self, nodes: list[Node], least: int, most: int) -> Node:
        """`least` to `most` of the nodes in any order, with commas."""
        after: dict[tuple[int, ...], Node] = {}  # by the nodes that are left
        for size in range(len(nodes) + 1):
            taken = len(nodes) - size
            comma = (COMMA,) if taken else ()
            for left in combinations(range(len(nodes)), size):
                choices: list[Node] = [EMPTY] if least <= taken <= most else []
                if taken < most:
                    others = ((nodes[i], after[tuple(j for j in left if j != i)]) for i in left)
                    choices += [seq(*comma, node, later) for node, later in others]
                after[left] = self._rule(alt(choices))
        return after[tuple(range(len(nodes)))]

    def _object(self, schema: Schema, at: str) -> Node:
        properties, needed, more = self.properties(schema, at, counts=True)
        if not properties:
            return self._map(schema, more, at)
        if self._distinct:
            self._keep_order(list(properties), at)
        extra = NEVER if self._distinct else self._extra(schema, properties, more, at)
        members = [
            (seq(self._name(name), COLON, self.value(sub, f"{at}/properties/{name}")), name in needed)
            for name, sub in properties.items()
        ]
        least = int(schema.get("minProperties", 0))
        return seq(Terminal("{"), self.members(members, None if extra == NEVER else extra, least), Terminal("}"))

    def _keep_order(self, names: list[str], at: str) -> None:
        """Raises GrammarError if names of members, in items that must differ, come in two orders."""
        pairs = set(combinations(names, 2))
        if any((later, first) in self._orders for first, later in pairs):
            raise KeywordError(
                f"uniqueItems is not supported where properties have several orders, as at {at}", "uniqueItems", at
            )
        self._orders |= pairs

    def properties(self, schema: Schema, at: str, *, counts: bool = False) -> tuple[dict[str, Any], set[str], Any]:
        """The properties of a schema without `$ref` and combinations: their schemas by name, the names of those that an
        object needs, and `additionalProperties`, None if there is none. `counts`: the caller counts them, by
        `minProperties`."""
        more = schema.get("additionalProperties")
        if more is None and schema.get("unevaluatedProperties") is False:
            more = False
        properties = dict(schema.get("properties", {}))
        required = list(dict.fromkeys(schema.get("required", [])))
        for name in required:
            if name not in properties:
                spoken = any(_is_found(each, name, at) for each in schema.get("patternProperties", {}))
                properties[name] = True if more is None or spoken else more
        if not properties:
            return {}, set(), more
        self._check_names(schema, properties, at)
        properties, needed = _count_properties(
            schema, properties, set(required), more not in (None, False), at, counts=counts
        )
        return properties, needed, more

    def _check_names(self, schema: Schema, properties: dict[str, Any], at: str) -> None:
        """Applies `patternProperties` and `propertyNames` to declared properties. Raises GrammarError where a grammar
        cannot."""
        patterns = schema.get("patternProperties", {})
        for expression, value in patterns.items():
            for name in properties:
                if _is_found(expression, name, at):
                    properties[name] = both(properties[name], value)
        if "propertyNames" in schema:
            validator = self._validator.evolve(schema=schema["propertyNames"])
            for name in properties:
                if not validator.is_valid(name):
                    properties[name] = False

    def _extra(self, schema: Schema, properties: dict[str, Any], more: Any, at: str) -> Node:
        """A member with a name that is not declared. NEVER if there is none."""
        patterns: dict[str, Any] = schema.get("patternProperties", {})
        allowed = self._allowed_names(schema, at)
        limits = [] if allowed is None else [allowed]
        if properties:
            limits.append(values.other_name(properties, self._spelling))
        what = f"{'propertyNames' if allowed is not None else 'patternProperties'} at {at}"
        found: list[Node] = []
        for names, value, place in self._named_by(patterns, more, at):
            name = self._one_way(intersection([*names, *limits] or [self._any_name()], what))
            if name != NEVER:
                found.append(seq(name, COLON, self.value(value, f"{at}/{place}")))
        return alt(found)

    def _named_by(self, patterns: dict[str, Any], more: Any, at: str) -> Iterator[tuple[list[Node], Any, str]]:
        """The kinds of members by the patterns that are found in their names: what the names match, all of it, and the
        schema of the values with its place."""
        names = {each: values.found_name(each, at, self._spelling) for each in patterns}
        many = len(patterns) > _MAX_PATTERNS_TOLD_APART
        self._narrow(["patternProperties"] * many + ["other members"] * (more is None), at)
        for kind in [
            kind for size in range(1, 2 if many else len(patterns) + 1) for kind in combinations(patterns, size)
        ]:
            if any(_are_apart(*pair) for pair in combinations(kind, 2)):
                continue
            others = [each for each in patterns if each not in kind and not any(_are_apart(each, k) for k in kind)]
            value = patterns[kind[0]]
            for each in (*kind[1:], *(others if many else ())):
                value = both(value, patterns[each])
            without = [] if many else [Complement(names[each]) for each in others if names[each] != NEVER]
            yield [*(names[each] for each in kind), *without], value, f"patternProperties/{kind[0]}"
        if more not in (None, False):
            without = [Complement(each) for each in names.values() if each != NEVER]
            yield [values.any_name(self._spelling), *without] if without else [], more, "additionalProperties"

    def _allowed_names(self, schema: Schema, at: str) -> Node | None:
        """The names that `propertyNames` allows, without references to rules. None if it allows all."""
        if "propertyNames" not in schema:
            return None
        place = f"{at}/propertyNames"
        parts = self.combinations.simple({"allOf": [schema["propertyNames"], {"type": "string"}]}, place)
        names = alt(self._typed(each, place) for each in parts)
        return None if _has_choice(names, Ref("string")) else names

    def _one_way(self, text: Node) -> Node:
        return values.distinct_string(text) if self._distinct else text

    def members(self, members: list[tuple[Node, bool]], extra: Node | None, least: int = 0) -> Node:
        """`least` or more of an object's members in order with commas, then any number of `extra`. Members not needed
        are optional. Of `extra`, one counts at most: the names of two may be the same."""
        # Built from the last member to the first. `after[n]` matches members i and later where n have come before, n
        # being `least` for more: each is preceded by a comma. `first` matches them if there has been none.
        least = 0 if least <= sum(needed for _, needed in members) else least
        more: Node = Repeat(seq(COMMA, extra), 0, None) if extra is not None else EMPTY
        after: list[Node] = [NEVER] * least + [more]
        first: Node = NEVER if least else EMPTY
        if extra is not None:
            after[-2:-1] = [seq(COMMA, extra, more)] * len(after[-2:-1])
            first = optional(seq(extra, more)) if not least else seq(extra, more) if least == 1 else NEVER
        for member, needed in reversed(members):
            rules = [self._rule(each) for each in after]
            here: list[Node] = [seq(member, rules[min(n + 1, least)]) for n in range(least + 1)]
            first = here[0] if needed else Alt((here[0], self._rule(first)))
            for n, (one, later) in enumerate(zip(here, rules, strict=True)):
                after[n] = seq(COMMA, one) if needed else Alt((seq(COMMA, one), later))
        return first

    def _rule(self, node: Node) -> Node:
        if isinstance(node, Ref | Terminal) or node == NEVER:
            return node
        name = f"m{len(self._rules)}"
        self._rules[name] = node
        return Ref(name)

    def _map(self, schema: Schema, more: Any, at: str) -> Node:
        """An object whose schema names no property."""
        least, most = int(schema.get("minProperties", 0)), schema.get("maxProperties")
        if least > 1:
            raise KeywordError(
                f"minProperties at {at}: more than 1 is supported only for properties that are named",
                "minProperties",
                at,
            )
        if self._distinct:
            most = 1 if most is None else min(int(most), 1)  # the order of several would not matter
        if most is not None and most < least:
            return NEVER
        if "patternProperties" in schema:
            member = self._extra(schema, {}, more, at)
        else:
            key = self._any_name()
            if "propertyNames" in schema:
                key = self.value({"allOf": [schema["propertyNames"], {"type": "string"}]}, f"{at}/propertyNames")
            member = seq(key, COLON, self.value(True if more is None else more, f"{at}/additionalProperties"))
        return seq(Terminal("{"), values.listed([], member, least, None if most is None else int(most)), Terminal("}"))


def _has_choice(node: Node, choice: Node) -> bool:
    return node == choice or (isinstance(node, Alt) and any(_has_choice(each, choice) for each in node.choices))


def _is_found(expression: str, name: str, at: str) -> bool:
    try:
        return re.search(expression, name) is not None
    except re.error as error:
        raise KeywordError(
            f"patternProperties at {at}: {expression!r} is not valid: {error}", "patternProperties", at
        ) from None


def _first_letter(expression: str) -> str | None:
    """The character that all matches begin with, None if that is not sure."""
    match = re.match(r"\^(?:([A-Za-z0-9_@ -])|\\([^A-Za-z0-9]))(?![*?{])", expression)
    return None if match is None or "|" in expression else match[1] or match[2]


def _are_apart(one: str, other: str) -> bool:
    """Whether certainly no text matches both patterns."""
    first = {_first_letter(one), _first_letter(other)}
    return len(first) == 2 and None not in first


def _count_properties(
    schema: Schema, properties: dict[str, Any], needed: set[str], more: bool, at: str, *, counts: bool
) -> tuple[dict[str, Any], set[str]]:
    """Applies `minProperties` and `maxProperties` to named properties. Returns those that stay, and the names of those
    that are needed."""
    least, most = schema.get("minProperties", 0), schema.get("maxProperties")
    if least > len(needed):
        if not more and least == len(properties):
            needed = set(properties)
        elif not counts or least > _MAX_COUNTED_MEMBERS:
            raise KeywordError(
                f"minProperties at {at} is supported only where it makes all properties, or none, needed",
                "minProperties",
                at,
            )
    if most is not None and (more or most < len(properties)):
        if more or most != len(needed):
            raise KeywordError(
                f"maxProperties at {at} is supported only where it allows all properties, or just the required",
                "maxProperties",
                at,
            )
        properties = {name: sub for name, sub in properties.items() if name in needed}
    return properties, needed
