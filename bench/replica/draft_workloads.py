"""Requests to a chat model that are what drafts are for: forms, schemas, edits, and open chat.

Each round has requests of its own, so no drafter knows an answer from a round before. What rounds have in common is
what requests of one user have in common: a form's keys, an instruction.
"""

import importlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAMES = "Alice Bruno Clara David Emma Farid Grace Hugo Ines Jonas Kira Liam Mona Nils Olga Paul".split()
THINGS = "kettle bicycle lamp printer jacket radio blender tent guitar camera backpack chair".split()
FAULTS = ["arrived broken", "never arrived", "makes a loud noise", "has the wrong colour", "stopped working"]
WISHES = ["I want my money back", "please send a new one", "can you repair it", "tell me what to do"]
TOPICS = ["volcanoes", "the history of bread", "how bees talk", "sailing ships", "the colour of the sky", "chess"]
ASKS = ["Explain {} to a child.", "Write a short story about {}.", "Tell me what everybody should know about {}."]
PLACES = "Lisbon Oslo Kyoto Quito Cairo Perth Turin Bergen Malaga Dublin".split()
# Models of public packages, and the package of each: flat and nested, with enumerations, numbers, lists and unions.
SCHEMAS = [
    ("fastapi.openapi.models", "Info"),
    ("fastapi.openapi.models", "Server"),
    ("openai.types", "FileObject"),
    ("openai.types", "CompletionUsage"),
    ("openai.types", "VectorStore"),
    ("openai.types.fine_tuning", "FineTuningJobEvent"),
    ("anthropic.types", "WebSearchResultBlock"),
    ("anthropic.types", "ModelInfo"),
    ("ray.serve.schema", "LoggingConfig"),
]

AT_ONCE = 4
"""Requests that run at once where throughput is measured. More wait, so that the slowest does not count alone."""

FORM = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 12},
        "product_category": {"enum": ["kitchen", "clothing", "electronics", "outdoor", "furniture", "other"]},
        "problem_severity": {"enum": ["low", "medium", "high"]},
        "requested_action": {"enum": ["refund", "replacement", "repair", "information"]},
        "preferred_contact": {"enum": ["email", "telephone", "letter"]},
        "is_returning_customer": {"type": "boolean"},
        "number_of_items": {"type": "integer", "minimum": 1, "maximum": 99},
        "product_name": {"type": "string", "maxLength": 12},
    },
    "required": [
        *("customer_name", "product_category", "problem_severity", "requested_action"),
        *("preferred_contact", "is_returning_customer", "number_of_items", "product_name"),
    ],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class DraftRequest:
    """A chat request.

    | field | meaning |
    | --- | --- |
    | `text` | the user's message |
    | `max_tokens` | most tokens of the answer |
    | `schema` | a JSON schema for the answer |
    | `prediction` | the client's guess at the answer |
    | `temperature`, `top_p` | of sampling; temperature 0 is greedy |
    """

    text: str
    max_tokens: int
    schema: dict[str, Any] | None = None
    prediction: str = ""
    temperature: float = 0.0
    top_p: float = 1.0


def forms(number: int, count: int) -> list[DraftRequest]:
    """Messages of customers, each to be entered in one form of eight fields with short values."""
    rng, asked = random.Random(f"forms {number}"), []
    for _ in range(count):
        name, thing, fault, wish = (rng.choice(each) for each in (NAMES, THINGS, FAULTS, WISHES))
        said = f"Hello, {name} here. The {thing} that I ordered {fault}. {wish.capitalize()}."
        asked.append(DraftRequest(f"Fill in the form for this message as JSON.\n\n{said}", 128, schema=FORM))
    return asked


def schemas(number: int, count: int) -> list[DraftRequest]:
    """Examples of objects by the schemas of public packages. Raises ImportError if a package is not installed."""
    asked = []
    for module, name in SCHEMAS[:count]:
        schema, place = schema_of(module, name), random.Random(f"schemas {name} {number}").choice(PLACES)
        text = f"Write an example of {name} as JSON, for a company in {place}, by this schema.\n\n{json.dumps(schema)}"
        asked.append(DraftRequest(text[:3000], 96, schema=schema))
    return asked


def schema_of(module: str, name: str) -> dict[str, Any]:
    """The JSON schema of a Pydantic model or dataclass of an installed package."""
    import pydantic

    return pydantic.TypeAdapter(getattr(importlib.import_module(module), name)).json_schema()


def edits(number: int, count: int, predicted: bool) -> list[DraftRequest]:
    """Texts in which a name is to be replaced. `predicted`: the text is given as the prediction of the answer."""
    rng, asked = random.Random(f"edits {number}"), []
    for _ in range(count):
        name, other, place, thing = (rng.choice(each) for each in (NAMES[:8], NAMES[8:], PLACES, THINGS))
        text = (
            f"def deliver_{thing}(orders, warehouse):\n"
            f'    """Sends every {thing} that {name} has ordered to {place}."""\n'
            f"    sent = []\n"
            f"    for order in orders:\n"
            f'        if order.customer != "{name}" or order.item != "{thing}":\n'
            f"            continue\n"
            f'        parcel = warehouse.pack(order.item, order.quantity, destination="{place}")\n'
            f"        parcel.label = warehouse.print_label(order.customer, order.address)\n"
            f"        sent.append(parcel)\n"
            f"    return sent\n"
        )
        wanted = f"Repeat this code, with {other} in place of {name}. Write nothing else.\n\n```python\n{text}```"
        asked.append(DraftRequest(wanted, 160, prediction=f"```python\n{text}```" if predicted else ""))
    return asked


def chats(number: int, count: int) -> list[DraftRequest]:
    """Open questions, sampled at temperature 0.7 and top-p 0.9."""
    rng = random.Random(f"chats {number}")
    texts = [rng.choice(ASKS).format(rng.choice(TOPICS)) for _ in range(count)]
    return [DraftRequest(text, 96, temperature=0.7, top_p=0.9) for text in texts]


@dataclass(frozen=True)
class DraftWorkload:
    """Requests, and how they are sent.

    | field | meaning |
    | --- | --- |
    | `figure` | name of the figure, after the benchmark's |
    | `requests` | the requests of a round, by its number |
    | `at_once` | whether all are sent at once, of which `AT_ONCE` run, and not one after another |
    """

    figure: str
    requests: Callable[[int], list[DraftRequest]]
    at_once: bool = False


WORKLOADS: dict[str, list[DraftWorkload]] = {
    "form": [
        DraftWorkload("form.latency_vs_off", lambda number: forms(number, 4)),
        DraftWorkload("form.throughput_vs_off", lambda number: forms(1_000 + number, 3 * AT_ONCE), at_once=True),
    ],
    "schemas": [DraftWorkload("schemas.vs_off", lambda number: schemas(number, len(SCHEMAS)))],
    "edit": [
        DraftWorkload("edit.predicted.vs_off", lambda number: edits(number, 2, predicted=True)),
        DraftWorkload("edit.unpredicted.vs_off", lambda number: edits(1_000 + number, 2, predicted=False)),
    ],
    "chat": [
        DraftWorkload("chat.vs_off", lambda number: chats(number, 4)),
        DraftWorkload("chat.throughput_vs_off", lambda number: chats(1_000 + number, 2 * AT_ONCE), at_once=True),
    ],
}
"""The workloads of each name."""
