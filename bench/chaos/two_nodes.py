"""A fleet on two Ray nodes of this machine, and the processes that it consists of."""

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import GetTimeoutError, RayActorError
from ray.serve.context import _get_global_client

from bench.chaos.ranks import NAMESPACE, ROLL, RankRoll, ReachableRank, ReachableReplica
from cluster.app import NODE_SHARE, ROUTER, application, deploy, settle
from cluster.config import load
from cluster.deployed import APP, scale
from cluster.local import fit

HOST = "127.0.0.1"
HEAD = "__internal_head__"  # stands for the head node's address: both nodes have the same
REPLICA = "Replica"  # the name of the replicas' deployment
# The head has room for the routers and one replica, the other node for two replicas: one can be lost, or added.
REPLICA_CPUS, ROUTER_CPUS, HEAD_CPUS, OTHER_CPUS = 2, 0.5, 4, 5
STORE_BYTES = 80 << 20  # Ray's object store, which is not used here
LOOK_S = 0.1  # between two looks at the processes
LOOKS = 3  # /ready must say the same in each: another router may answer
RECOVERY_S = 180.0  # a stopped process is given up after a minute, and then one is started
REST_S = 30.0  # how long a rank may take to come to rest once no request is left
# How the command lines of the processes begin.
RANKS = f"ray::{ReachableRank.__name__}"
REPLICAS, ROUTERS = (f"ray::ServeReplica:{APP}:{name}" for name in (REPLICA, ROUTER))


class NotRecovered(RuntimeError):
    """The fleet was not whole again within the time for it. The message says what was missing."""


