"""How choices are ranked."""

import pytest

from shoal.lang.choices import (
    ChoiceScore,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)


def scores(*rows, unconditional=None):
    alone = unconditional or [None] * len(rows)
    return [ChoiceScore(tuple(range(len(row))), tuple(row), other) for row, other in zip(rows, alone, strict=True)]


def best(method, given):
    values = method.values(given)
    return max(range(len(values)), key=values.__getitem__)


def test_the_mean_decides_not_the_sum():
    assert best(token_length_normalized, scores((-1.0,), (-0.6, -0.8))) == 1


def test_the_first_of_equal_ones_is_chosen():
    assert best(token_length_normalized, scores((-1.0,), (-1.0,))) == 0


def test_greedy_follows_the_likeliest_token():
    assert best(greedy_token_selection, scores((-0.5, -9.0), (-0.6, -0.1))) == 0
    assert best(greedy_token_selection, scores((-0.5, -3.0), (-0.5, -0.1), (-0.9, 0.0))) == 1


@pytest.mark.parametrize(("long", "chosen"), [((-0.5, -0.2), 1), ((-0.5, -0.9), 0)])
def test_greedy_goes_on_with_the_mean_of_a_choice_that_has_ended(long, chosen):
    assert best(greedy_token_selection, scores((-0.5,), long)) == chosen


def test_the_gain_of_the_prompt_decides():
    given = scores((-1.0, -1.0), (-2.0, -2.0), unconditional=[(None, -1.0), (-6.0, -4.0)])
    assert unconditional_likelihood_normalized.values(given) == [-0.5, 3.0]
    assert best(unconditional_likelihood_normalized, given) == 1
    assert unconditional_likelihood_normalized.needs_unconditional


def test_scores_without_the_prompt_are_needed():
    with pytest.raises(ValueError, match="without the prompt"):
        unconditional_likelihood_normalized.values(scores((-1.0,)))
    with pytest.raises(ValueError, match="other tokens"):
        unconditional_likelihood_normalized.values(scores((-1.0,), unconditional=[(-1.0, -2.0)]))
