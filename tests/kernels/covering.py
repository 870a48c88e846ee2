"""Which of all combinations of its parameters a test of kernels runs."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

from tests.conftest import NIGHTLY
from tests.kernels.device import ON_GPU

# All, where some stand for the others in the interpreter, which takes long.
EVERY = ON_GPU or NIGHTLY


def covering(axes: dict[str, Sequence[Any]]) -> pytest.MarkDecorator:
    """Parametrises by names and their values: by all combinations if EVERY, and else by so many that any two values of
    different names come together. Names that have one value together are separated by commas, as in pytest."""
    rows = list(product(*(range(len(values)) for values in axes.values())))
    cases = []
    for row in rows if EVERY else covering_pairs(rows):
        case: list[Any] = []
        for (names, values), index in zip(axes.items(), row, strict=True):
            case += values[index] if "," in names else (values[index],)
        cases.append(case)
    return pytest.mark.parametrize(", ".join(axes), cases)


def covering_pairs(rows: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Some of the rows, with all that stands in any two columns of any of them."""
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen
