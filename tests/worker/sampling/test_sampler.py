"""The sampler against a slow version that does one row at a time, and what one row must never do to another."""

import math
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.messages import Failure, SamplingParams, TokenLogprobs
from worker.sampling.logprobs import prompt_logprobs
from worker.sampling.sampler import Sampler
from worker.sampling.topk_topp_cpu import uniform
from worker.structured_output import GrammarError

VOCAB = 97
EOS = (3, 5)


class WordGrammar:
    """Stands in for GrammarState: allows the tokens of one of a few given sequences, then EOS."""

    param = "choice"

    def __init__(self, *words: tuple[int, ...]) -> None:
        self.words = words
        self.accepted: list[int] = []
        self.terminated = False

    @property
    def num_tokens(self) -> int:
        return len(self.accepted)

    def allowed(self) -> set[int]:
        n = self.num_tokens
        fits = [w for w in self.words if list(w[:n]) == self.accepted]
        return {w[n] for w in fits if len(w) > n} | ({*EOS} if any(len(w) == n for w in fits) else set())

    def accept(self, token_id: int) -> None:
        if token_id not in self.allowed():
            raise GrammarError(f"{token_id} does not fit")
        self.accepted.append(token_id)
        self.terminated = token_id in EOS


def fill_masks(
    states: list[WordGrammar], bitmask: torch.Tensor, rows: list[int], threads: object
) -> dict[int, GrammarError]:
    """As `worker.structured_output`'s."""
    for state, row in zip(states, rows, strict=True):
        bitmask[row] = 0
        for token in state.allowed():
            bitmask[row, token // 32] |= np.int32(np.uint32(1 << token % 32)).item()
    return {i: GrammarError("nothing fits") for i, state in enumerate(states) if not state.allowed()}


def accept_tokens(states: list[WordGrammar], token_ids: list[int], threads: object) -> dict[int, GrammarError]:
    """As `worker.structured_output`'s."""
    errors = {}
    for i, (state, token_id) in enumerate(zip(states, token_ids, strict=True)):
        try:
            state.accept(token_id)
        except GrammarError as error:
            errors[i] = error
    return errors


@pytest.fixture(autouse=True)
def fake_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.sampling.token_bitmask.fill_masks", fill_masks)
    monkeypatch.setattr("worker.sampling.sampling_metadata.accept_tokens", accept_tokens)


def greedy(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=100, temperature=0.0, **kwargs)


def free(**kwargs) -> SamplingParams:
    return SamplingParams(max_tokens=100, **kwargs)


class Got(NamedTuple):
    """What one row got."""

    token_id: int
    logprobs: TokenLogprobs | None
    failure: Failure | None


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int]) -> list[Got]:
    sampled = sampler.launch(logits, np.array(slots)).result()
    token_ids = [-1 if i in sampled.failures else token_id for i, token_id in enumerate(sampled.token_ids.tolist())]
    logprobs = {i: each for i, (each,) in sampled.logprobs.items()}
    return [Got(token_id, logprobs.get(i), sampled.failures.get(i)) for i, token_id in enumerate(token_ids)]


def one(params: SamplingParams, logits: torch.Tensor, *, prompt=(), output=(), grammar=None) -> Got:
    sampler = Sampler(1, len(logits), "cpu")
    sampler.add(0, params, list(prompt), list(output), EOS, grammar)
    return sample(sampler, logits[None], [0])[0]


