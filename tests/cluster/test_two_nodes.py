"""The Serve application on two Ray nodes (both on this machine), a replica on each, two routers in front.

The one module of this room's tests that starts Ray in its own process; the cluster is shared by all of its tests.
"""

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import zmq
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayTaskError
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
from ray.util.placement_group import placement_group_table

from cluster import replica as replica_module
from cluster.config import Config
from cluster.deployed import APP, targets
from cluster.plane import cluster_secret
from cluster.replica import Replica, ReplicaError, bundles, start_ranks
from worker.curve import REPLICA, Curve
from worker.engine.engine import Engine
from worker.messages import (
    Farewell,
    Generate,
    Outputs,
    SamplingParams,
    Subscribe,
    decode_from_replica,
    encode,
)

pytestmark = [pytest.mark.ray, pytest.mark.slow]
WAIT_S = 60.0
# Far below the queue of many long prompts here, and far above that of a short one alone.
TARGET_WAIT_S = 0.05


@dataclass(frozen=True)
class Served:
    """A server to talk to."""

    url: str

    def complete(self, prompt: str, tokens: int = 16) -> str:
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stream(self, prompt: str, tokens: int) -> Iterator[str]:
        """Pieces of text as they come."""
        body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body | {"stream": True}, timeout=WAIT_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    def metric(self, name: str, label: str = "replica") -> dict[str, float]:
        """By label, as one of the routers sees it; nothing while Serve has no router."""
        answer = httpx.get(f"{self.url}/metrics", timeout=WAIT_S)
        page = answer.text if answer.status_code == 200 else ""
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        return {sample.labels[label]: sample.value for sample in samples if sample.name == name}


def until(true: Callable[[], Any], what: str) -> Any:
    """Polls: what is waited for is another process's doing."""
    deadline = time.monotonic() + WAIT_S
    while not (result := true()):
        assert time.monotonic() < deadline, f"{what}: not within {WAIT_S} s"
        time.sleep(0.05)
    return result


def replicas(state: str = "RUNNING", deployment: str = "Replica") -> dict[str, dict[str, Any]]:
    """What Serve knows of each model replica, or each router, by id."""
    client = _get_global_client()
    assert client is not None
    deployments = client.get_serve_details()["applications"][APP]["deployments"]
    known = deployments[deployment]["replicas"] if deployment in deployments else []  # it may be being built
    return {r["replica_id"]: r for r in known if r["state"] == state}


def ranks() -> list[psutil.Process]:
    """The rank processes of this test's nodes."""
    return [p for p in psutil.Process().children(recursive=True) if " ".join(p.cmdline()).startswith("ray::Rank")]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes, of which each has room for one replica; the routers fit beside them. Their cache's folder."""
    options = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(cache))
        patch.setenv("RAY_worker_niceness", "0")  # as `cluster.local` starts Ray: else they starve beside other tests
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **options})
        try:
            cluster.add_node(num_cpus=3, object_store_memory=80 << 20)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cache
        finally:
            ray.shutdown()
            cluster.shutdown()


def deploy(model: Path, num_replicas: int, **scaling: float) -> None:
    """As KubeRay does it with what the chart says."""
    settings = {"model": str(model), "placement": "round_robin", "device": "cpu", "kv_tokens": 16384, "cpu_threads": 1}
    application = {
        "name": APP,
        "import_path": "cluster.app:build",
        "args": {**settings, "cpus_per_rank": 2, "cpus_per_router": 0.5, **scaling},
        "external_scaler_enabled": "max_replicas" in scaling,
        "deployments": [{"name": "Replica", "num_replicas": num_replicas}, {"name": "Router", "num_replicas": 2}],
    }
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate({"applications": [application]}))


@pytest.fixture(scope="module")
def served(nodes: Path, tiny_model: Path, session_port: int) -> Iterator[Served]:
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": session_port})
        deploy(tiny_model, num_replicas=2)
        server = Served(f"http://127.0.0.1:{session_port}")
        until(lambda: len(server.metric("shoal_kv_tokens")) == 2, "both replicas connected")
        yield server
    finally:
        serve.shutdown()


