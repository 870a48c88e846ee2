"""The fleet's simulated replica, against the real scheduler on the same requests."""

import numpy as np
import pytest

from bench.fleet.hardware import MAX_RUNNING, TOKEN_BUDGET, ReplicaHardware
from bench.fleet.other_rules import FewestRequests
from bench.fleet.replica import FleetReplica
from bench.fleet.simulation import FleetOutcome, FleetSimulation
from bench.fleet.workloads import FleetRequest, at_rate, common_tokens, token_ids, zipf
from bench.load.workload import SHARED, UNIQUE, TokenSpan
from bench.pipeline.simulated_replica import VOCAB_SIZE, SimulatedReplica
from bench.pipeline.simulator import Hardware, Request, Run, SimulatedClock, simulate
from pipeline.cost import CostModel
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore


def fast(requests: list[FleetRequest], hardware: ReplicaHardware) -> FleetOutcome:
    return FleetSimulation(requests, [FewestRequests(1)], [hardware]).run()


def real(requests: list[FleetRequest], hardware: ReplicaHardware) -> Run:
    config = WorkerConfig(
        schedule="uniform",
        max_running=MAX_RUNNING,
        token_budget=TOKEN_BUDGET,
        context_length=1 << 20,
        kv_tokens=hardware.num_pages * hardware.page_size,
        page_size=hardware.page_size,
        overlap=True,
    )
    seconds_of = hardware.cost_model.predict
    costs = CostStore([CostModel(seconds_of, rows=hardware.cost_model.rows)], objective=hardware.objective)
    clock = SimulatedClock()
    replica = SimulatedReplica(
        config, costs, clock, lambda request: (token_ids(requests[request.number].spans) % VOCAB_SIZE).tolist()
    )
    arriving = [Request(r.number, r.at_s, r.prompt_tokens, r.output_tokens) for r in requests]
    return simulate(arriving, replica, Hardware([seconds_of], plan_s=0.0, return_s=0.0), clock)


@pytest.mark.parametrize(("rate_s", "kv_tokens", "within"), [(6.0, None, 0.1), (5.0, 60_000, 0.3)])
def test_takes_as_long_as_the_scheduler(rate_s: float, kv_tokens: int | None, within: float):
    """With room for all, and with so little room that requests wait for pages."""
    hardware = ReplicaHardware(kv_tokens=kv_tokens)
    requests = at_rate(zipf(np.random.default_rng(1), 100, 8), rate_s)
    ours, theirs = fast(requests, hardware), real(requests, hardware)
    ttft_s = np.array([life.ttft_s for life in theirs.lives])
    tpot_s = np.array(
        [(life.tokens_s[-1] - life.tokens_s[0]) / max(1, len(life.tokens_s) - 1) for life in theirs.lives]
    )
    assert (ours.first_s - ours.arrived_s).mean() == pytest.approx(ttft_s.mean(), rel=within)
    assert ((ours.last_s - ours.first_s) / (ours.output - 1).clip(1)).mean() == pytest.approx(tpot_s.mean(), rel=within)
    assert ours.last_s.max() == pytest.approx(theirs.seconds, rel=0.05)


def test_gives_all_pages_back_when_it_preempts():
    hardware = ReplicaHardware(kv_tokens=4096)
    replica = FleetReplica(hardware)
    for number in range(8):
        request = FleetRequest(number, 0.0, (TokenSpan((UNIQUE, number), 256),), 700)
        replica.take(request, token_ids(request.spans), 0.0)
    finished: list[int] = []
    while replica.num_requests:
        finished += [request.number for request in replica.end_step(replica.busy_until_s).last]
    assert sorted(finished) == list(range(8)) and replica.preemptions > 0
    assert replica.tree.num_evictable == replica.tree.num_cached
    assert replica.pool.num_free + replica.tree.num_cached == hardware.num_pages
    assert replica.load().kv_tokens_used == 0


def test_a_burst_with_one_prefix_computes_it_once():
    replica = FleetReplica(ReplicaHardware())
    for number in range(4):
        request = FleetRequest(number, 0.0, (TokenSpan((SHARED, 0), 4096), TokenSpan((UNIQUE, number), 64)), 2)
        replica.take(request, token_ids(request.spans), 0.0)
    while replica.num_requests:
        replica.end_step(replica.busy_until_s)
    assert replica.computed_tokens == 4096 + 4 * 64


def test_common_prefixes_of_prompts():
    def of(*spans: tuple[int, int]) -> FleetRequest:
        return FleetRequest(0, 0.0, tuple(TokenSpan((SHARED, key), tokens) for key, tokens in spans), 1)

    assert common_tokens(of((1, 16), (2, 8)), of((1, 16), (3, 8))) == 16
    assert common_tokens(of((1, 16), (2, 8)), of((1, 20))) == 16
    assert common_tokens(of((1, 16)), of((2, 16))) == 0