def adjusted_slowly(logits: torch.Tensor, p: SamplingParams, prompt: list[int], output: list[int]) -> list[float]:
    """Logits after penalties, bias and bans, one at a time."""
    out = logits.tolist()
    for token in set(prompt) | set(output):
        out[token] = out[token] / p.repetition_penalty if out[token] > 0 else out[token] * p.repetition_penalty
    for token in set(output):
        out[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
    for token, bias in p.logit_bias.items():
        out[token] += bias
    if len(output) < p.min_tokens:
        for token in {*EOS, *p.stop_token_ids}:
            out[token] = -math.inf
    for *before, last in p.bad_words:
        if output[len(output) - len(before) :] == before:
            out[last] = -math.inf
    return [x if not p.allowed_token_ids or i in p.allowed_token_ids else -math.inf for i, x in enumerate(out)]


def distribution_slowly(adjusted: list[float], p: SamplingParams) -> np.ndarray:
    scaled = np.array(adjusted, dtype=np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    ranked = np.argsort(-probs, kind="stable")[: p.top_k or None]
    mass = np.cumsum(probs[ranked]) / (probs[ranked].sum() if p.top_k else 1.0)
    if p.top_p < 1:
        ranked = ranked[: int(np.searchsorted(mass, p.top_p)) + 1]
    ranked = [i for i in ranked if probs[i] >= p.min_p * probs.max()]
    kept = np.zeros_like(probs)
    kept[ranked] = probs[ranked]
    return kept / kept.sum()


tokens = st.integers(0, VOCAB - 1)
params = st.builds(
    SamplingParams,
    max_tokens=st.just(100),
    min_tokens=st.sampled_from([0, 0, 3, 20]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 0.3, 0.9]),
    top_k=st.sampled_from([0, 1, 7]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    stop_token_ids=st.sampled_from([(), (7,), (3, 8)]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 4]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5, 100.0]), max_size=3),
    allowed_token_ids=st.sampled_from([(), (), (), (1, 2, 9, 40)]),
    bad_words=st.lists(st.lists(st.integers(41, 44), min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
)
rows = st.tuples(params, st.lists(tokens, max_size=12), st.lists(tokens, max_size=8))


def test_a_presence_penalty_is_for_output_alone():
    logits = torch.zeros(VOCAB)
    logits[3], logits[4] = 5.0, 4.5
    penalty = greedy(presence_penalty=2.0, repetition_penalty=1.01)  # which looks at the prompt
    assert one(penalty, logits, prompt=[3, 9]).token_id == 3
    assert one(penalty, logits, prompt=[9], output=[3]).token_id == 4


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(batch=st.lists(rows, min_size=1, max_size=5), seed=st.integers(0, 2**32 - 1))
def test_every_row_is_as_by_the_slow_version_and_alone(batch, seed):
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    sampler = Sampler(8, VOCAB, "cpu")
    slots = random.Random(seed).sample(range(8), len(batch))
    for slot, (p, prompt, output) in zip(slots, batch, strict=True):
        sampler.add(slot, p, prompt, output, EOS, None)
    sampled = sample(sampler, logits, slots)
    assert torch.equal(logits, before)
    for got, row, (p, prompt, output) in zip(sampled, logits, batch, strict=True):
        assert got.failure is None
        adjusted = adjusted_slowly(row, p, prompt, output)
        if p.temperature == 0:
            assert adjusted[got.token_id] == pytest.approx(max(adjusted), abs=1e-4)
        else:
            probs = distribution_slowly(adjusted, p)
            assert probs[got.token_id] > 0
            u = uniform(np.array([p.seed % 2**64], dtype=np.uint64), np.array([len(output)], dtype=np.uint64))[0]
            expected = int(np.searchsorted(np.cumsum(probs), u, side="right"))
            assert got.token_id == expected or np.abs(np.cumsum(probs) - u).min() < 1e-5
        assert one(p, row, prompt=prompt, output=output).token_id == got.token_id
        check_logprobs(got, row, p.logprobs)


def check_logprobs(got: Got, logits: torch.Tensor, k: int | None) -> None:
    if k is None:
        assert got.logprobs is None
        return
    reference = logits.double().log_softmax(0)
    assert got.logprobs.token_id == got.token_id
    assert got.logprobs.logprob == pytest.approx(reference[got.token_id].item(), abs=1e-5)
    best = reference.topk(k)
    assert [i for i, _ in got.logprobs.top] == best.indices.tolist()
    assert [x for _, x in got.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


# ---------------------------------------------------------------- greedy


def test_a_greedy_batch_is_argmax_and_ties_go_to_the_first():
    logits = torch.randn(16, 1000, generator=torch.Generator().manual_seed(0)).round()  # many ties
    sampler = Sampler(16, 1000, "cpu")
    for slot in range(16):
        sampler.add(slot, greedy(), [1], [], EOS, None)
    order = list(reversed(range(16)))
    assert [s.token_id for s in sample(sampler, logits, order)] == logits.argmax(1).tolist()


def test_a_temperature_of_almost_nothing_is_greedy():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 50
    for temperature in (1e-30, 1e-6, 1e-4):
        assert one(free(temperature=temperature), logits).token_id == logits.argmax().item()


# ---------------------------------------------------------------- seeds


def run(sampler: Sampler, slot: int, logits: list[torch.Tensor], others: list[int]) -> list[int]:
    """Samples `slot` on each of `logits`, in a batch with `others`, which get something else."""
    out = []
    for step, row in enumerate(logits):
        noise = torch.randn(len(others), len(row), generator=torch.Generator().manual_seed(step))
        place = step % (len(others) + 1)
        batch = torch.cat([noise[:place], row[None], noise[place:]])
        slots = [*others[:place], slot, *others[place:]]
        out.append(sample(sampler, batch, slots)[place].token_id)
    return out


@pytest.mark.parametrize("extra", [{}, {"top_p": 0.9}, {"top_k": 5}, {"frequency_penalty": 1.0, "min_p": 0.01}])
def test_a_seed_gives_the_same_text_whatever_else_runs_and_after_a_move(extra):
    generator = torch.Generator().manual_seed(7)
    logits = [torch.randn(VOCAB, generator=generator) for _ in range(20)]
    p = free(seed=1234, **extra)
    alone = Sampler(1, VOCAB, "cpu")
    alone.add(0, p, [1, 2], [], EOS, None)
    expected = run(alone, 0, logits, [])
    assert len(set(expected)) > 3

    crowd = Sampler(6, VOCAB, "cpu")
    crowd.add(4, p, [1, 2], [], EOS, None)
    others = [(0, greedy()), (1, free()), (2, free(seed=1234, top_p=0.5)), (5, greedy(logprobs=3))]
    for slot, other in others:
        crowd.add(slot, other, [9], [9], EOS, None)
    assert run(crowd, 4, logits, [slot for slot, _ in others]) == expected

    moved = Sampler(6, VOCAB, "cpu")  # preempted after 8 tokens, resumed elsewhere
    moved.add(3, p, [1, 2], [], EOS, None)
    first = run(moved, 3, logits[:8], [])
    moved.remove(3)
    moved = Sampler(2, VOCAB, "cpu")
    moved.add(1, p, [1, 2], first, EOS, None)
    assert first + run(moved, 1, logits[8:], []) == expected


def test_each_seed_gives_its_own_text_again():
    """Zero, negative ones and the largest too."""
    texts = []
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 2**64 - 2) * 2:
        sampler = Sampler(1, VOCAB, "cpu")
        sampler.add(0, free(seed=seed), [], [], EOS, None)
        texts.append(tuple(run(sampler, 0, [torch.zeros(VOCAB)] * 10, [])))
    assert texts[:6] == texts[6:] and len(set(texts)) == 6


def test_without_a_seed_two_requests_differ():
    logits = torch.zeros(1, VOCAB)
    texts = set()
    for _ in range(4):
        sampler = Sampler(1, VOCAB, "cpu")
        sampler.add(0, free(), [], [], EOS, None)
        texts.add(tuple(sample(sampler, logits, [0])[0].token_id for _ in range(10)))
    assert len(texts) == 4


@pytest.mark.slow
def test_frequencies_follow_the_temperature():
    n, vocab = 5_000, 8
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    for temperature in (0.5, 1.0, 1.6):
        sampler = Sampler(n, vocab, "cpu")
        for slot in range(n):
            sampler.add(slot, free(temperature=temperature, seed=slot), [], [], (), None)
        sampled = sample(sampler, logits.repeat(n, 1), list(range(n)))
        counts = np.bincount([s.token_id for s in sampled], minlength=vocab)
        expected = (logits.double() / temperature).softmax(0).numpy() * n
        assert ((counts - expected) ** 2 / expected).sum() < 29.9  # 7 degrees of freedom, 99.99th percentile


# ---------------------------------------------------------------- what holds tokens back


def test_end_tokens_wait_for_min_tokens():
    logits = torch.zeros(VOCAB)
    logits[3], logits[7], logits[11] = 9.0, 8.0, 1.0
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.add(0, greedy(min_tokens=3, stop_token_ids=(7,)), [], [50], EOS, None)  # one is there already
    assert [sample(sampler, logits[None], [0])[0].token_id for _ in range(3)] == [11, 11, 3]


def test_min_tokens_where_every_token_ends_still_gives_one():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(2))
    p = greedy(min_tokens=5, stop_token_ids=tuple(range(VOCAB)))
    assert logits[one(p, logits).token_id] > logits.max() - 0.2
    assert one(free(min_tokens=5, stop_token_ids=tuple(range(VOCAB)), seed=0), logits).failure is None


