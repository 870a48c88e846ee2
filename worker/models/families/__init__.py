"""The families of models that are served. A module has one family, or those that share most of what they say.

Owns all that Shoal knows of a family: `FAMILIES` of a module has a `Family` for each `model_type`. Modules are found by
themselves; docs/MODELS.md says how to add one. Read `llama.py` first, from which the others differ.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from worker.models.family import Family


def _found() -> dict[str, Family]:
    """The families of all modules by `model_type`. Raises ValueError if two modules have the same."""
    found: dict[str, Family] = {}
    for module in iter_modules(__path__):
        own: dict[str, Family] = import_module(f"{__name__}.{module.name}").FAMILIES
        if twice := found.keys() & own.keys():
            raise ValueError(f"{module.name} and another module both have the families {sorted(twice)}")
        found |= own
    return found


FAMILIES = _found()


def family_of(model_type: str) -> Family:
    """The family that config.json names. Raises ValueError for one that is not served."""
    if model_type not in FAMILIES:
        raise ValueError(f"model type {model_type!r} is not supported; these are: {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def text_part(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of the text part of a model with images; None for one whose text part is not served by itself.
    `values`: its config.json."""
    text: dict[str, Any] = values.get("text_config") or {}
    family = FAMILIES.get(text.get("model_type", ""))
    return text if family is not None and values.get("model_type") in family.text_of else None
