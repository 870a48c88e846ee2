"""Loads send what the workload says, when it says so, and lose nothing that goes wrong."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from bench.load.client import Abilities, Endpoint
from bench.load.http import Http
from bench.load.load import LoadRun
from bench.load.workload import ConversationTurn, Session, TokenSpan, Vocabulary

Fake = Any  # of conftest.py


def session(number: int, turns: int = 1, arrival_s: float | None = None, think_s: float = 0.0) -> Session:
    return Session(
        tuple(
            ConversationTurn((TokenSpan((0, number, turn), 5),), 2, think_s if turn else 0.0) for turn in range(turns)
        ),
        arrival_s,
    )


def loaded(fake: Fake, sessions: list[Session], concurrency: int | None, **how: Any) -> LoadRun:
    async def run() -> LoadRun:
        http = Http(fake.url)
        endpoint = Endpoint(how.get("chat", False), "fake", {}, Abilities(prompt_ids=how.get("ids", True)))
        load = LoadRun(sessions, http, endpoint, Vocabulary(), 30.0)
        await load.run(concurrency)
        http.close()
        return load

    return asyncio.run(run())


def test_an_open_load_sends_at_the_times_of_arrival(fake: Fake) -> None:
    load = loaded(fake, [session(0, arrival_s=0.2), session(1, arrival_s=0.0), session(2, arrival_s=0.1)], None)
    assert [(sample.session, sample.due_s) for sample in load.samples] == [(1, 0.0), (2, 0.1), (0, 0.2)]
    assert all(sample.error is None and sample.sent_s >= sample.due_s for sample in load.samples)
    ids = Vocabulary().ids
    assert [body["prompt"] for body in fake.bodies] == [ids([TokenSpan((0, n, 0), 5)]) for n in (1, 2, 0)]


def test_an_open_load_needs_arrivals(fake: Fake) -> None:
    with pytest.raises(ValueError, match="arrival time for every session"):
        loaded(fake, [session(0)], None)


def test_a_closed_load_keeps_so_many_under_way(fake: Fake) -> None:
    load = loaded(fake, [session(n) for n in range(9)], 3)
    assert sorted(sample.session for sample in load.samples) == list(range(9)) and load.planned == 9
    changes = sorted([(s.sent_s, 1) for s in load.samples] + [(s.end_s, -1) for s in load.samples])
    running = [sum(by for _, by in changes[: n + 1]) for n in range(len(changes))]
    assert max(running) == 3


def test_a_conversation_goes_on_from_the_real_answer_as_text(fake: Fake) -> None:
    load = loaded(fake, [session(0, turns=3)], 1, ids=False)
    prompts = [body["prompt"] for body in fake.bodies]
    said = [Vocabulary().text([TokenSpan((0, 0, turn), 5)]) for turn in range(3)]
    assert prompts == [said[0], f"{said[0]} w0 w1{said[1]}", f"{said[0]} w0 w1{said[1]} w0 w1{said[2]}"]
    assert [sample.turn for sample in load.samples] == [0, 1, 2]
    assert all(b.due_s >= a.end_s for a, b in zip(load.samples, load.samples[1:], strict=False))


def test_a_conversation_goes_on_from_the_real_answer_as_messages(fake: Fake) -> None:
    loaded(fake, [session(0, turns=2)], 1, ids=False, chat=True)
    first, second = (body["messages"] for body in fake.bodies)
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:1] == first and second[1]["content"] == " w0 w1"


def test_the_user_thinks_before_a_turn(fake: Fake) -> None:
    load = loaded(fake, [session(0, turns=2, think_s=0.15)], 1, ids=False)
    first, second = load.samples
    assert second.due_s == pytest.approx(first.end_s + 0.15, abs=0.1) and second.sent_s >= first.end_s + 0.149


def test_after_a_failure_the_turns_that_are_left_fail_too(fake: Fake) -> None:
    fake.faults = {1: "overloaded"}
    load = loaded(fake, [session(0, turns=4), session(1)], 1, ids=False)
    found = [(sample.session, sample.turn, sample.error) for sample in load.samples]
    assert found == [(0, 0, None), (0, 1, "http_429"), (0, 2, "not_sent"), (0, 3, "not_sent"), (1, 0, None)]
    assert len(fake.bodies) == 3


def test_a_load_that_is_cancelled_keeps_what_it_has(fake: Fake) -> None:
    fake.faults = {1: "hangs"}

    async def until_it_hangs(load: LoadRun, work: Coroutine) -> None:
        task = asyncio.ensure_future(work)
        while len(fake.bodies) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def run() -> LoadRun:
        load = LoadRun([session(n) for n in range(5)], Http(fake.url), Endpoint(False, "m", {}), Vocabulary(), 30.0)
        await until_it_hangs(load, load.run(1))
        return load

    samples = asyncio.run(run()).samples
    assert [sample.error for sample in samples] == [None, "interrupted"]
    assert samples[1].end_s >= samples[1].sent_s > 0