def test_ignore_eos_leaves_eos_to_be_sampled():
    logits = torch.zeros(VOCAB)
    logits[3] = 5.0
    assert one(greedy(ignore_eos=True), logits).token_id == 3


def test_a_bias_of_100_forces_and_of_minus_100_forbids():
    logits = torch.zeros(VOCAB)
    logits[20] = 30.0
    assert one(free(logit_bias={40: 100.0}), logits).token_id == 40
    assert one(greedy(logit_bias={20: -100.0, 41: 1.0}), logits).token_id == 41


def test_bad_words_are_not_completed():
    logits = torch.zeros(VOCAB)
    logits[10], logits[11], logits[12], logits[13] = 4.0, 3.0, 2.0, 1.0
    sampler = Sampler(1, VOCAB, "cpu")
    words = ((11, 12), (11, 10), (10, 10), (10, 11, 13), (12,))
    sampler.add(0, greedy(bad_words=words), [10], [10], EOS, None)  # the prompt is no part of a word
    assert [sample(sampler, logits[None], [0])[0].token_id for _ in range(4)] == [11, 11, 11, 11]
    assert one(greedy(bad_words=words), logits, prompt=[10]).token_id == 10
    assert one(greedy(bad_words=words), logits, output=[10, 11]).token_id == 11