def test_ranks_meet_say_what_one_says_and_end_together(nodes: Path, tiny_model: Path) -> None:
    """A replica's ranks as Ray's actors, which Serve has no part in: two stages of two over gloo, one on each node."""
    settings = {"model": str(tiny_model), "device": "cpu", "kv_tokens": 1024, "cpu_threads": 1, "cpus_per_rank": 1.5}
    prompts, asked = [[5, 6, 7], list(range(10, 40))], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    with closing(Engine(tiny_model, Config(**settings))) as alone:
        wanted = {str(i): found.token_ids for i, found in enumerate(alone.generate(prompts, asked))}
    config = Config(**settings, tp=2, pp=2)
    group = ray.util.placement_group(bundles(config), strategy="PACK")
    ray.get(group.ready(), timeout=WAIT_S)
    actors = start_ranks(config, group)
    leader, other = config.leading_rank, 1
    try:
        stages = [placement_group_table(group)["bundles_to_node_id"][bundle] for bundle in (1, 2)]
        assert stages[0] != stages[1], "a node has room for one"
        meeting = ray.get(actors[leader].open.remote(config), timeout=WAIT_S)
        published = ray.get([rank.load.remote(config, i, meeting) for i, rank in enumerate(actors)], timeout=WAIT_S)
        runs = [rank.run.remote() for rank in actors]
        assert [bool(said) for said in published] == [False, False, True, False]
        with asked_for(published[leader]["address"], prompts, asked) as replica:
            assert answers(replica, len(prompts)) == wanted
        meter, models, kv_tokens = ray.get(actors[leader].observed.remote(), timeout=WAIT_S)
        assert meter.num_batches > 0 and meter.stages == len(models) == 2 and kv_tokens == 1024
        ray.kill(actors[other])
        with (
            asked_for(published[leader]["address"], prompts, asked),
            pytest.raises(RayTaskError, match="DeviceLost"),
        ):
            ray.get(runs[leader], timeout=WAIT_S)
        assert len(list((nodes / "costs").iterdir())) == config.pp, "what its steps cost is kept"
    finally:
        for rank in actors:
            ray.kill(rank)
        ray.util.remove_placement_group(group)


