"""What a router tells autoscaling, and what a model without replicas does."""

import threading
from typing import Any

import httpx
import pytest

from router.fleet.demand import Demand, Sleep, busy_parts, of_all_routers
from router.fleet.fleet import Fleet
from router.fleet.placement import Candidate, candidates_of
from worker.messages import ReplicaLoad


def test_a_replica_is_as_busy_as_its_fullest_resource() -> None:
    idle = Candidate(kv_tokens=1000)
    prompts = Candidate(kv_tokens=1000, waiting=1, waiting_tokens=5)
    pages = Candidate(kv_tokens=1000, running=1, context_tokens=250)
    steps = Candidate(running=10, step_s=0.1, decode_s=0.02, full_s=0.5)
    too_many = Candidate(running=100, step_s=0.1, decode_s=0.02, full_s=0.5)
    never_longer = Candidate(running=1, step_s=0.1, decode_s=0.02, full_s=0.1)
    parts = busy_parts(candidates_of([idle, prompts, pages, steps, too_many, never_longer]))
    assert parts.tolist() == pytest.approx([0.0, 1.0, 0.25, 0.5, 1.0, 1.0])


def test_routers_know_of_their_own_waiting_requests_and_of_all_others() -> None:
    one = Demand(waiting=2, ready=1, wait_s=0.5, load=1.5, is_idle=False)
    two = Demand(waiting=1, ready=2, wait_s=0.7, load=1.2, is_idle=True)
    assert of_all_routers([one, two]) == Demand(waiting=3, ready=2, wait_s=0.7, load=1.5, is_idle=False)
    assert of_all_routers([]) == Demand()


def test_a_model_sleeps_until_a_start_takes_too_long_or_its_replica_is_there() -> None:
    now_s = 100.0
    sleep = Sleep(start_s=60, clock=lambda: now_s)
    assert not sleep.can_answer, "its first replica has not started"
    sleep.told(1, ready=0)
    assert not sleep.can_answer
    sleep.told(0, ready=0)
    assert sleep.can_answer
    sleep.told(1, ready=0)
    now_s = 159.0
    assert sleep.can_answer, "it wakes"
    now_s = 161.0
    assert not sleep.can_answer, "its replica should have been there"
    sleep.told(0, ready=0)
    sleep.told(1, ready=1)
    assert not sleep.can_answer, "if that dies, nothing is said of a start"


def test_a_fleet_tells_the_demand_on_all_of_its_replicas() -> None:
    fleet = Fleet()
    assert fleet.demand((), ready=0, waiting=0) == Demand()
    assert fleet.demand((), ready=0, waiting=2) == Demand(waiting=2, is_idle=False)
    for name, running in (("a", 1), ("b", 0)):
        fleet.join(name)
        load = ReplicaLoad(incarnation=name, kv_tokens_total=1000, running=running, context_tokens=500 * running)
        fleet.apply_load(name, load)
    told = fleet.demand((), ready=2, waiting=0)
    assert (told.load, told.wait_s, told.is_idle) == (0.5, 0.0, False)
    assert fleet.demand(["a"], ready=1, waiting=0) == Demand(ready=1)
    fleet.place("x", [1, 2, 3], ["b"])
    assert fleet.demand((), ready=2, waiting=0).load == 1.5, "a prompt is on its way"


def test_a_sleeping_model_is_ready_and_its_requests_wait_for_a_replica(make_stack: Any, make_replica: Any) -> None:
    stack = make_stack(sleep=Sleep(start_s=60))
    assert httpx.get(f"{stack.url}/ready").status_code == 503
    stack.service.told_wanted(0, "idle")
    assert httpx.get(f"{stack.url}/ready").status_code == 200
    assert stack.metric('shoal_replicas_wanted_because{model="tiny",reason="idle"}') == 1
    answers: list[Any] = []
    hello = [{"role": "user", "content": "Hello"}]
    ask = threading.Thread(
        target=lambda: answers.append(stack.client.chat.completions.create(model="tiny", messages=hello))
    )
    ask.start()
    stack.until(lambda: stack.service.demand().waiting == 1)
    stack.service.told_wanted(1, "request")
    assert httpx.get(f"{stack.url}/ready").status_code == 200, "the request is answered soon"
    assert 'reason="idle"' not in stack.metrics.page().decode()
    woken = make_replica()
    stack.replicas.set_replicas({"r0": woken.address})
    ask.join(20)
    woken.die()
    assert answers and answers[0].choices[0].message.content
    assert stack.service.demand().waiting == 0