class TwoNodes:
    """A fleet with routers on the head node, which is never lost, and replicas on both nodes. `replicas`, `routers`:
    how many there should be now."""

    def __init__(self, settings: Mapping[str, Any], replicas: int = 2, routers: int = 2) -> None:
        """Returns once all of them are there. `settings`: further ones of the configuration. Raises NotRecovered."""
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://{HOST}:{port}"
        self.replicas, self.routers = replicas, routers
        own = {"device": "cpu", "cpu_threads": 1, "host": HOST, "port": port, "cpus_per_router": ROUTER_CPUS}
        own |= {"cpus_per_rank": REPLICA_CPUS / settings.get("tp", 1), "replicas": replicas, "routers": routers}
        self._config, _ = settle(fit(load(overrides={**settings, **own})), gpus=0)
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        self._cluster = Cluster(initialize_head=True, head_node_args=_node(HEAD_CPUS))
        try:
            self._other = self._cluster.add_node(**_node(OTHER_CPUS))
            ray.init(
                address=self._cluster.address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
            )
            on_head = {f"node:{HEAD}": NODE_SHARE}
            self._roll: Any = ray.remote(RankRoll).options(name=ROLL, num_cpus=0, resources=on_head).remote()
            self._deploy()
            self.until_whole()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def _deploy(self) -> None:
        deploy(application(self._config, [HEAD], ReachableReplica))

    # ------------------------------------------------------------ changes

    def change(self) -> None:
        """Deploys the configuration with a harmless change, for which Serve replaces all replicas and routers."""
        self._config = self._config.changed(
            lambda model: model.model_copy(update={"max_waiting": model.max_waiting + 1, "replicas": self.replicas})
        )
        self._deploy()

    def scale(self, replicas: int) -> None:
        self.replicas = replicas
        scale(REPLICA, replicas)

    def other_node(self) -> list[psutil.Process]:
        """All processes of the other node."""
        raylet = psutil.Process(self._other.all_processes["raylet"][0].process.pid)
        return [raylet, *raylet.children(recursive=True)]

    def replace_node(self, lost: Sequence[psutil.Process]) -> None:
        """Starts a node in place of the other one, whose processes are dead or stopped, once Ray has given it up.
        Raises NotRecovered."""
        _until(lambda: "Ray counts on the lost node" if len(_nodes()) > 1 else None)
        for process in lost:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._cluster.remove_node(self._other, allow_graceful=False)
        self._other = self._cluster.add_node(**_node(OTHER_CPUS))

    # ------------------------------------------------------------ processes

    def processes(self, name: str) -> list[psutil.Process]:
        """The processes of this fleet whose command lines begin with `name`, without those that are stopped."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                stands = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
                if not stands and " ".join(process.cmdline()).startswith(name):
                    found.append(process)
        return found

    def until_whole(self, gone: Collection[psutil.Process] = ()) -> None:
        """Returns once everything is there that should be, and none of `gone`. Raises NotRecovered."""
        _until(lambda: self._missing(gone))

    def _missing(self, gone: Collection[psutil.Process]) -> str | None:
        """Says what is missing, for people; None if nothing is."""
        each = self._config.deployments[0].num_ranks
        wanted = {RANKS: self.replicas * each, REPLICAS: self.replicas, ROUTERS: self.routers}
        for name, number in wanted.items():
            if (there := len(self.processes(name))) != number:
                return f"{there} of {number} {name}"
        if left := [process for process in gone if _runs(process)]:
            return f"{len(left)} old processes run"
        if len(_nodes()) < 2:
            return "one node of two"
        for name, number in ((REPLICA, self.replicas), (ROUTER, self.routers)):
            states = [actor["state"] for actor in _deployments()[name]["replicas"]]
            if states != ["RUNNING"] * number:
                return f"{name}: {', '.join(states)} of {number}"
        for _ in range(LOOKS):
            if (ready := self._ready()) != self.replicas:
                return f"a router has {ready} replicas"
        return None

    def _ready(self) -> int:
        """The replicas to which some router can send; -1 if it does not answer."""
        try:
            return int(httpx.get(f"{self.url}/ready").json()["replicas"])
        except (httpx.HTTPError, ValueError):
            return -1

    # ------------------------------------------------------------ inside the ranks

    def lose_events(self, count: int) -> int:
        """Loses the next `count` messages with cache events of each replica. Returns of how many replicas."""
        return len(self._ask(lambda rank: rank.lose_events.remote(count)))

    def lost_all(self) -> bool:
        """Whether all of these messages were lost by now."""
        return all(self._ask(lambda rank: rank.lost_all.remote()))

    def held_tokens(self) -> list[int]:
        """The KV tokens that requests hold in each replica, which has no requests. Raises AssertionError unless each
        page has one owner, and NotRecovered if a replica still computes."""
        try:
            return self._ask(lambda rank: rank.held_tokens.remote())
        except GetTimeoutError:
            raise NotRecovered(f"a replica is not at rest {REST_S:g} s after the last request") from None

    def _ask(self, ask: Callable[[Any], Any]) -> list[Any]:
        """The answers of all leading ranks that live."""
        answers = []
        for rank in ray.get(self._roll.all.remote()):
            with contextlib.suppress(RayActorError):
                answers.append(ray.get(ask(rank), timeout=REST_S))
        return answers


def _until(missing: Callable[[], str | None]) -> None:
    """Returns once nothing is missing. Raises NotRecovered after `RECOVERY_S`."""
    deadline = time.monotonic() + RECOVERY_S
    while (what := missing()) is not None:
        if time.monotonic() > deadline:
            raise NotRecovered(f"not whole after {RECOVERY_S:g} s: {what}")
        time.sleep(LOOK_S)  # other processes' doing


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; it may be stopped."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False


def _node(cpus: int) -> dict[str, Any]:
    return {"num_cpus": cpus, "object_store_memory": STORE_BYTES, "include_dashboard": False}


def _nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def _deployments() -> dict[str, Any]:
    client = _get_global_client()
    assert client is not None, "the application runs"
    found: dict[str, Any] = client.get_serve_details()["applications"][APP]["deployments"]
    return found
