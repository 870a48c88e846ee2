"""Drafts change no output, however right or wrong they are: the tokens, log probabilities and reasons of a replica with
drafts are those of one without."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.worker.drafting import DRAWN, EACH, GREEDY, PROMPTS, TOKENS, Cheater, outputs, said
from tests.worker.engines import checked_engines
from tests.worker.fakes import any_models, pages_now
from tests.worker.pipelines import pipeline
from worker.config import WorkerConfig
from worker.drafts import Drafter, make_drafters
from worker.engine.cost_store import CostStore
from worker.engine.engine import Engine, load_components
from worker.messages import Generate, Grammar
from worker.step import PENDING, Plan


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


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.slow
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
        assert one.generate(PROMPTS[:1], EACH[:1])[0].token_ids == plain[0].token_ids
        assert one.load().steps - load.steps < TOKENS
    elif right == 0.0:
        assert load.accepted.get("cheater", 0) < load.drafted["cheater"] / 10


@pytest.mark.slow
def test_preempted(engine, monkeypatch) -> None:
    """Drafts take no page from a sequence, and a preempted one goes on as if there had been none."""
    monkeypatch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
    plain = engine().generate(PROMPTS, EACH)
    one = engine([Cheater([each.token_ids for each in plain], 0.8)], kv_tokens=112, page_size=4, token_budget=64)
    assert said(one.generate(PROMPTS, EACH)) == said(plain)
    assert one.load().preemptions >= 2 and one.load().accepted["cheater"] > 20


@pytest.mark.slow
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


@pytest.mark.slow
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
@pytest.mark.slow
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


@pytest.mark.slow
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
