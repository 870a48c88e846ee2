"""Clients that know the right answers: what they count as failed, wrong, or lost with a router."""

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from bench.chaos import steady_load
from bench.chaos.steady_load import Failed, Flight, Question, SteadyLoad, questions
from bench.load.http import Broken
from tests.quick_http import served


@dataclass
class Answers:
    """A server with one answer for everything. `fault`: what goes wrong with the requests from now on."""

    url: str = ""
    fault: str = ""

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if self.fault == "status":
            return JSONResponse({"error": {"message": "no replica"}}, 503)
        text = "other" if self.fault == "wrong" else "right"
        if not body["stream"]:
            return JSONResponse({"choices": [{"text": text, "finish_reason": "length"}] * body["n"]})
        return StreamingResponse(self._stream(text, body["n"]), media_type="text/event-stream")

    async def _stream(self, text: str, n: int) -> Any:
        for index in range(n):
            yield f"data: {json.dumps({'choices': [{'index': index, 'text': text[:2], 'finish_reason': None}]})}\n\n"
        if self.fault == "error":
            yield f"data: {json.dumps({'error': {'message': 'lost'}})}\n\n"
        if self.fault == "broken":
            raise ConnectionAbortedError
        if self.fault == "cut":
            return
        for index in range(n):
            yield f"data: {json.dumps({'choices': [{'index': index, 'text': text[2:], 'finish_reason': 'stop'}]})}\n\n"
        yield "data: [DONE]\n\n"


@pytest.fixture
def answers() -> Iterator[Answers]:
    made = Answers()
    app = Starlette(routes=[Route("/v1/completions", made.complete, methods=["POST"])])
    with served(app) as made.url:
        yield made


def load(answers: Answers, question: Question) -> SteadyLoad:
    return SteadyLoad(answers.url, "m", [question], 1, Random(0))


def ask(made: SteadyLoad, times: int = 1) -> None:
    for _ in range(times):
        asyncio.run(made.ask_one())


@pytest.mark.parametrize("question", [Question("p", 9), Question("p", 9, seed=1, n=2), Question("p", 9, stream=False)])
def test_right_answers_are_counted(answers: Answers, question: Question) -> None:
    made = load(answers, question)
    ask(made, 3)
    assert (made.counts.right, made.counts.wrong, made.counts.failed, made.counts.messages) == (3, 0, 0, [])


@pytest.mark.parametrize(
    ("fault", "counted", "said"),
    [
        ("wrong", "wrong", "other"),
        ("status", "failed", "status 503.*no replica"),
        ("error", "failed", "an error event.*lost"),
        ("broken", "failed", "Broken"),
        ("cut", "failed", "the stream ends with"),
    ],
)
def test_everything_else_is_counted_by_what_it_is(answers: Answers, fault: str, counted: str, said: str) -> None:
    made = load(answers, Question("p", 9))
    answers.fault = fault
    ask(made)
    assert getattr(made.counts, counted) == 1 and made.counts.right == made.counts.lost_with_router == 0
    (message,) = made.counts.messages
    assert re.search(said, message)


def test_a_server_that_is_disturbed_from_the_beginning_teaches_nothing(answers: Answers) -> None:
    answers.fault = "status"
    with pytest.raises(Failed, match="503"):
        load(answers, Question("p", 9))


def test_requests_of_a_router_that_is_killed_are_its_own_and_those_that_the_kernel_may_have_accepted_for_it(
    answers: Answers,
) -> None:
    made = load(answers, Question("p", 9))
    began, own, others, waits, unanswered = (
        Flight(1, has_answer=True),
        Flight(2, has_answer=True),
        Flight(3),
        Flight(4),
        Flight(5, has_answer=True),
    )
    made.flights.update((began, own, others, waits, unanswered))
    made.orphan(own={1, 2}, others={3})
    assert [flight.is_orphan for flight in (began, own, others, waits, unanswered)] == [True, True, False, True, False]


def test_a_broken_connection_counts_apart_if_its_router_was_killed(
    answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = load(answers, Question("p", 9))
    monkeypatch.setattr(steady_load, "Flight", lambda: Flight(is_orphan=True))
    answers.fault = "broken"
    ask(made)
    answers.fault = "status"
    ask(made)
    assert (made.counts.lost_with_router, made.counts.failed) == (1, 1), "a refusal is no lost connection"


@pytest.mark.parametrize(("is_dying", "clean", "lost"), [(True, True, 1), (True, False, 0), (False, True, 0)])
def test_a_connection_that_the_kernel_accepted_for_a_dying_router_counts_apart(
    answers: Answers, is_dying: bool, clean: bool, lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def reset(*its: object) -> list[str]:
        raise Broken("reset", clean)

    made = load(answers, Question("p", 9))
    made.router_is_dying = is_dying
    monkeypatch.setattr(made, "_ask", reset)
    ask(made)
    assert (made.counts.lost_with_router, made.counts.failed) == (lost, 1 - lost)


def test_questions_are_of_all_kinds_and_the_same_for_a_seed() -> None:
    made = questions(Random(3), 24)
    assert made == questions(Random(3), 24) != questions(Random(4), 24)
    kinds = {(question.seed is not None, question.n, question.stream) for question in made}
    assert kinds == {(is_seeded, n, stream) for is_seeded, n in ((0, 1), (1, 1), (1, 2)) for stream in (True, False)}
    assert len({question.prompt for question in made}) == 24
