"""Room on a Ray cluster that was joined: on paper, before Ray is asked.

What finds no room waits in Ray without a word. Serve says so after half a minute, of one replica and in Ray's terms.
Machines may still join such a cluster, by hand or by Ray's autoscaler, so what is missing is told, and nothing refused.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.config import Config
from cluster.replica import bundles

Resources = Mapping[str, float]

ROUNDING = 1e-4  # Ray counts resources in ten thousandths
CPU, GPU = "CPU", "GPU"


@dataclass(frozen=True)
class Shortage:
    """The resources that are missing. `wanted`, `placed`: replicas of each model, and those of them that find room, by
    its name. `needed`, `there`: of each resource, for all replicas, and on all machines together. `machines`: how many
    these are."""

    wanted: Mapping[str, int]
    placed: Mapping[str, int]
    needed: Resources
    there: Resources
    machines: int

    @property
    def missing(self) -> dict[str, float]:
        """How much more of each resource all machines together would need. Empty if there is enough, in pieces that are
        too small."""
        lacks = {name: amount - self.there.get(name, 0.0) for name, amount in self.needed.items()}
        return {name: amount for name, amount in lacks.items() if amount > ROUNDING}


def shortage(
    config: Config, machines: Mapping[str, Resources], routers: Mapping[str, int], most: bool = False
) -> Shortage | None:
    """Returns what is missing on machines with these resources, by their addresses; None if all replicas find room.
    `routers`: how many there are on each machine, whose CPUs are reserved. `config` must be settled. `most`: of the
    replicas that autoscaling may start, not of those at the start."""
    nodes = []
    for address, resources in machines.items():
        cpus = resources.get(CPU, 0.0) - routers.get(address, 0) * config.cpus_per_router
        nodes.append({**resources, CPU: max(0.0, cpus)})
    there = _sum(nodes)
    wanted = {each.name: each.most_replicas if most else each.replicas for each in config.deployments}
    placed = dict.fromkeys(wanted, 0)
    needed: Counter[str] = Counter()
    for deployment in config.deployments:
        one = _sum(bundles(deployment))
        needed.update({name: amount * wanted[deployment.name] for name, amount in one.items()})
    # Those at the start are there before autoscaling adds any.
    for until in ({each.name: each.replicas for each in config.deployments}, wanted):
        for deployment in config.deployments:
            group = bundles(deployment)
            while placed[deployment.name] < until[deployment.name] and (left := _placed(group, nodes)):
                nodes = left
                placed[deployment.name] += 1
    return None if placed == wanted else Shortage(wanted, placed, needed, there, len(machines))


def told(short: Shortage, config: Config, most: bool = False) -> str:
    """Tells people what is missing and what to do about it, in one line."""
    scaled = {each.name for each in config.deployments if most and each.max_replicas is not None}
    keys = {name: "max_replicas" if name in scaled else "replicas" for name in short.wanted}
    several = len(config.deployments) > 1
    lacking = [name for name, number in short.wanted.items() if short.placed[name] < number]
    of = " and ".join(
        f"{short.placed[name]} of {keys[name]}={short.wanted[name]}" + (f" of {name}" if several else "")
        for name in lacking
    )
    remedies = [f"{keys[name]} of {name}" if several else keys[name] for name in lacking]
    if not several and short.placed[lacking[0]]:
        remedies = [f"{keys[lacking[0]]} to {short.placed[lacking[0]]}"]
    if missing := short.missing:
        on = "1 machine has" if short.machines == 1 else f"{short.machines} machines have"
        why = " and ".join(
            f"{_amount(name, amount)} are missing ({short.needed[name]:g} are needed, {on} {short.there.get(name, 0):g}"
            + (" that routers leave)" if name == CPU else ")")
            for name, amount in missing.items()
        )
        remedies += ["cpus_per_rank"] if CPU in missing else []
    else:
        stages = {each.name: _amounts(bundles(each)[-1]) for each in config.deployments if each.name in lacking}
        why = "there is enough on all machines together, and too little on one: " + ", ".join(
            f"a stage{f' of {name}' if several else ''} takes {amounts}" for name, amounts in stages.items()
        )
        remedies += ["tp"] if any(each.tp > 1 for each in config.deployments if each.name in lacking) else []
    return (
        f"room for {of} only: {why}. What has room serves; the others start when machines join, by hand or by Ray's "
        f"autoscaler; if none do, lower {' or '.join(remedies)}"
    )


def machines_of(nodes: Iterable[Mapping[str, Any]]) -> dict[str, Resources]:
    """The resources of the machines that live, by their addresses, of what `ray.nodes` returns."""
    return {node["NodeManagerAddress"]: node["Resources"] for node in nodes if node["Alive"]}


def _placed(group: Sequence[Resources], nodes: Sequence[Resources]) -> list[dict[str, float]] | None:
    """Returns what is left on nodes once a replica has its place, as Ray chooses it; None if there is none."""
    after = [dict(node) for node in nodes]
    # The largest bundle first, and each where it leaves the least.
    for bundle in sorted(group, key=lambda each: sum(each.values()), reverse=True):
        room = [node for node in after if all(node.get(name, 0.0) + ROUNDING > bundle[name] for name in bundle)]
        if not room:
            return None
        place = min(room, key=lambda node: (node.get(GPU, 0.0), node[CPU]))
        for name, amount in bundle.items():
            place[name] -= amount
    return after


def _sum(tables: Iterable[Resources]) -> dict[str, float]:
    found: Counter[str] = Counter()
    for table in tables:
        found.update(table)
    return dict(found)


def _amounts(resources: Resources) -> str:
    return " and ".join(_amount(name, amount) for name, amount in resources.items())


def _amount(name: str, amount: float) -> str:
    return f"{round(amount, 2):g} {name}s"
