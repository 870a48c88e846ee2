"""What is expected of outputs, and what is learned from them."""

import math
import random

import numpy as np
import pytest

from worker.lengths import LengthEstimate, OutputLengthPredictor, arrival_features, kendall_tau
from worker.lengths.bounds import NO_LIMIT, longest_output
from worker.lengths.features import NUM_FEATURES
from worker.lengths.predictor import MIN_LEARNED_REQUESTS
from worker.messages import Generate, Grammar, LengthSample, SamplingParams

LIMIT = SamplingParams(max_tokens=1000)


def request(prompt_ids: list[int], sampling: SamplingParams = LIMIT) -> Generate:
    return Generate(request_id="r", prompt_ids=prompt_ids, sampling=sampling)


# ---------------------------------------------------------------- estimates


@pytest.mark.parametrize("produced", [0, 30, 200])
def test_the_expected_rest_is_the_mean_of_the_cut_distribution(produced: int) -> None:
    estimate = LengthEstimate(log_mean=4.0, log_spread=0.8)
    lengths = np.random.default_rng(0).lognormal(4.0, 0.8, 400_000)
    left = np.minimum(lengths[lengths > produced], 300) - produced
    assert estimate.to_come(produced, 300) == pytest.approx(left.mean(), rel=0.01)


@pytest.mark.parametrize(("produced", "expected"), [(300, 0.0), (10**6, 0.0)])
def test_nothing_comes_after_the_limit(produced: int, expected: float) -> None:
    assert LengthEstimate(4.0, 0.8).to_come(produced, 300) == expected


def test_far_beyond_what_was_expected_the_limit_is() -> None:
    assert LengthEstimate(1.0, 0.1).to_come(500, 700) == 200.0


def test_at_least_a_token_comes() -> None:
    assert LengthEstimate(0.0, 0.01).to_come(0, 700) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(
    ("grammar", "longest"),
    [
        (None, NO_LIMIT),
        (Grammar("choice", '["yes", "certainly"]'), 10),
        (Grammar("choice", '["yes"]', after="</think>"), NO_LIMIT),
        (Grammar("choice", "no list"), NO_LIMIT),
        (Grammar("choice", "[]"), NO_LIMIT),
        (Grammar("regex", r"(\d{4}-\d\d|never)"), 8),
        (Grammar("regex", "a+"), NO_LIMIT),
        (Grammar("regex", "("), NO_LIMIT),
        (Grammar("json_object"), NO_LIMIT),
    ],
)
def test_choices_and_finite_expressions_bound_an_output(grammar: Grammar | None, longest: int) -> None:
    assert longest_output(grammar) == longest
    sampling = SamplingParams(max_tokens=1000, grammar=grammar)
    assert OutputLengthPredictor().arrived(request([1], sampling)).longest == longest


# ---------------------------------------------------------------- features


def test_features_are_distinct_and_within_bounds() -> None:
    found = arrival_features(random.Random(0).choices(range(50_000), k=5000), LIMIT)
    assert len(set(found.tolist())) == len(found) and found.max() < NUM_FEATURES


def test_a_request_has_the_features_of_its_words_prefix_and_form() -> None:
    """Those that two requests share are those that they have in common."""
    shared = set(arrival_features(list(range(16)), LIMIT).tolist())
    more = set(arrival_features([*range(16), 99], LIMIT).tolist())
    assert len(shared - more) == 0  # half powers of the length are the same, too
    guided = SamplingParams(max_tokens=1000, grammar=Grammar("regex", "a+"))
    assert len(set(arrival_features(list(range(16)), guided).tolist()) - shared) == 2


def test_the_middle_of_a_long_prompt_is_not_looked_at() -> None:
    prompt = list(range(2000))
    other = [*prompt[:1100], 7, 7, 7, *prompt[1103:]]
    assert arrival_features(prompt, LIMIT).tolist() == arrival_features(other, LIMIT).tolist()


# ---------------------------------------------------------------- learning


