"""A pod's goodbye on Kubernetes: `python -m cluster.leave_node SECONDS`, its preStop hook.

Kubernetes ends a pod with SIGTERM, on which Ray ends all processes of the node at once. Before the signal it runs this
command, which tells Ray that the node is going away. Serve then starts replicas and routers on other nodes, as far as
these have room, and takes away those of this node in time: their streams end, or go on elsewhere. Those that are with a
router of this node to the last get an error (`cluster.deployed.watch`).
"""

import sys
import time
from collections.abc import Callable, Iterable

import psutil
import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # compiled
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]  # generated

from cluster.deployed import APP, STREAMS_S

POLL_S = 0.5
# How long those of other nodes may take to start before those of this one are taken away all the same. Serve would take
# routers away at once, whose streams may go on for longer than a pod has; so it hears of the pod's end after that.
REPLACED_S = 10.0


class NotAccepted(RuntimeError):
    """Ray does not let the node go. The message says why."""


def drain(gcs: GcsClient, node_id: str, within_s: float) -> None:
    """Tells Ray that a node (its id in hexadecimal) ends within `within_s` seconds. Raises NotAccepted."""
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + within_s) * 1000)
    is_accepted, why = gcs.drain_node(node_id, reason, "its pod ends", deadline_ms)
    if not is_accepted:
        raise NotAccepted(f"Ray does not drain node {node_id}: {why}")


def wait(
    within_s: float,
    names: Callable[[], Iterable[str]],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Returns once no process of the application runs here: True; or False after `within_s` seconds. `names`: the
    command lines of the processes that there are."""
    until_s = clock() + within_s
    while any(name.startswith((f"ray::ServeReplica:{APP}:", "ray::Rank")) for name in names()):
        if clock() >= until_s:
            return False
        sleep(POLL_S)
    return True


def running() -> list[str]:
    """The command lines of all processes of this machine, or of this container."""
    return [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]


def main() -> int:
    """Returns 0 once the node is free, else 1."""
    within_s = float(sys.argv[1])
    ray.init(address="auto", log_to_driver=False)
    context = ray.get_runtime_context()
    gcs, node_id = GcsClient(address=context.gcs_address), context.get_node_id()
    try:
        drain(gcs, node_id, 2 * STREAMS_S)
        if wait(REPLACED_S, running):
            return 0
        drain(gcs, node_id, within_s - REPLACED_S)
    except NotAccepted as error:
        print(error, file=sys.stderr)
        return 1
    return 0 if wait(within_s - REPLACED_S, running) else 1


if __name__ == "__main__":
    sys.exit(main())
