"""Kubernetes' quantities, `500m`, `64Mi` or `1e9`, as settings of the configuration may have them.

The chart has the same grammar in `shoal.quantity` (helm/shoal/templates/_fit.tpl).
"""

import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

QUANTITY = r"^([0-9]+(\.[0-9]*)?|\.[0-9]+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]{1,2})?$"
_FACTORS = {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
_FACTORS |= {name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", 1)}
_FACTORS |= {f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)}
# Settings in CPUs or bytes.
SETTINGS = (
    *("cpus_per_rank", "cpus_per_router"),
    *("max_body_bytes", "max_held_bytes", "max_header_bytes", "response_store_bytes"),
)


def number(text: str) -> int | float:
    """A quantity as a number, an integer if it is whole. Raises ValueError."""
    found = re.fullmatch(QUANTITY, text, re.ASCII)
    if found is None:
        raise ValueError(f"{text!r} is not a quantity, as 500m, 64Mi or 1e9")
    suffix = found[3] or ""
    value = Decimal(found[1]) * _FACTORS[suffix] if suffix in _FACTORS else Decimal(text)
    return int(value) if value == value.to_integral_value() else float(value)


def numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with numbers in place of quantities. What is none is left for the field's own check."""
    return {key: _as_number(value) if key in SETTINGS else value for key, value in given.items()}


def _as_number(value: Any) -> Any:
    return number(value) if isinstance(value, str) and re.fullmatch(QUANTITY, value, re.ASCII) else value