@pytest.mark.parametrize("right", [0, 1, 2])
def test_bad_words_hold_after_drafts(right):
    """As one token after the other would be, whatever was drafted."""
    logits = torch.zeros(VOCAB)
    logits[10], logits[11], logits[12] = 3.0, 2.0, 1.0
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.add(0, greedy(bad_words=((10, 10), (11, 10, 11), (11, 11))), [1], [], EOS, None)
    alone = [10, 11, 10, 12, 10, 11]
    drafts = [*alone[:right], 50, 50][:2]
    got = sampler.launch(logits.repeat(3, 1), np.zeros(3, dtype=np.int64), draft_ids=np.array([*drafts, -1])).result()
    found = [int(got.token_ids[0]), *got.following.get(0, [])]
    assert found == alone[: right + 1]
    rest = [sample(sampler, logits[None], [0])[0].token_id for _ in range(3)]
    assert found + rest == alone[: len(found) + 3]


def test_only_allowed_tokens():
    logits = torch.zeros(VOCAB)
    logits[10], logits[40], logits[41] = 9.0, 1.0, 0.5
    assert one(greedy(allowed_token_ids=(41, 40)), logits).token_id == 40
    assert one(greedy(allowed_token_ids=(41, 40), logit_bias={10: 100.0}), logits).token_id == 40
    assert {one(free(allowed_token_ids=(41, 40), seed=seed), logits).token_id for seed in range(20)} == {40, 41}
    with pytest.raises(ValueError, match="outside the vocabulary"):
        one(greedy(allowed_token_ids=(VOCAB,)), logits)


