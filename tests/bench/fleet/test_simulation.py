"""Fleets in virtual time: every request is served, and measures are what they say."""

import numpy as np
import pytest

from bench.fleet import command
from bench.fleet.capacity import capacity
from bench.fleet.hardware import ReplicaHardware
from bench.fleet.shoal_router import ShoalRule
from bench.fleet.simulation import FleetSimulation
from bench.fleet.workloads import MADE, FleetRequest, at_rate, chain, from_trace, hot_prefix, token_ids
from bench.load.trace import TraceRequest
from bench.load.workload import UNIQUE, TokenSpan

HARDWARE = ReplicaHardware()


@pytest.mark.parametrize("name", MADE)
def test_every_request_of_every_load_is_served(name: str):
    requests = MADE[name](np.random.default_rng(0), 40, 2)
    requests = at_rate(requests, capacity(requests, HARDWARE, 2))
    outcome = FleetSimulation(requests, [ShoalRule(2)], [HARDWARE] * 2).run()
    total = len(list(chain(requests)))
    assert len(outcome.first_s) == total and (outcome.last_s >= outcome.first_s).all()
    assert (outcome.cached <= outcome.prompt).all() and 0 < outcome.replicas_used <= 1
    assert outcome.hit_rate <= outcome.ideal_hit_rate + 0.02
    assert outcome.slowdown(0.5) > 0.9


def test_alone_means_a_slowdown_of_one():
    requests = [FleetRequest(n, 100.0 * n, (TokenSpan((UNIQUE, n), 3000),), 5) for n in range(3)]
    outcome = FleetSimulation(requests, [ShoalRule(2)], [HARDWARE] * 2).run()
    assert outcome.slowdown(1.0) == pytest.approx(1.0, abs=0.02)


def test_several_routers_number_their_bookings_apart():
    requests = at_rate(hot_prefix(np.random.default_rng(0), 60, 2), 10.0)
    rules = [ShoalRule(2, seed=router) for router in range(3)]
    FleetSimulation(requests, rules, [HARDWARE] * 2).run()
    assert all(view.bookings == 0 for rule in rules for view in rule.fleet.snapshot())


def test_a_trace_keeps_its_shared_blocks():
    rows = [TraceRequest(700, 5, 0.0, (1, 2), 512), TraceRequest(1100, 5, 1.0, (1, 2, 3), 512)]
    one, two = (token_ids(request.spans) for request in from_trace(rows))
    assert len(one) == 700 and len(two) == 1100 and np.array_equal(one, two[:700])
    with pytest.raises(ValueError, match="hash_ids"):
        from_trace([TraceRequest(700, 5, 0.0)])


@pytest.mark.bench
def test_the_command_writes_what_it_measured(tmp_path, capsys, monkeypatch):
    line = ["--load", "zipf", "--replicas", "2", "--requests", "10", "--levels", "0.5"]
    assert command.main([*line, "--rules", "shoal", "least_load", "--out", str(tmp_path)]) == 0
    assert command.main([*line, "--rules", "dynamo", "--out", str(tmp_path), "--add"]) == 0
    runs = command.merged(tmp_path / "fleet.sim.zipf.json", {})
    assert runs["0.5"].keys() == {"shoal", "least_load", "dynamo"}
    names = {figure.name for figure in command.figures("zipf", runs)}
    assert "fleet.sim.zipf.50.slowdown_vs_best_other" in names
    routers = ["--rules", "shoal", "--routers", "2", "--name", "fleet.sim.routers", "--out", str(tmp_path)]
    assert command.main([*line, *routers]) == 0
    told = (tmp_path / "fleet.sim.routers.json").read_text()
    assert "zipf.50.routers_vs_1" in told and "fleet.sim.routers2_vs_1" in told
    assert command.main(["--summary", "--out", str(tmp_path)]) == 0
    ratio = next(figure.value for figure in command.figures("zipf", runs) if figure.name.endswith("vs_best_other"))
    assert {figure.value for figure in command.summary(tmp_path)} == {ratio}
    assert command.main(["--summary", "--out", str(tmp_path / "none")]) == 1
    monkeypatch.setattr(command, "CACHED_TOKENS", 600_000)
    monkeypatch.setattr(command, "DECISIONS", 40)
    assert command.main(["--decision", "--replicas", "3", "--out", str(tmp_path)]) == 0
    assert "fleet.decision.replicas3.cpu_p99_ms" in (tmp_path / "fleet.decision.replicas3.json").read_text()
    assert command.main(["--load", "mooncake"]) == 1
    assert "needs --trace" in capsys.readouterr().err
