"""Forced tokens that are inserted unverified. The tiny model's tokens are bytes, so a text can be cut into tokens in
one way only: then even insertion changes no output, whatever happens to the sequence meanwhile."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.worker.engines import checked_engines
from tests.worker.fakes import pages_now
from tests.worker.pipelines import pipeline
from worker.drafts import make_drafters, make_jump_forward
from worker.engine.engine import Engine, Finished
from worker.messages import Generate, Grammar, SamplingParams
from worker.structured_output import GrammarCompiler

DRAWN = SamplingParams(max_tokens=60, temperature=1.0, seed=3)
FORM = '\\{"name": "[a-z]{2}", "number": [0-9]{2}, "last": true\\}'
SCHEMA = json.dumps({"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]})
EACH = [
    replace(DRAWN, grammar=Grammar("regex", FORM)),
    replace(DRAWN, grammar=Grammar("regex", FORM), temperature=0),
    replace(DRAWN, grammar=Grammar("json_schema", SCHEMA), frequency_penalty=0.5),
    replace(DRAWN, grammar=Grammar("regex", FORM), max_tokens=11),
    replace(DRAWN, grammar=Grammar("regex", FORM), stop_token_ids=(ord("b"), ord("m")), min_tokens=6),
    replace(DRAWN, max_tokens=20, ignore_eos=True),
    replace(DRAWN, grammar=Grammar("regex", FORM), logprobs=1),
]
PROMPTS = [[(7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(len(EACH))]


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Callable[..., Engine]]:
    """Makes an engine that inserts; at the end no page is lost."""
    with checked_engines(tiny_llama, kv_tokens=4096, jump_forward="insert") as make:
        yield make


def said(finished: list[Finished]) -> list[object]:
    """What clients are told."""
    assert not any(each.failure for each in finished), [each.failure for each in finished]
    return [(each.token_ids, each.finish_reason, len(each.logprobs)) for each in finished]


@pytest.mark.slow
def test_inserted_tokens_need_no_step(engine, monkeypatch) -> None:
    one = engine(jump_forward="off")
    plain = one.generate(PROMPTS, EACH)
    assert not one.load().drafted
    for changes in ({}, {"overlap": True}, {"speculation": "auto"}, {"token_budget": 7, "max_running": 7}):
        other = engine(**changes)
        assert said(other.generate(PROMPTS, EACH)) == said(plain)
        load = other.load()
        assert load.accepted["inserted"] == load.drafted["inserted"] > 80
        if not changes:
            assert load.output_tokens == sum(len(each.token_ids) for each in plain)
    alone = engine()
    assert said(alone.generate(PROMPTS[:1], EACH[:1])) == said(plain)[:1]
    forced = alone.load().accepted["inserted"]
    assert alone.load().steps == len(plain[0].token_ids) - forced < 12
    monkeypatch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)
    crowded = engine(kv_tokens=112, page_size=4, token_budget=64)
    for _ in range(2):  # the second time, no grammar has to be compiled: all are there at once
        assert said(crowded.generate(PROMPTS, EACH)) == said(plain)
    assert crowded.load().preemptions >= 2


@pytest.mark.slow
def test_usage_and_resumption(engine) -> None:
    """Inserted tokens count as drafts that were right. An output can be resumed after any of its messages."""
    plain = engine(jump_forward="off").generate(PROMPTS[:1], EACH[:1])[0].token_ids
    first = engine()
    first.add(Generate(request_id="a", prompt_ids=PROMPTS[0], sampling=EACH[0]))
    heads, accepted = [list[int]()], 0
    while len(first.scheduler):
        if not first.has_work:
            first.readiness.wait()
        for output in first.step():
            heads.append([*heads[-1], *output.token_ids])
            accepted += output.num_accepted
            assert output.num_accepted == output.num_drafted
    assert heads[-1] == plain and accepted == first.load().accepted["inserted"]
    second = engine()
    for i, head in enumerate(heads[:-1]):
        second.add(Generate(request_id=str(i), prompt_ids=PROMPTS[0], output_ids=list(head), sampling=EACH[0]))
    while len(second.scheduler):
        if not second.has_work:
            second.readiness.wait()
        for output in second.step():
            heads[int(output.request_id)] += output.token_ids
    assert all(head == plain for head in heads)


@pytest.mark.parametrize("schedule", ["fixed_chunk", "offline"])
@pytest.mark.slow
def test_in_a_pipeline(engine, tiny_llama: Path, schedule: str) -> None:
    """Where tokens may go from the last stage to the first without the host, those of grammars go over the host."""
    one = engine()
    plain = one.generate(PROMPTS, EACH)
    grammars = GrammarCompiler(tiny_llama, 258, 10.0, one.executor.eos_token_ids)
    own_parts = {"jump_forward": make_jump_forward(tiny_llama, 258), "grammars": grammars}
    with pipeline(tiny_llama, pp=2, own_parts=own_parts, schedule=schedule, overlap=True, kv_tokens=2048) as other:
        assert said(other.generate(PROMPTS, EACH)) == said(plain)
        assert other.load().accepted["inserted"] == one.load().accepted["inserted"]


def test_the_parts_by_setting(tiny_llama: Path) -> None:
    assert [drafter.name for drafter in make_drafters(tiny_llama, 258)] == ["suffix", "grammar"]
    assert [drafter.name for drafter in make_drafters(tiny_llama, 258, grammar=False)] == ["suffix"]
    assert make_jump_forward(tiny_llama / "nowhere", 258) is None
