"""Keywords of JSON Schema by the type of value that they are about."""

from worker.structured_output.json_schema.conjunction import Schema

KEYWORDS_OF = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "propertyNames"),
        *("minProperties", "maxProperties", "unevaluatedProperties"),
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# All other keywords say nothing about a value, or are refused.
# Of `not`, only a list of texts that a string is not, as `negated` leaves it.
ASSERTIONS = frozenset(("type", "enum", "const", *(k for keys in KEYWORDS_OF.values() for k in keys)))


def generated_types(schema: Schema) -> list[str]:
    """Types of the values that are generated for a schema. Without `type`, these are the types that its keywords are
    about. An empty list means any type."""
    types = schema.get("type") or [t for t, keys in KEYWORDS_OF.items() if any(k in schema for k in keys)]
    types = [types] if isinstance(types, str) else list(types)
    return [t for t in types if t != "integer" or "number" not in types]
