"""The families of models that are served. A module has one family, or those that share most of what they say.

Owns all that Shoal knows of a family: `FAMILIES` of a module has a `Family` for each `model_type`. Modules are found by
themselves; docs/MODELS.md says how to add one. Read `llama.py` first, from which the others differ.
"""

from importlib import import_module
from pkgutil import iter_modules

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
