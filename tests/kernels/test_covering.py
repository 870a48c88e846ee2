"""The combinations that stand for all."""

from itertools import combinations, product

from tests.kernels.covering import covering_pairs


def test_all_pairs_are_there_in_few_rows() -> None:
    rows = list(product(range(2), range(5), range(4)))
    chosen = covering_pairs(rows)
    seen, all_of_them = ({pair for row in some for pair in combinations(enumerate(row), 2)} for some in (chosen, rows))
    assert seen == all_of_them and set(chosen) <= set(rows)
    assert len(chosen) == 20, "as many as the two longest have pairs"
