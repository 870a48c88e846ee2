"""How choices are ranked."""

import pytest

from shoal.lang.choices import (
    ChoiceScore,
    ChoicesDecision,
    ChoicesSamplingMethod,
    decided,
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


# ---------------------------------------------------------------- methods that were written for SGLang

WORDS = ["cat", "category", "concatenation"]


def asked(*rows, means=None, alone=None):
    """SGLang's arguments."""
    tokens = [[[value, number, None] for number, value in enumerate(row)] for row in rows]
    return {
        "choices": WORDS[: len(rows)],
        "normalized_prompt_logprobs": means or [sum(row) / len(row) for row in rows],
        "input_token_logprobs": tokens,
        "output_token_logprobs": [[] for _ in rows],
        "unconditional_token_logprobs": alone and [[[value, 0, None] for value in row] for row in alone],
    }


def test_methods_take_sglangs_arguments():
    rows = (-0.2,), (-0.2, -0.6), (-0.9, -0.1, -0.1)
    assert token_length_normalized(**asked(*rows)).decision == "cat"
    assert token_length_normalized(**asked(*rows, means=[-3, -2, -1])).decision == "concatenation"  # the means decide
    greedy = greedy_token_selection(**asked(*rows))
    assert greedy.decision == "cat"
    assert greedy.meta_info["greedy_logprob_matrix"][:2] == [[-0.2] * 3, [-0.2, -0.6, pytest.approx(-0.4)]]
    gains = unconditional_likelihood_normalized(**asked(*rows, alone=[(None,), (None, -2.0), (None, -0.1, -0.1)]))
    assert gains.decision == "category"
    assert gains.meta_info["normalized_unconditional_prompt_logprobs"] == pytest.approx([-0.2, 0.6, -0.3])
    with pytest.raises(ValueError, match="without the prompt"):
        unconditional_likelihood_normalized(**asked(*rows))


class Longest(ChoicesSamplingMethod):
    """As one writes a method for SGLang."""

    @property
    def requires_unconditional_logprobs(self):
        return True

    def __call__(
        self,
        *,
        choices,
        normalized_prompt_logprobs,
        input_token_logprobs,
        output_token_logprobs,
        unconditional_token_logprobs=None,
    ):
        told = input_token_logprobs, normalized_prompt_logprobs, unconditional_token_logprobs
        return ChoicesDecision(max(choices, key=len), {"told": told})


def test_a_method_of_sglangs_decides():
    given = scores((-1.0,), (-2.0, -4.0), unconditional=[(None,), (None, -3.0)])
    chosen, meta = decided(Longest(), WORDS[:2], given, 0.0)
    assert chosen == 1
    own, means, alone = meta["told"]
    assert own == [[(-1.0, 0, None)], [(-2.0, 0, None), (-4.0, 1, None)]] and means == [-1.0, -3.0]
    assert alone == [[(None, 0, None)], [(None, 0, None), (-3.0, 1, None)]]
    with pytest.raises(ValueError, match="temperature"):
        decided(Longest(), WORDS[:2], given, 1.0)
    with pytest.raises(ValueError, match="not one of the choices"):
        decided(lambda **asked: ChoicesDecision("dog"), WORDS[:2], given, 0.0)


def test_details_have_sglangs_names():
    chosen, meta = decided(token_length_normalized, WORDS[:2], scores((-1.0,), (-0.5,)), 0.0)
    assert chosen == 1 and meta["values"] == meta["normalized_prompt_logprobs"] == [-1.0, -0.5]
    assert meta["output_token_logprobs"] == [[], []]
