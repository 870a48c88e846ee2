"""`shoal serve` on a Ray cluster that has room for a part of the replicas: it serves with that part, says so at once,
and takes the others up when a machine joins."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from ray.cluster_utils import Cluster

from tests.cluster.serving import START_S, Server, running

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(4 * START_S)]
# Of each machine: room for one replica, and on the first for a router too.
CPUS = 2
NEEDED = ["--cpus-per-rank", "1.2", "--cpus-per-router", "0.5", "--replicas", "2", "--device", "cpu"]
OTHER = "127.0.0.2"  # of a machine that joins; Linux has all of 127.0.0.0/8
SHORT = "room for 1 of replicas=2 only: .*are missing"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as `cluster.local` starts Ray: else they starve beside other tests
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "300")
    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, **options})
    try:
        yield made
    finally:
        made.shutdown()


def answers(port: int) -> bool:
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 2}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=30).status_code == 200


def test_what_has_room_serves_and_the_others_when_a_machine_joins(
    cluster: Cluster, tiny_model: Path, free_port: int
) -> None:
    """At a first start, by a `shoal serve` that takes the server over as it is, and by one that replaces it."""
    model = ["--model", str(tiny_model), "--served-model-name", "tiny", "--kv-tokens", "4096", "--drain-s", "1"]
    hosts = ["--router-hosts", f"{cluster.head_node.node_ip_address},{OTHER}", "--host", "0.0.0.0"]
    arguments = [*model, *NEEDED, *hosts, "--address", str(cluster.address), "--port", str(free_port)]

    def serves(server: Server) -> None:
        server.wait_for(SHORT)
        server.wait_for("^Ready after")
        server.wait_for("tiny: 1 of 2 replicas")
        server.wait_for("stops it")
        assert answers(free_port)

    with running(*arguments) as server:
        server.wait_for(f"router_hosts: not in the cluster yet: {OTHER}")
        serves(server)
        server.process.kill()
        server.process.wait()
    with running(*arguments) as server:
        serves(server)
        assert "the server that runs is taken over as it is" in server.lines
        server.process.kill()
        server.process.wait()
    with running(*arguments, "--max-prompts", "7") as server:
        serves(server)
        assert any("is replaced" in line for line in server.lines)
        cluster.add_node(num_cpus=CPUS, object_store_memory=80 << 20, node_ip_address=OTHER)
        server.wait_for("Replica: 2 running")
        assert answers(free_port)