def test_all_but_one_filtered():
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4))
    best = logits.argmax().item()
    for p in (free(top_k=1), free(top_p=1e-9), free(min_p=1.0), free(top_k=VOCAB * 2, top_p=1e-6, min_p=1.0)):
        assert one(p, logits).token_id == best


def test_penalties_look_at_what_was_sampled_meanwhile():
    logits = torch.zeros(VOCAB)
    logits[10], logits[11] = 1.0, 0.5
    sampler = Sampler(1, VOCAB, "cpu")
    sampler.add(0, greedy(frequency_penalty=0.4), [10] * 9, [], EOS, None)  # prompts do not count
    assert [sample(sampler, logits[None], [0])[0].token_id for _ in range(4)] == [10, 10, 11, 10]
    sampler.remove(0)
    sampler.add(0, greedy(repetition_penalty=3.0), [10], [], EOS, None)  # these do
    assert [sample(sampler, logits[None], [0])[0].token_id for _ in range(2)] == [11, 10]


def test_a_repetition_penalty_lowers_positive_and_negative_logits():
    logits = torch.full((VOCAB,), -9.0)
    logits[10], logits[11] = -1.0, -1.5
    assert one(greedy(repetition_penalty=2.0), logits, prompt=[10]).token_id == 11
    assert one(greedy(repetition_penalty=0.5), logits, output=[11]).token_id == 11
    logits[12], logits[13] = 3.0, 2.0
    assert one(greedy(repetition_penalty=2.0), logits, prompt=[12]).token_id == 13


# ---------------------------------------------------------------- drafts


def verify(sampler: Sampler, logits: torch.Tensor, drafts: list[int]) -> list[int]:
    """What slot 0 gets in one step with drafts."""
    sampled = sampler.launch(logits, np.zeros(len(logits), dtype=int), draft_ids=np.array([*drafts, -1])).result()
    return [*sampled.token_ids.tolist(), *sampled.following.get(0, [])]


