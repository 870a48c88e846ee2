"""Faults that may happen to a fleet, and the order in which they do.

| fault | what happens |
| --- | --- |
| `rank_killed`, `rank_stopped` | a rank, with the scheduler on the leading one, gets SIGKILL or SIGSTOP |
| `all_ranks_killed` | every rank gets SIGKILL at once: no replica is left, and requests wait for one |
| `rank_paused` | SIGSTOP, and some seconds later SIGCONT: its streams have gone elsewhere, and its news come late |
| `replica_killed`, `replica_stopped` | the same signals to the control actor of a replica |
| `node_killed`, `node_stopped` | all processes of a node get the signal at once; a new node takes its place |
| `router_killed` | a router gets SIGKILL |
| `events_lost` | messages with cache events of each replica do not arrive |
| `scaled_up`, `scaled_down` | one replica more, or one less |
| `changed` | a changed setting, for which all replicas and routers are replaced in turns |
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from random import Random

import psutil

from bench.chaos.steady_load import SteadyLoad
from bench.chaos.two_nodes import RANKS, REPLICAS, ROUTERS, TwoNodes

PAUSE_S = 5.0  # longer than routers wait for a heartbeat
LOST_MESSAGES = 5
LOOK_S = 0.1

Fault = Callable[[TwoNodes, SteadyLoad, Random], str]
"""Does something to the fleet, and returns when it is whole again. Returns what was hit. Raises NotRecovered."""


def order(names: Sequence[str], random: Random) -> Iterator[list[str]]:
    """Rounds without end: each has every fault once, in an order of its own. A fleet is scaled up before it is scaled
    down, so that it never has fewer replicas than at its start."""
    while True:
        round_ = random.sample(list(names), len(names))
        if {"scaled_up", "scaled_down"} <= set(names):
            up, down = round_.index("scaled_up"), round_.index("scaled_down")
            round_[min(up, down)], round_[max(up, down)] = "scaled_up", "scaled_down"
        yield round_


def _signalled(name: str, signum: int) -> Fault:
    """A signal to one process."""

    def fault(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
        process = random.choice(fleet.processes(name))
        process.send_signal(signum)
        fleet.until_whole(gone=[process])
        return f"pid {process.pid}"

    return fault


def _rank_paused(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
    process = random.choice(fleet.processes(RANKS))
    process.suspend()
    time.sleep(PAUSE_S)
    process.resume()
    fleet.until_whole()
    return f"pid {process.pid}"


def _all_ranks_killed(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
    killed = fleet.processes(RANKS)
    for process in killed:
        process.kill()
    fleet.until_whole(gone=killed)
    return f"{len(killed)} processes"


def _node_lost(signum: int) -> Fault:
    def fault(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
        lost = fleet.other_node()
        for process in lost:
            process.send_signal(signum)
        fleet.replace_node(lost)
        fleet.until_whole(gone=lost)
        return f"{len(lost)} processes"

    return fault


def _router_killed(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
    victim, *others = random.sample(routers := fleet.processes(ROUTERS), len(routers))
    victim.suspend()  # it accepts no more connections while they are listed
    load.orphan(_clients([victim]), _clients(others))
    victim.kill()
    fleet.until_whole(gone=[victim])
    return f"pid {victim.pid}"


def _clients(processes: Sequence[psutil.Process]) -> set[int]:
    """The ports of all that are connected to these processes."""
    return {peer.raddr.port for process in processes for peer in process.net_connections("tcp") if peer.raddr}


def _events_lost(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
    number = fleet.lose_events(LOST_MESSAGES)
    while not fleet.lost_all():
        time.sleep(LOOK_S)
    fleet.until_whole()
    return f"{number} replicas, {LOST_MESSAGES} messages each"


def _scaled(by: int) -> Fault:
    def fault(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
        fleet.scale(fleet.replicas + by)
        fleet.until_whole()
        return f"{fleet.replicas - by} become {fleet.replicas}"

    return fault


def _changed(fleet: TwoNodes, load: SteadyLoad, random: Random) -> str:
    before = [*fleet.processes(REPLICAS), *fleet.processes(ROUTERS), *fleet.processes(RANKS)]
    fleet.change()
    fleet.until_whole(gone=before)
    return f"{len(before)} processes"


FAULTS: dict[str, Fault] = {
    "rank_killed": _signalled(RANKS, signal.SIGKILL),
    "rank_stopped": _signalled(RANKS, signal.SIGSTOP),
    "all_ranks_killed": _all_ranks_killed,
    "rank_paused": _rank_paused,
    "replica_killed": _signalled(REPLICAS, signal.SIGKILL),
    "replica_stopped": _signalled(REPLICAS, signal.SIGSTOP),
    "node_killed": _node_lost(signal.SIGKILL),
    "node_stopped": _node_lost(signal.SIGSTOP),
    "router_killed": _router_killed,
    "events_lost": _events_lost,
    "scaled_up": _scaled(1),
    "scaled_down": _scaled(-1),
    "changed": _changed,
}
