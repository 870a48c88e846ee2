"""Drafts change no output, however right or wrong they are: the tokens, log probabilities and reasons of a replica with
drafts are those of one without."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.worker.engine.test_pipeline import pipeline
from tests.worker.engines import checked_engines
from tests.worker.fakes import any_models, pages_now
from worker.config import WorkerConfig
from worker.drafts import Drafter, Proposal, make_drafters
from worker.engine.cost_store import CostStore
from worker.engine.engine import Engine, Finished, load_components
from worker.messages import Generate, Grammar, Output, SamplingParams
from worker.step import PENDING, Plan

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=5)
EVERY: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": replace(DRAWN, top_k=20, top_p=0.9, min_p=0.01, seed=6),
    "penalties": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "greedy penalties": replace(GREEDY, frequency_penalty=1.5, logit_bias={3: 4.0, 9: -100.0}),
    "min_tokens": replace(DRAWN, min_tokens=9, stop_token_ids=tuple(range(0, 256, 3))),
    "stop": replace(DRAWN, stop_token_ids=tuple(range(0, 256, 9)), seed=11),
    "logprobs": replace(DRAWN, logprobs=3, seed=8),
    "greedy logprobs": replace(GREEDY, logprobs=0),
    "regex": replace(DRAWN, grammar=Grammar("regex", "(abc|[a-f]{2}x){6}"), seed=9),
    "greedy regex": replace(GREEDY, grammar=Grammar("regex", "[0-9]{3}-[0-9]{4}")),
    "everything": replace(
        DRAWN, grammar=Grammar("regex", "([a-f]{3}-){1,5}"), logprobs=1, min_tokens=6, frequency_penalty=0.7
    ),
}
PROMPTS = [[(7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(len(EVERY))]
EACH = list(EVERY.values())


class Cheater(Drafter):
    """Knows the outputs, and says them with errors: as many and as wrong as its random numbers want."""

    name = "cheater"

    def __init__(self, outputs: Sequence[Sequence[int]], right: float, seed: int = 0, prompts=PROMPTS) -> None:
        self._outputs = {tuple(prompt): list(said) for prompt, said in zip(prompts, outputs, strict=True)}
        self._right, self._random = right, random.Random(seed)
        self._said: dict[int, tuple[list[int], int]] = {}
        self.proposed = 0

    def add(self, key, prompt_ids, output_ids, prediction_ids, grammar) -> None:
        assert key not in self._said
        self._said[key] = self._outputs[tuple(prompt_ids)], len(output_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        said, told = self._said[key]
        assert list(token_ids) == said[told : told + len(token_ids)]
        self._said[key] = said, told + len(token_ids)

    def propose(self, key: int, most: int) -> Proposal:
        said, told = self._said[key]
        drafts = said[told : told + self._random.randint(0, most)]
        drafts = [token if self._random.random() < self._right else self._random.randrange(250) for token in drafts]
        self.proposed += len(drafts)
        return Proposal(drafts)

    def remove(self, key: int) -> None:
        del self._said[key]


class Indifferent(CostStore):
    """For drafts, a step takes 1 s whatever it holds: all pay. The schedule has its models."""

    def seconds(self, shape) -> float:
        return 1.0


def with_drafters(model_dir: Path, config: WorkerConfig, drafters: Sequence[Drafter], load=load_components):
    """The parts of a replica whose drafts always pay: without cost models, a step takes 1 s whatever it holds."""
    return load(model_dir, config)._replace(costs=CostStore(), drafters=drafters)


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Makes an engine; at the end no page is lost."""
    with checked_engines(tiny_llama, kv_tokens=4096, num_speculative_tokens=6) as make:
        yield lambda drafters=(), **config: make(partial(with_drafters, drafters=drafters), **config)


def said(finished: Sequence[Finished]) -> list[object]:
    """What clients are told, with log probabilities up to the last bits."""
    assert not any(each.failure for each in finished), [each.failure for each in finished]
    return [
        (
            each.token_ids,
            each.finish_reason,
            [(one.token_id, pytest.approx(one.logprob, abs=1e-4)) for one in each.logprobs],
        )
        for each in finished
    ]


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_no_output_changes(engine, right: float, overlap: bool) -> None:
    plain = engine().generate(PROMPTS, EACH)
    cheater = Cheater([each.token_ids for each in plain], right)
    one = engine([cheater], overlap=overlap)
    drafted = one.generate(PROMPTS, EACH)
    assert said(drafted) == said(plain)
    assert cheater.proposed > 100
    load = one.load()
    assert load.drafted["cheater"] > 50
    if right == 1.0:
        assert load.accepted["cheater"] > 0.9 * load.drafted["cheater"]  # all but end tokens, which nothing follows
        assert load.steps < TOKENS
    elif right == 0.0:
        assert load.accepted.get("cheater", 0) < load.drafted["cheater"] / 10


def test_preempted(engine, monkeypatch) -> None:
    """Drafts take no page from a sequence, and a preempted one goes on as if there had been none."""
    monkeypatch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
    plain = engine().generate(PROMPTS, EACH)
    one = engine([Cheater([each.token_ids for each in plain], 0.8)], kv_tokens=112, page_size=4, token_budget=64)
    assert said(one.generate(PROMPTS, EACH)) == said(plain)
    assert one.load().preemptions >= 2 and one.load().accepted["cheater"] > 20