def test_a_rank_that_hangs_is_the_end_of_its_replica(
    nodes: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control actor's watch over a real rank, in this process: a stopped process holds its connections open."""
    monkeypatch.setattr(replica_module, "ASK_S", 0.1)
    monkeypatch.setattr(replica_module, "HANG_S", 5.0)
    config = Config(model=str(tiny_model), device="cpu", kv_tokens=1024, cpu_threads=1, cpus_per_rank=1)
    group = ray.util.placement_group(bundles(config), strategy="PACK")
    replica = Replica.__new__(Replica)
    try:
        ray.get(group.ready(), timeout=WAIT_S)
        replica._ranks = start_ranks(config, group)
        (rank,) = replica._ranks
        replica._published = ray.get(rank.load.remote(config), timeout=WAIT_S)
        replica._runs = [rank.run.remote()]
        replica._tp, replica._leading = config.tp, config.leading_rank
        who = ray.get(rank.alive.remote(), timeout=WAIT_S).who
        (process,) = (process for process in ranks() if who.startswith(f"pid: {process.pid}, ip: "))
        process.suspend()
        asyncio.run(asyncio.wait_for(replica._watch(), WAIT_S))
        with pytest.raises(ReplicaError, match=r"^rank 0: .* 5 s$"):
            replica.check_health()
        process.wait(WAIT_S)
    finally:
        ray.util.remove_placement_group(group)


def test_of_two_ranks_the_one_that_hangs_is_named(
    nodes: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leading rank waits in a collective for the other, whose process is stopped, and says goodbye: long before the
    step counts as late, or the stopped process as one that answers no more."""
    monkeypatch.setattr(replica_module, "ASK_S", 0.5)
    settings = {"model": str(tiny_model), "device": "cpu", "kv_tokens": 1024, "cpu_threads": 1, "cpus_per_rank": 1}
    config = Config(**settings, tp=2)
    group = ray.util.placement_group(bundles(config), strategy="PACK")
    replica = Replica.__new__(Replica)
    try:
        ray.get(group.ready(), timeout=WAIT_S)
        actors = replica._ranks = start_ranks(config, group)
        meeting = ray.get(actors[0].open.remote(config), timeout=WAIT_S)
        loads = [rank.load.remote(config, i, meeting) for i, rank in enumerate(actors)]
        replica._published = ray.get(loads, timeout=WAIT_S)[0]
        replica._runs = [rank.run.remote() for rank in actors]
        replica._tp, replica._leading = config.tp, config.leading_rank
        who = ray.get(actors[1].alive.remote(), timeout=WAIT_S).who
        (process,) = (process for process in ranks() if who.startswith(f"pid: {process.pid}, ip: "))
        with asked_for(replica._published["address"], [], SamplingParams(max_tokens=1)) as router:
            router.send(encode(Subscribe()))
            assert router.poll(WAIT_S * 1000)
            process.suspend()
            asked = SamplingParams(max_tokens=500, temperature=0, ignore_eos=True)
            router.send(encode(Generate(request_id="x", prompt_ids=[5, 6, 7], sampling=asked)))
            asyncio.run(asyncio.wait_for(replica._watch(), WAIT_S))
            with pytest.raises(ReplicaError, match=r"^rank 1 hangs \(its process stands still") as hung:
                replica.check_health()
            goodbye = Farewell("hung", str(hung.value))
            until(lambda: router.poll(0) and decode_from_replica(router.recv()) == goodbye, "a goodbye")
    finally:
        ray.util.remove_placement_group(group)


@contextmanager
def asked_for(address: str, prompts: list[list[int]], sampling: SamplingParams) -> Iterator[zmq.Socket[bytes]]:
    """A connection to a replica, over which it was asked for all of these."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as replica:
        replica.linger = 0
        Curve(cluster_secret(), REPLICA).calls(replica)
        replica.connect(address)
        for i, prompt in enumerate(prompts):
            replica.send(encode(Generate(request_id=str(i), prompt_ids=prompt, sampling=sampling)))
        yield replica


def answers(replica: zmq.Socket[bytes], count: int) -> dict[str, list[int]]:
    """The tokens of so many requests, when all of them have ended."""
    tokens: dict[str, list[int]] = {}
    ended = 0
    while ended < count:
        assert replica.poll(WAIT_S * 1000), "the replica is silent"
        message = decode_from_replica(replica.recv())
        for output in message.outputs if isinstance(message, Outputs) else []:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            ended += output.finish_reason is not None
    return tokens


def test_both_nodes_serve(served: Served) -> None:
    assert len({replica["node_id"] for replica in replicas().values()}) == 2
    texts = {served.complete("the same everywhere") for _ in range(8)}
    assert len(texts) == 1
    finished = until(lambda: _past_warm_up(served.metric("shoal_finished_requests_total")), "both answered")
    assert finished.keys() == replicas().keys()


def _past_warm_up(counts: dict[str, float]) -> dict[str, float] | None:
    return counts if len(counts) == 2 and all(count > 1 for count in counts.values()) else None


def test_a_client_that_goes_away_stops_its_request(served: Served) -> None:
    stream = served.stream("to be left alone", 3000)
    next(stream)
    until(lambda: sum(served.metric("shoal_running_requests").values()) == 1, "running")
    stream.close()
    began = time.monotonic()
    until(lambda: sum(served.metric("shoal_running_requests").values()) == 0, "stopped")
    assert time.monotonic() - began < 2
    assert sum(served.metric("shoal_aborts_total").values()) >= 1


def test_another_number_of_replicas_reloads_nothing(served: Served, tiny_model: Path) -> None:
    def wanted() -> float:
        return served.metric("shoal_replicas_wanted", "model")["tiny-llama"]

    before, routers = replicas(), replicas(deployment="Router")
    until(lambda: wanted() == 2, "Serve said how many")
    deploy(tiny_model, num_replicas=1)
    until(lambda: len(replicas()) == 1, "one is taken away")
    until(lambda: wanted() == 1, "Serve said how many")
    assert replicas().keys() < before.keys()
    assert replicas(deployment="Router").keys() == routers.keys()


def test_replicas_follow_the_load_to_two_and_to_none_and_back(served: Served, tiny_model: Path) -> None:
    """Autoscaling under load fails no request; and a deployment of the same again does not fight it."""
    scaling = {"max_replicas": 2, "min_replicas": 0, "target_wait_s": TARGET_WAIT_S, "downscale_delay_s": 2.0}
    deploy(tiny_model, num_replicas=1, **scaling)
    until(lambda: served.metric("shoal_replicas_wanted_because", "reason") == {"steady": 1}, "routers are told")
    with asking(served, clients=1, words=4), asking(served, clients=24, words=200):
        until(lambda: len(served.metric("shoal_running_requests")) == 2, "another one came, and routers know it")
        assert served.metric("shoal_replicas_wanted_because", "reason") == {"queue": 1}
    with asking(served, clients=1, words=4):
        until(lambda: targets()["Replica"] == 1 and len(replicas()) == 1, "it is gone")
        until(lambda: served.metric("shoal_replicas_wanted_because", "reason") == {"idle": 1}, "routers are told")
    until(lambda: sleeps(served), "the last one is gone")
    deploy(tiny_model, num_replicas=1, **scaling)
    assert targets()["Replica"] == 0
    until(lambda: httpx.get(f"{served.url}/ready", timeout=WAIT_S).status_code == 200, "requests are answered")
    assert served.complete("good morning") == served.complete("good morning")
    assert targets()["Replica"] == 1
    assert served.metric("shoal_replicas_wanted_because", "reason") == {"request": 1}
    until(lambda: sleeps(served), "it is gone again")


@contextmanager
def asking(served: Served, clients: int, words: int) -> Iterator[None]:
    """Clients that ask one question after the other meanwhile, each another one. Raises the error of one that fails."""
    ending = threading.Event()

    def ask_often(client: int) -> None:
        for number in itertools.count():
            if ending.is_set():
                return
            served.complete(f"{client} {number} " + "word " * words, tokens=4)

    with ThreadPoolExecutor(clients) as pool:
        asked = [pool.submit(ask_often, client) for client in range(clients)]
        try:
            yield
        finally:
            ending.set()
        for client in asked:
            client.result()


def sleeps(served: Served) -> bool:
    gone = targets().get("Replica") == 0 and not replicas()
    return gone and served.metric("shoal_replicas_wanted", "model") == {"tiny-llama": 0}