@pytest.mark.parametrize("right", range(5))
@pytest.mark.parametrize(
    "p",
    [
        *(greedy(min_tokens=count) for count in range(9)),
        greedy(frequency_penalty=0.5),
        free(seed=0),
        free(seed=0, min_tokens=4, top_p=0.9, presence_penalty=1.0),
    ],
)
def test_drafts_change_no_token(p, right):
    """A step with four drafts, the first so many of which are right, and steps of one token after it."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(11))
    logits[:, [EOS[0], 11]] += torch.tensor([7.0, 6.0])  # an end token wherever it may be
    plain, drafted = Sampler(1, VOCAB, "cpu"), Sampler(1, VOCAB, "cpu")
    for sampler in (plain, drafted):
        sampler.add(0, p, [1, 2], [50], EOS, None)
    expected = run(plain, 0, list(logits), [])
    drafts = [*expected[:right], *((token + 1) % VOCAB for token in expected[right:4])]
    got = verify(drafted, logits[:5], drafts)
    assert got == expected[: right + 1]
    assert got + run(drafted, 0, list(logits[right + 1 :]), []) == expected


@pytest.mark.parametrize("p", [free(seed=0), greedy(min_tokens=3), greedy(frequency_penalty=0.5)])
def test_drafts_do_not_count_for_the_next_owner_of_their_slot(p):
    """Its sequence was aborted while they were verified."""
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(11))
    logits[:, EOS[0]] += 9.0
    alone, sampler = Sampler(1, VOCAB, "cpu"), Sampler(1, VOCAB, "cpu")
    sampler.add(0, greedy(), [], [], EOS, None)
    drafts = np.array([*logits[:4].argmax(1).tolist(), -1])
    pending = sampler.launch(logits[:5], np.zeros(5, dtype=int), draft_ids=drafts)
    sampler.remove(0)
    for each in (alone, sampler):
        each.add(0, p, [1, 2], [], EOS, None)
    assert len(pending.result().following[0]) == 4
    assert run(sampler, 0, list(logits), []) == run(alone, 0, list(logits), [])


# ---------------------------------------------------------------- grammars


def test_a_grammar_holds_its_row_and_no_other():
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(5))
    sampler = Sampler(3, VOCAB, "cpu")
    grammar = WordGrammar((40, 41, 96), (60,))
    sampler.add(0, greedy(), [], [], EOS, None)
    sampler.add(2, free(seed=1), [], [], EOS, grammar)
    sampler.add(1, greedy(), [], [], EOS, None)
    out = []
    while not grammar.terminated:
        sampled = sample(sampler, logits, [0, 2, 1])
        assert [sampled[0].token_id, sampled[2].token_id] == logits[[0, 2]].argmax(1).tolist()
        out.append(sampled[1].token_id)
    assert tuple(out[:-1]) in grammar.words
    assert out[-1] in EOS


def test_many_rows_that_grammars_lead_beside_others():
    """Greedy ones take another way than those that are drawn or edited."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(5))
    sampler = Sampler(6, VOCAB, "cpu")
    wanted = [logits[0].argmax().item(), None, 41, 60, None, None]
    logits[1, 50] = math.nan
    grammars = [WordGrammar((50, 1)), WordGrammar((41,)), WordGrammar((60, 2)), WordGrammar((7,)), WordGrammar((8,))]
    grammars[4].words = ()
    for slot, params in enumerate([greedy(), greedy(), greedy(), greedy(presence_penalty=1.0), free(), greedy()]):
        sampler.add(slot, params, [], [], EOS, grammars[slot - 1] if slot else None)
    wanted[4] = 7
    got = sample(sampler, logits, [0, 1, 2, 3, 4, 5])
    assert [one.token_id for one in got] == [*(-1 if i in (1, 5) else token for i, token in enumerate(wanted))]
    assert (got[1].failure.kind, got[5].failure.kind) == ("internal", "invalid")


