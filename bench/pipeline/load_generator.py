"""Open-loop load on one replica: requests arrive when they are due, whatever the state of earlier ones."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.load.metrics import spread
from bench.load.workload import Session, Vocabulary
from bench.pipeline.capacity import DELAY_S
from bench.pipeline.simulator import Life, Request
from worker.messages import Generate, Output, SamplingParams

MAX_LATE_SHARE = 0.01  # fraction of the times between tokens that may exceed the objective
MAX_DELAYED_SHARE = 0.5  # fraction of the requests that may be scheduled too late


class LoadTarget(Protocol):
    """The interface of a replica to a load."""

    def add(self, request: Generate) -> None:
        """A request arrives."""

    def take_outputs(self, wait_s: float) -> list[Output]:
        """Outputs since the last call; if there are none yet, those within `wait_s`."""

    def abort(self, request_ids: list[str]) -> None:
        """Drops these requests."""


@dataclass(frozen=True)
class ServiceObjective:
    """At least 99% of the times between tokens are at most `tbt_s`, and half of the requests are scheduled within
    `delay_s`."""

    name: str
    tbt_s: float
    delay_s: float = DELAY_S

    def __str__(self) -> str:
        return f"{self.name}@{self.tbt_s * 1e3:.3g}ms"

    def holds(self, point: dict[str, Any]) -> bool:
        """Whether the load that `summary` describes met the objective."""
        late = point["tbt_s"].get("p99", 0.0) > self.tbt_s
        return point["given_up"] is None and not late and point["delay_s"]["p50"] <= self.delay_s


@dataclass(frozen=True)
class OfferedLoad:
    """A load.

    - `sessions`: of one turn each.
    - `rate`: requests per second; 0 for all at once.
    - `objective`: the load may be ended early if it cannot be met any more.
    - `key`: key of the resulting point.
    """

    key: str
    sessions: list[Session]
    rate: float = 0.0
    objective: ServiceObjective | None = None


class Watch:
    """Detects as early as is certain that a load will miss an objective."""

    def __init__(self, objective: ServiceObjective, sessions: Sequence[Session]) -> None:
        self._objective = objective
        self._most_late = MAX_LATE_SHARE * sum(session.turns[0].output_tokens - 1 for session in sessions) + 1
        self._most_delayed = MAX_DELAYED_SHARE * len(sessions) + 1
        self._late = self._delayed = 0

    def started(self, delay_s: float) -> None:
        self._delayed += delay_s > self._objective.delay_s

    def gap(self, seconds: float) -> None:
        self._late += seconds > self._objective.tbt_s

    @property
    def broken(self) -> str | None:
        """The part of the objective that will be missed for certain: `tbt` or `delay`; None if there is none yet."""
        if self._late > self._most_late:
            return "tbt"
        return "delay" if self._delayed > self._most_delayed else None


@dataclass
class Offered:
    """The outcome of a load. `seconds`: from the first arrival to the last token. `given_up`: the part of the objective
    that was certainly missed, if the load was ended early."""

    lives: list[Life]
    seconds: float
    given_up: str | None = None


def offer(
    replica: LoadTarget,
    sessions: Sequence[Session],
    vocabulary: Vocabulary,
    objective: ServiceObjective | None = None,
    progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Offered:
    """Sends `sessions` (one turn each, in the order of arrival) and waits for their ends.

    Stops early when they cannot meet `objective` any more. `progress` is called with the number of requests that have
    ended. Raises RuntimeError if a request fails.
    """
    asked = [_generate(i, session, vocabulary) for i, session in enumerate(sessions)]
    lives = [
        Life(Request(i, session.arrival_s or 0.0, len(asked[i].prompt_ids), asked[i].sampling.max_tokens))
        for i, session in enumerate(sessions)
    ]
    watch = Watch(objective or ServiceObjective("none", math.inf, math.inf), sessions)
    added_s: list[float] = []
    ended, begin_s = 0, clock()
    while ended < len(lives) and watch.broken is None:
        now_s = clock() - begin_s
        while len(added_s) < len(lives) and lives[len(added_s)].request.arrived_s <= now_s:
            replica.add(asked[len(added_s)])
            added_s.append(now_s)
        wait_s = lives[len(added_s)].request.arrived_s - now_s if len(added_s) < len(lives) else 1.0
        outputs = replica.take_outputs(wait_s)
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
    """The figures of a load, as JSON holds them."""
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
    """Seconds within which half of the requests were scheduled. Requests that never were scheduled count as last."""
    delays = sorted(
        math.inf if math.isnan(life.started_s) else life.started_s - life.request.arrived_s for life in lives
    )
    return min(delays[(len(delays) - 1) // 2], 1e9)  # JSON has no infinity
