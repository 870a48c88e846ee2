"""A load offered to one replica: requests arrive when they are due, whatever becomes of those before them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.metrics import spread
from bench.workload import Session, Vocabulary
from pipeline.capacity import DELAY_S
from pipeline.simulate import Life, Request
from worker.messages import Generate, Output, SamplingParams

LATE = 0.01  # the part of times between tokens that may be beyond the objective
DELAYED = 0.5  # the part of requests that may be


class Replica(Protocol):
    """What a load is offered to."""

    def add(self, request: Generate) -> None:
        """A request arrives."""

    def take(self, wait_s: float) -> list[Output]:
        """What came out since the last call; if there is nothing yet, what comes within `wait_s`."""

    def abort(self, request_ids: list[str]) -> None:
        """Forgets these requests."""


@dataclass(frozen=True)
class Objective:
    """Ninety-nine in a hundred times between tokens are at most `tbt_s`, and half of the requests are scheduled within
    `delay_s`."""

    name: str
    tbt_s: float
    delay_s: float = DELAY_S

    def __str__(self) -> str:
        return f"{self.name}@{self.tbt_s * 1e3:.3g}ms"

    def holds(self, point: dict[str, Any]) -> bool:
        """Whether a load that `summary` describes kept to it."""
        late = point["tbt_s"].get("p99", 0.0) > self.tbt_s
        return point["given_up"] is None and not late and point["delay_s"]["p50"] <= self.delay_s


@dataclass(frozen=True)
class Load:
    """What is offered: `sessions` of one turn each, `rate` of them a second or, where that is 0, all at once. It may be
    ended early where it cannot keep to `objective` any more. `key` is that of the point which it is going to be."""

    key: str
    sessions: list[Session]
    rate: float = 0.0
    objective: Objective | None = None


class Watch:
    """Says as soon as it is certain that a load is not going to keep to an objective."""

    def __init__(self, objective: Objective, sessions: Sequence[Session]) -> None:
        self._objective = objective
        self._most_late = LATE * sum(session.turns[0].output_tokens - 1 for session in sessions) + 1
        self._most_delayed = DELAYED * len(sessions) + 1
        self._late = self._delayed = 0

    def started(self, delay_s: float) -> None:
        self._delayed += delay_s > self._objective.delay_s

    def gap(self, seconds: float) -> None:
        self._late += seconds > self._objective.tbt_s

    @property
    def broken(self) -> str | None:
        """What is certain: `tbt` or `delay`; None if nothing is."""
        if self._late > self._most_late:
            return "tbt"
        return "delay" if self._delayed > self._most_delayed else None


@dataclass
class Offered:
    """What became of a load. `seconds`: from the first arrival to the last token. `given_up`: what could no longer be
    kept when it was ended early."""

    lives: list[Life]
    seconds: float
    given_up: str | None = None


def offer(
    replica: Replica,
    sessions: Sequence[Session],
    vocabulary: Vocabulary,
    objective: Objective | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Offered:
    """Sends `sessions`, of one turn each and in the order of their arrival, and waits for their ends, or until they
    cannot keep to `objective` any more. `progress` hears how many have ended. Raises RuntimeError where one fails."""
    asked = [_generate(i, session, vocabulary) for i, session in enumerate(sessions)]
    lives = [
        Life(Request(i, session.arrival_s or 0.0, len(asked[i].prompt_ids), asked[i].sampling.max_tokens))
        for i, session in enumerate(sessions)
    ]
    watch = Watch(objective or Objective("none", math.inf, math.inf), sessions)
    added_s: list[float] = []
    ended, begin_s = 0, clock()
    while ended < len(lives) and watch.broken is None:
        now_s = clock() - begin_s
        while len(added_s) < len(lives) and lives[len(added_s)].request.arrived_s <= now_s:
            replica.add(asked[len(added_s)])
            added_s.append(now_s)
        wait_s = lives[len(added_s)].request.arrived_s - now_s if len(added_s) < len(lives) else 1.0
        outputs = replica.take(wait_s)
        now_s = clock() - begin_s
        for output in outputs:
            if output.failure is not None:
                raise RuntimeError(f"a request failed: {output.failure.message}")
            number = int(output.request_id)
            if output.queue_s is not None:
                lives[number].started_s = added_s[number] + output.queue_s
            _note(lives[number], output, now_s, watch)
            ended += output.finish_reason is not None
        if progress is not None:
            progress(ended)
    if watch.broken is not None:
        replica.abort([asked[i].request_id for i, life in enumerate(lives[: len(added_s)]) if not _is_whole(life)])
    return Offered(lives, clock() - begin_s, watch.broken)


def _generate(number: int, session: Session, vocabulary: Vocabulary) -> Generate:
    (turn,) = session.turns
    sampling = SamplingParams(max_tokens=turn.output_tokens, temperature=0.0, ignore_eos=True)
    return Generate(request_id=str(number), prompt_ids=vocabulary.ids(turn.spans), sampling=sampling)


def _note(life: Life, output: Output, now_s: float, watch: Watch) -> None:
    for _ in output.token_ids:
        if life.tokens_s:
            watch.gap(now_s - life.tokens_s[-1])
        else:
            watch.started(life.started_s - life.request.arrived_s)
        life.tokens_s.append(now_s)


def _is_whole(life: Life) -> bool:
    return len(life.tokens_s) == life.request.output


def summary(offered: Offered, rate: float) -> dict[str, Any]:
    """Its figures, as JSON holds them."""
    begun = [life for life in offered.lives if life.tokens_s]
    tokens = sum(len(life.tokens_s) for life in begun)
    gaps = [b - a for life in begun for a, b in zip(life.tokens_s, life.tokens_s[1:], strict=False)]
    return {
        "rate": rate,
        "requests": len(offered.lives),
        "seconds": offered.seconds,
        "given_up": offered.given_up,
        "requests_per_s": sum(map(_is_whole, begun)) / offered.seconds,
        "output_tok_s": tokens / offered.seconds,
        "input_tok_s": sum(life.request.prompt for life in begun) / offered.seconds,
        "ttft_s": spread([life.ttft_s for life in begun]),
        "tbt_s": spread(gaps),
        "delay_s": {"p50": _delay(offered.lives)},
    }


def _delay(lives: Sequence[Life]) -> float:
    """Half of the requests were scheduled within so many seconds; those that never were come last."""
    delays = sorted(
        math.inf if math.isnan(life.started_s) else life.started_s - life.request.arrived_s for life in lives
    )
    return min(delays[(len(delays) - 1) // 2], 1e9)  # JSON has no infinity