def serve(lengths: OutputLengthPredictor, kinds: list[int], seed: int = 0) -> tuple[list[float], list[int]]:
    """Serves a request of each kind: the word 100 + k among random others, and 20 * 4^k tokens, give or take a half.
    Returns the predicted logarithms, and the real lengths."""
    rng, predicted, real = random.Random(seed), [], []
    for kind in kinds:
        expected = lengths.arrived(
            request([*rng.choices(range(100), k=10), 100 + kind, *rng.choices(range(100), k=10)])
        )
        produced = round(20 * 4**kind * rng.uniform(0.5, 1.5))
        if expected.estimate is not None:
            predicted.append(expected.estimate.log_mean)
            real.append(produced)
        lengths.ended(expected, produced, was_cut=False)
    return predicted, real


def test_nothing_is_predicted_before_some_have_ended() -> None:
    lengths = OutputLengthPredictor()
    predicted, _ = serve(lengths, [0] * MIN_LEARNED_REQUESTS)
    assert predicted == [] and lengths.accuracy() == (None, None)
    assert lengths.arrived(request([1])).estimate is not None


def test_a_word_that_tells_the_length_is_found() -> None:
    lengths = OutputLengthPredictor()
    kinds = [random.Random(i).randrange(3) for i in range(600)]
    predicted, real = serve(lengths, kinds)
    tau, ratio = lengths.accuracy()
    assert kendall_tau(np.array(predicted[-200:]), np.array(real[-200:])) > 0.6
    assert tau is not None and ratio is not None
    assert tau > 0.6 and 0.7 < ratio < 1.4


def test_outputs_that_were_cut_teach_that_they_are_longer_and_no_more() -> None:
    lengths = OutputLengthPredictor()
    for _ in range(200):
        lengths.ended(lengths.arrived(request([1, 2, 3])), 500, was_cut=False)
    before = lengths.arrived(request([1, 2, 3])).estimate
    for _ in range(50):
        lengths.ended(lengths.arrived(request([1, 2, 3])), 20, was_cut=True)
    assert before is not None
    assert lengths.arrived(request([1, 2, 3])).estimate == before
    for _ in range(50):
        lengths.ended(lengths.arrived(request([1, 2, 3])), 3000, was_cut=True)
    after = lengths.arrived(request([1, 2, 3])).estimate
    assert after is not None and after.log_mean > before.log_mean + 0.5


def test_the_same_traffic_gives_the_same_predictions() -> None:
    first, second = OutputLengthPredictor(), OutputLengthPredictor()
    assert serve(first, [0, 1, 2] * 60) == serve(second, [0, 1, 2] * 60)


@pytest.mark.parametrize(
    ("second", "tau"), [([1, 2, 3, 4], 1.0), ([4, 3, 2, 1], -1.0), ([1, 2, 4, 3], 4 / 6), ([1, 1, 2, 2], 4 / 24**0.5)]
)
def test_kendalls_tau(second: list[int], tau: float) -> None:
    assert kendall_tau(np.array([1, 2, 3, 4]), np.array(second)) == pytest.approx(tau)


def test_kendalls_tau_of_equals_is_unknown() -> None:
    assert math.isnan(kendall_tau(np.array([1, 1]), np.array([1, 2])))


# ---------------------------------------------------------------- other replicas


def test_a_new_replica_begins_with_what_others_have_seen() -> None:
    """Then it predicts as one that has learned from these outputs itself, and learns no others' any more."""
    known, new = OutputLengthPredictor(), OutputLengthPredictor()
    samples = []
    for number in range(MIN_LEARNED_REQUESTS):
        known.ended(known.arrived(request([number, 7])), 10 + 5 * number, was_cut=number % 2 == 0)
        samples.append(known.take_sample())
    assert known.take_sample() is None, "each is told once"
    told = [sample for sample in samples if sample is not None]
    assert len(told) == MIN_LEARNED_REQUESTS
    new.begin_with(told)
    expected = known.arrived(request([3, 7]))
    assert expected.estimate is not None and new.arrived(request([3, 7])).estimate == expected.estimate
    new.begin_with([LengthSample(told[0].features, 10**6, False)] * 50)
    assert new.arrived(request([3, 7])).estimate == expected.estimate


def test_what_is_no_sample_teaches_nothing() -> None:
    lengths = OutputLengthPredictor()
    lengths.begin_with([LengthSample(b"", 5, False), LengthSample(b"abc", 5, False), LengthSample(b"ab", -1, False)])
    assert lengths.num_learned == 0