def outputs(one: Engine) -> Iterator[Output]:
    """All outputs until nothing is left to do."""
    while len(one.scheduler):
        if not one.has_work:
            one._grammar_queue.wait()
        yield from one.step()


def test_resumed(engine) -> None:
    """On another replica, after any number of tokens, with drafts there only."""
    plain = engine().generate(PROMPTS, EACH)
    one = engine([Cheater([each.token_ids for each in plain], 0.8)])
    heads = [each.token_ids[: 1 + i % (len(each.token_ids) - 1)] for i, each in enumerate(plain)]
    for i, (prompt, head) in enumerate(zip(PROMPTS, heads, strict=True)):
        one.add(Generate(request_id=str(i), prompt_ids=prompt, output_ids=list(head), sampling=EACH[i]))
    for output in outputs(one):
        heads[int(output.request_id)] += output.token_ids
    assert heads == [each.token_ids for each in plain]


def test_aborted_while_drafts_are_verified(engine) -> None:
    plain = engine().generate(PROMPTS, EACH)
    one = engine([Cheater([each.token_ids for each in plain], 1.0)], overlap=True)
    for i, prompt in enumerate(PROMPTS):
        one.add(Generate(request_id=str(i), prompt_ids=prompt, sampling=EACH[i]))
    while not one.load().drafted:
        one.step()
    one.abort([str(i) for i in range(0, len(PROMPTS), 2)])
    heard = [list[int]() for _ in PROMPTS]
    for output in outputs(one):
        heard[int(output.request_id)] += output.token_ids
    for i in range(1, len(PROMPTS), 2):
        assert heard[i] == plain[i].token_ids[-len(heard[i]) :]


@pytest.mark.parametrize(
    ("pp", "tp", "overlap", "schedule"),
    [(2, 1, False, "fixed_chunk"), (2, 1, True, "fixed_chunk"), (2, 1, True, "offline"), (1, 2, False, "fixed_chunk")],
)
def test_on_several_ranks(tiny_llama: Path, engine, pp: int, tp: int, overlap: bool, schedule: str) -> None:
    free = [i for i, sampling in enumerate(EACH) if sampling.grammar is None]
    prompts, each = [PROMPTS[i] for i in free], [EACH[i] for i in free]
    plain = engine().generate(prompts, each)
    cheater = Cheater([each.token_ids for each in plain], 0.8, prompts=prompts)
    own_parts = {"drafters": [cheater], "costs": Indifferent(any_models(pp))}
    changes = {"overlap": overlap, "schedule": schedule, "num_speculative_tokens": 6, "kv_tokens": 2048}
    with pipeline(tiny_llama, pp=pp, tp=tp, own_parts=own_parts, **changes) as one:
        plans: list[Plan] = []
        announce = one.executor.announce
        one.executor.announce = lambda plan: (plans.append(plan), announce(plan))[1]
        assert said(one.generate(prompts, each)) == said(plain)
        assert one.load().accepted["cheater"] > 20
    # Drafts may rest on a token that goes from the last stage to the first without the host.
    rests = sum(len(ids) > 1 and ids[0] == PENDING for plan in plans for _, _, ids, *_ in plan.chunks)
    assert rests > 5 if schedule == "offline" else rests == 0


def test_the_drafters_of_a_replica(engine, tiny_llama: Path) -> None:
    """What grammars force and texts repeat, with the drafters that a replica has."""
    vocab_size = 258
    repeats = replace(GREEDY, logit_bias=dict.fromkeys(range(40, 44), 50.0), max_tokens=60)
    forced = replace(GREEDY, grammar=Grammar("regex", '\\{"name": "[a-z]{2}", "number": [0-9]{2}, "last": true\\}'))
    schema = json.dumps({"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]})
    formed = replace(DRAWN, grammar=Grammar("json_schema", schema), max_tokens=60, ignore_eos=False)
    each = [replace(forced, max_tokens=60), repeats, formed, DRAWN]
    plain = engine().generate(PROMPTS[:4], each)
    one = engine(make_drafters(tiny_llama, vocab_size))
    predicted = plain[3].token_ids[:12]
    for i, prompt in enumerate(PROMPTS[:4]):
        prediction = predicted if i == 3 else []
        one.add(Generate(request_id=str(i), prompt_ids=prompt, sampling=each[i], prediction_ids=prediction))
    heard = [list[int]() for _ in each]
    counts = [[0, 0] for _ in each]
    for output in outputs(one):
        heard[int(output.request_id)] += output.token_ids
        counts[int(output.request_id)][0] += output.num_drafted
        counts[int(output.request_id)][1] += output.num_accepted
    assert heard == [each.token_ids for each in plain]
    accepted = [right for _, right in counts]
    assert accepted[0] >= 25 and accepted[2] >= 8 and accepted[3] >= 9, counts
    assert set(one.load().accepted) == {"grammar", "suffix"}
