"""Workloads share what they say they share, have the lengths that were asked for, and depend on the seed alone."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load import workload
from bench.load.trace import TraceRequest
from bench.load.workload import Lengths, TokenSpan, Vocabulary


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def prompts(sessions: list[workload.Session], vocabulary: Vocabulary | None = None) -> list[list[int]]:
    return [(vocabulary or Vocabulary()).ids(turn.spans) for session in sessions for turn in session.turns]


# ---------------------------------------------------------------- lengths and arrivals


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("512", Lengths("fixed", 512)),
        ("fixed:512", Lengths("fixed", 512)),
        ("uniform:1:9", Lengths("uniform", 1, 9)),
        ("lognormal:1000:0.8", Lengths("lognormal", 1000, 0.8)),
        ("lognormal:1000:0.8:4000", Lengths("lognormal", 1000, 0.8, 4000)),
    ],
)
def test_lengths_are_parsed(text: str, lengths: Lengths) -> None:
    assert Lengths.parse(text) == lengths


WRONG = ["", "0", "-1", "1.5", "x", "uniform:9:1", "uniform:1", "uniform:0:3", "lognormal:0:1", "lognormal:1:-1"]
WRONG += ["normal:1:2", "fixed:1:2", "lognormal:1:1:2:3", "uniform:1:inf", "nan", "lognormal:nan:1"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a length"):
        Lengths.parse(text)


def test_lengths_have_their_distribution() -> None:
    assert Lengths("fixed", 7).sample(rng(), 3) == [7, 7, 7]
    uniform = Lengths("uniform", 3, 5).sample(rng(), 1000)
    assert set(uniform) == {3, 4, 5}
    drawn = Lengths("lognormal", 1000, 0.5, 3000).sample(rng(), 4000)
    assert np.median(drawn) == pytest.approx(1000, rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.5, rel=0.1)
    assert min(drawn) >= 1 and max(drawn) == 3000


def test_poisson_arrivals() -> None:
    times = workload.poisson(rng(), 20.0, 5000)
    gaps = np.diff(times)
    assert times[0] == 0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.05)  # an exponential's mean and deviation are the same
    assert workload.poisson(rng(), 1.0, 0) == []
    with pytest.raises(ValueError, match="above 0"):
        workload.poisson(rng(), 0.0, 3)


# ---------------------------------------------------------------- prompts


keys = st.tuples(st.integers(0, 3), st.integers(0, 5))


@settings(deadline=None)
@given(keys, keys, st.integers(0, 700), st.integers(0, 700))
def test_spans_of_one_key_begin_alike_and_others_do_not(a: tuple, b: tuple, n: int, m: int) -> None:
    vocabulary = Vocabulary(seed=3)
    first, second = vocabulary.ids([TokenSpan(a, n)]), vocabulary.ids([TokenSpan(b, m)])
    assert len(first) == n and all(1000 <= token < 30000 for token in first)
    common = min(n, m)
    if a == b:
        assert first[:common] == second[:common]
    elif common >= 8:
        assert first[:common] != second[:common]
    assert vocabulary.ids([TokenSpan(a, n), TokenSpan(b, m)]) == first + second


def test_prompts_depend_on_the_seed_alone() -> None:
    spans = [TokenSpan((0, 1), 20), TokenSpan((1, 2), 5)]
    assert Vocabulary(1).ids(spans) == Vocabulary(1).ids(spans) != Vocabulary(2).ids(spans)
    assert Vocabulary(1).text(spans) == Vocabulary(1).text(spans) != Vocabulary(2).text(spans)
    assert Vocabulary(1, 5, 6).ids(spans) == [5] * 25


def test_text_has_a_word_for_every_token() -> None:
    text = Vocabulary().text([TokenSpan((0, 1), 9), TokenSpan((0, 2), 4)])
    assert len(text.split()) == 13 and text.startswith(" ") and text.isascii()
    assert text.startswith(Vocabulary().text([TokenSpan((0, 1), 9)]))


# ---------------------------------------------------------------- workloads


def test_unrelated_prompts_share_nothing() -> None:
    sessions = workload.unrelated(rng(), 20, Lengths("uniform", 10, 30), Lengths("fixed", 4))
    assert len({tuple(prompt[:8]) for prompt in prompts(sessions)}) == 20
    assert all(10 <= turn.prompt_tokens <= 30 and turn.output_tokens == 4 for s in sessions for turn in s.turns)
    assert sessions == workload.unrelated(rng(), 20, Lengths("uniform", 10, 30), Lengths("fixed", 4))


def test_groups_share_their_prefix_and_come_mixed() -> None:
    sessions = workload.shared_prefix(rng(), 4, 5, Lengths("fixed", 16), Lengths("fixed", 8), Lengths("fixed", 2))
    made = prompts(sessions)
    heads = [tuple(prompt[:16]) for prompt in made]
    assert len(made) == 20 and {heads.count(head) for head in heads} == {5}
    assert len({tuple(prompt[16:]) for prompt in made}) == 20
    assert heads != sorted(heads, key=heads.index)  # not one group after another


def test_conversations_have_turns_of_their_own_and_pauses() -> None:
    sessions = workload.multi_turn(rng(), 50, 4, Lengths("fixed", 6), Lengths("fixed", 3), think_s=2.0)
    assert [len(session.turns) for session in sessions] == [4] * 50
    assert len({tuple(prompt) for prompt in prompts(sessions)}) == 200
    assert all(session.turns[0].think_s == 0 for session in sessions)
    assert np.mean([t.think_s for s in sessions for t in s.turns[1:]]) == pytest.approx(2.0, rel=0.3)
    silent = workload.multi_turn(rng(), 1, 3, Lengths("fixed", 6), Lengths("fixed", 3), think_s=0.0)
    assert [turn.think_s for turn in silent[0].turns] == [0, 0, 0]


def test_a_trace_shares_its_blocks() -> None:
    rows = [TraceRequest(70, 2, 0.0, (0, 1, 2), 32), TraceRequest(50, 3, 4.0, (0, 9), 32), TraceRequest(80, 1, 5.0)]
    sessions = workload.from_trace(rows, time_scale=0.5)
    first, second, third = prompts(sessions)
    assert (len(first), len(second), len(third)) == (70, 50, 80)
    assert first[:32] == second[:32] and first[32:50] != second[32:50]
    assert [session.arrival_s for session in sessions] == [0.0, 2.0, 2.5]
    assert [session.arrival_s for session in workload.from_trace(rows, None)] == [None] * 3


def test_arrivals_are_given_one_by_one() -> None:
    sessions = workload.unrelated(rng(), 3, Lengths("fixed", 1), Lengths("fixed", 1))
    assert [s.arrival_s for s in workload.arriving(sessions, [0.0, 1.0, math.pi])] == [0.0, 1.0, math.pi]
    with pytest.raises(ValueError, match="shorter"):
        workload.arriving(sessions, [0.0])


# ---------------------------------------------------------------- sharing


def one(*spans: TokenSpan) -> workload.Session:
    return workload.Session((workload.ConversationTurn(spans, 4),))


def test_what_requests_share_is_counted_as_a_cache_would_find_it() -> None:
    a, b, c = (TokenSpan((2, n), 10) for n in range(3))
    assert workload.sharing([one(a, b), one(a, b), one(a, c)]) == (30, 60)
    assert workload.sharing([one(a, b), one(b)]) == (0, 30)  # the same tokens after others are not the same
    assert workload.sharing([one(TokenSpan((2, 0), 6)), one(a, b), one(TokenSpan((2, 0), 3))]) == (6 + 3, 29)
    assert workload.sharing([one(c, TokenSpan((2, 1), 3)), one(c, b, a)]) == (13, 43)  # a cut block, then the whole


def test_a_conversation_shares_all_that_was_said() -> None:
    turns = tuple(workload.ConversationTurn((TokenSpan((3, 0, n), 10),), 5) for n in range(3))
    assert workload.sharing([workload.Session(turns)]) == (15 + 30, 10 + 25 + 40)


def test_unrelated_prompts_share_nothing_and_groups_their_prefix() -> None:
    rest = Lengths("fixed", 8), Lengths("fixed", 2)
    assert workload.sharing(workload.unrelated(rng(), 9, *rest)) == (0, 72)
    shared = workload.shared_prefix(rng(), 3, 4, Lengths("fixed", 16), *rest)
    assert workload.sharing(shared) == (3 * 3 * 16, 12 * 24)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=8))
def test_sharing_is_what_comparing_prompts_finds(rows: list[list[int]]) -> None:
    sessions = [one(*(TokenSpan((2, block), 3) for block in row)) for row in rows]
    made = prompts(sessions)
    common = 0
    for i, prompt in enumerate(made):
        heads = [[p == q for p, q in zip(prompt, other, strict=False)] for other in made[:i]]
        common += max([([*head, False]).index(False) for head in heads], default=0)
    assert workload.sharing(sessions) == (common, sum(map(len, made)))
