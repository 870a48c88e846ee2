"""The pace at which requests come to a replica, from the counters of its loads."""

import numpy as np
import pytest

from router.fleet.known_replica import PACE_S, ArrivalPace, KnownReplica, pace_left
from worker.messages import ReplicaLoad, StepCosts


def load(requests: int, tokens: int = 0, incarnation: str = "a") -> ReplicaLoad:
    return ReplicaLoad(incarnation=incarnation, finished=requests, prompt_tokens=3 * tokens, cached_tokens=2 * tokens)


def test_pace_is_right_from_the_second_load_on_and_follows_changes():
    pace = ArrivalPace()
    pace.follow(load(1000, 10**6), 5.0)
    assert (pace.requests_s, pace.tokens_s) == (0.0, 0.0)
    for step in range(1, 11):
        pace.follow(load(1000 + step, 10**6 + 500 * step), 5.0 + step / 10)
        assert pace.requests_s == pytest.approx(10, rel=0.05) and pace.tokens_s == pytest.approx(5000, rel=0.05)
    pace.follow(load(1010, 10**6 + 5000), 6.0 + 5 * PACE_S)
    assert pace.requests_s < 0.1


def test_a_restart_is_no_request():
    pace = ArrivalPace()
    pace.follow(load(0), 0.0)
    pace.follow(load(10), 1.0)
    before = pace.requests_s
    pace.follow(load(500, incarnation="b"), 2.0)
    pace.follow(load(490, incarnation="b"), 2.0)
    assert pace.requests_s == before


def test_waiting_and_running_requests_have_come_too():
    pace = ArrivalPace()
    pace.follow(ReplicaLoad(incarnation="a"), 0.0)
    pace.follow(ReplicaLoad(incarnation="a", finished=1, failed=1, aborts=1, running=2, waiting=3), 1.0)
    assert pace.requests_s == pytest.approx(8)


def test_pace_fades_while_nothing_is_heard():
    left = pace_left(np.array([4.0, 4.0, 0.0]), np.array([0.0, PACE_S, 1.0]))
    assert left[0] == 1.0 and 0.2 < left[1] < 0.3 and left[2] == 0.0


def test_a_candidate_has_the_costs_and_output_lengths_that_the_replica_tells():
    replica = KnownReplica("r", 0)
    assert replica.candidate().output_tokens == 200 and replica.candidate().token_s == StepCosts().token_s
    replica.take_load(
        ReplicaLoad(incarnation="a", finished=10**6, output_tokens=10**7, costs=StepCosts(token_s=1.0)), 0
    )
    seen = replica.candidate()
    assert seen.output_tokens == pytest.approx(10, rel=0.01) and seen.token_s == 1.0