def test_tokens_that_are_known_already():
    """Those of a graph, which are in `last_tokens`: only what others than the plain rows get changes."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(5))
    logits[3, 0] = math.nan
    last_tokens = torch.arange(100, 106)
    sampler = Sampler(6, VOCAB, "cpu", last_tokens)
    for slot, params in enumerate([greedy(), greedy(logit_bias={9: 1e3}), greedy(), greedy(logit_bias={9: 1e3})]):
        sampler.add(slot, params, [], [], EOS, None)
    known = torch.tensor([*logits[:3].argmax(1).tolist(), -1])
    before = known.clone()
    sampled = sampler.launch(logits, np.array([0, 1, -1, 3]), known).result()
    assert sampled.token_ids.tolist() == [before[0], 9, -1] and list(sampled.failures) == [2]
    assert torch.equal(known, before) and last_tokens.tolist() == [100, 9, 102, 0, 104, 105]
    sampler.launch(logits[:3], np.array([2, -1, 0])).result()
    assert last_tokens.tolist() == [before[2], 9, before[0], 0, 104, 105]


def test_a_grammar_wins_over_min_tokens_and_over_a_bias():
    logits = torch.zeros(VOCAB)
    got = one(greedy(min_tokens=50, logit_bias={3: -100.0, 9: 100.0}), logits, output=[60], grammar=WordGrammar((60,)))
    assert got.token_id == 5  # the other end token


def test_a_grammar_is_led_over_what_was_already_output_once():
    grammar = WordGrammar((40, 41, 42))
    grammar.accept(40)
    assert one(greedy(), torch.zeros(VOCAB), output=[40, 41], grammar=grammar).token_id == 42
    assert grammar.accepted == [40, 41, 42]


def test_output_that_does_not_match_the_grammar_is_refused():
    sampler = Sampler(1, VOCAB, "cpu")
    with pytest.raises(GrammarError, match="does not fit"):
        sampler.add(0, greedy(), [], [40, 99 % VOCAB], EOS, WordGrammar((40, 41)))
    sampler.add(0, greedy(), [], [], EOS, None)  # the slot stayed free


def test_a_grammar_at_a_dead_end_fails_its_row_alone():
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(6))
    sampler = Sampler(2, VOCAB, "cpu")
    sampler.add(0, greedy(), [], [], EOS, None)
    grammar = WordGrammar((40, 41))
    sampler.add(1, free(), [], [40], EOS, grammar)
    grammar.words = ()
    good, bad = sample(sampler, logits, [0, 1])
    assert good.token_id == logits[0].argmax().item()
    assert (bad.token_id, bad.failure.kind, bad.failure.param) == (-1, "invalid", "choice")


# ---------------------------------------------------------------- what the model may get wrong


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("p", [greedy(), free(seed=1), free(top_p=0.9), greedy(presence_penalty=1.0), free(logprobs=2)])
def test_logits_that_are_no_numbers_fail_their_row_alone(wrong, p):
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(8))
    expected = [one(p, logits[i]).token_id for i in (0, 2)] if p.seed is not None or p.temperature == 0 else None
    logits[1, 50] = wrong
    sampler = Sampler(3, VOCAB, "cpu")
    for slot in range(3):
        sampler.add(slot, p, [], [], EOS, None)
    sampled = sample(sampler, logits, [0, 1, 2])
    assert sampled[1].failure.kind == "internal"
    assert sampled[1].token_id == -1 and sampled[1].logprobs is None
    assert sampled[0].failure is None and sampled[2].failure is None
    if expected is not None:
        assert [sampled[0].token_id, sampled[2].token_id] == expected


def test_a_row_of_minus_infinity_fails_and_a_few_of_them_do_not():
    assert one(greedy(), torch.full((VOCAB,), -math.inf)).failure is not None
    assert one(free(), torch.full((VOCAB,), -math.inf)).failure is not None
    logits = torch.full((VOCAB,), -math.inf)
    logits[30] = 1.0
    assert one(free(), logits).token_id == 30
    assert one(free(top_k=3), logits).token_id == 30


# ---------------------------------------------------------------- slots


def test_slots_are_taken_once_and_ids_must_exist():
    sampler = Sampler(2, VOCAB, "cpu")
    sampler.add(0, greedy(), [], [], EOS, None)
    with pytest.raises(ValueError, match="in use"):
        sampler.add(0, greedy(), [], [], EOS, None)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.add(1, greedy(logit_bias={VOCAB: 1.0}), [], [], EOS, None)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        sampler.add(1, greedy(min_tokens=1, stop_token_ids=(-1,)), [], [], EOS, None)
    with pytest.raises(ValueError, match="free"):
        sample(sampler, torch.zeros(1, VOCAB), [1])
    sampler.remove(0)
    sampler.remove(0)
    sampler.add(0, greedy(), [], [], EOS, None)


def test_prompt_logprobs_are_those_of_the_given_tokens():
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(300, VOCAB, generator=generator)
    given = torch.randint(VOCAB, (300,), generator=generator).tolist()
    got = prompt_logprobs(logits, np.array(given), 2).result()
    reference = logits.double().log_softmax(1)
    assert [t.token_id for t in got] == given
    assert [t.logprob for t in got] == pytest.approx([reference[i, t].item() for i, t in enumerate(given)], abs=1e-5)
    assert [[i for i, _ in t.top] for t in got] == reference.topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], np.array([], dtype=int), 2).result() == []
    assert [t.top for t in prompt_logprobs(logits[:1], np.array([5]), 0).result()] == [[]]
