"""Whether the pods of a rendered RayService hold what runs in them: Ray's scheduler on paper.

Knows KubeRay's way to tell Ray of a pod's resources, Ray's best fit of placement groups, and Shoal's own demands. Knows
nothing of the chart's arithmetic.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from math import ceil
from typing import Any

import yaml

from cluster.config import Config, DeploymentConfig, load
from cluster.replica import bundles

UNIT = 10_000  # Ray counts resources in ten thousandths
GIB = 1 << 30
_FACTORS = {
    "": 1,
    "u": Decimal("0.000001"),
    "m": Decimal("0.001"),
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
}
_FACTORS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "Pi": 1 << 50}


def quantity(text: Any) -> Decimal:
    """A quantity of Kubernetes as a number."""
    text = str(text)
    number = text.rstrip("umkKMGTPi")
    return Decimal(number) * _FACTORS[text.removeprefix(number)]


@dataclass
class Node:
    """What is free on one worker, in ten thousandths; of each GPU by itself."""

    cpus: int
    gpus: list[int]

    def has(self, cpus: int, gpus: int) -> bool:
        return self.cpus >= cpus and bool(gpus == 0 or self._taken(gpus))

    def take(self, cpus: int, gpus: int) -> None:
        self.cpus -= cpus
        for index, amount in self._taken(gpus):
            self.gpus[index] -= amount

    def _taken(self, gpus: int) -> list[tuple[int, int]]:
        if gpus < UNIT:  # a part of the fullest GPU that has room
            room = [(free, index) for index, free in enumerate(self.gpus) if free >= gpus > 0]
            return [(min(room)[1], gpus)] if room else []
        whole = [(index, UNIT) for index, free in enumerate(self.gpus) if free == UNIT]
        return whole[: gpus // UNIT] if len(whole) * UNIT >= gpus else []

    def score(self, cpus: int, gpus: int) -> float:
        """Ray's: the more of what is free is taken, the better."""
        return cpus / max(self.cpus, 1) + (gpus / max(sum(self.gpus), 1) if gpus else 0.0)


@dataclass
class Server:
    """What is to be placed: the configuration that the server makes of the manifest, with numbers in place."""

    config: Config
    routers: int
    nodes: int
    cpus: int
    gpus: int
    _groups: list[list[tuple[int, int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for deployment in self.config.deployments:
            settled = deployment.model_copy(update={"device": self.config.device})
            group = [(round(each["CPU"] * UNIT), round(each.get("GPU", 0) * UNIT)) for each in bundles(settled)]
            self._groups += [sorted(group, reverse=True)] * deployment.most_replicas

    @property
    def ranks(self) -> int:
        return sum(deployment.num_ranks * deployment.most_replicas for deployment in self.config.deployments)

    def unplaced(self, seed: int) -> str | None:
        """What finds no room, if replicas and workers come in an order of this seed; None if all do. Routers ask Ray
        for nothing: their CPUs must be left over."""
        rng = random.Random(seed)
        waiting = list(self._groups)
        if seed == 1:
            waiting.reverse()
        elif seed:
            rng.shuffle(waiting)
        nodes: list[Node] = []
        for _ in range(self.nodes):
            nodes.append(Node(self.cpus * UNIT, [UNIT] * self.gpus))
            if seed % 2 == 0 and len(nodes) < self.nodes:
                continue  # all come at once
            waiting = [each for each in waiting if not self._place(each, nodes)]
        if waiting:
            return f"{len(waiting)} are left, as {waiting[0]}"
        cpus = sum(node.cpus for node in nodes) / UNIT
        needed = self.routers * self.config.cpus_per_router
        return None if cpus + 1e-3 >= needed else f"{needed} CPUs for routers: {cpus} are left"

    def _place(self, group: list[tuple[int, int]], nodes: list[Node]) -> bool:
        before = [(node.cpus, list(node.gpus)) for node in nodes]
        for cpus, gpus in group:
            room = [node for node in nodes if node.has(cpus, gpus)]
            if not room:
                for node, (left, each) in zip(nodes, before, strict=True):
                    node.cpus, node.gpus = left, each
                return False
            max(room, key=lambda node, cpus=cpus, gpus=gpus: node.score(cpus, gpus)).take(cpus, gpus)
        return True


def server(manifest: dict[str, Any]) -> Server:
    """Of a RayService, as the server reads its arguments and Serve its numbers. Raises ConfigError."""
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    numbers = {each["name"]: each for each in application["deployments"]}
    router = numbers.pop("Router")
    config = load(overrides=application["args"])
    assert [config.deployment_name(each) for each in config.deployments] == list(numbers)
    counts = iter([each["num_replicas"] for each in numbers.values()])

    def numbered(each: DeploymentConfig) -> DeploymentConfig:
        given = each.model_dump(exclude_unset=True) | {"replicas": next(counts)}
        return DeploymentConfig.model_validate(given)  # the rules hold for these numbers too

    config = config.changed(numbered)
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    container = group["template"]["spec"]["containers"][0]
    resources = container["resources"]
    cpus = resources["limits"].get("cpu") or resources["requests"]["cpu"]
    given = [int(amount) for name, amount in resources["limits"].items() if name.startswith("nvidia.com/")]
    gpus = int(group["rayStartParams"]["num-gpus"])
    assert given == ([gpus] if gpus else [])
    return Server(config, router["num_replicas"], group["maxReplicas"], ceil(quantity(cpus)), gpus)


def faults(manifest: dict[str, Any], orders: int = 6) -> Iterator[str]:
    """What is wrong with the pods of a RayService: of itself, and for what must run in them."""
    spec = manifest["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        resources = group["template"]["spec"]["containers"][0]["resources"]
        for name, amount in resources["requests"].items():
            if name in resources["limits"] and quantity(amount) > quantity(resources["limits"][name]):
                yield f"{name}: more is asked for than may be used"
        if group["template"]["spec"]["terminationGracePeriodSeconds"] > 2 * 86400:
            yield "a pod may take days to end"
    wanted = server(manifest)
    yield from _memory(wanted, lambda group: quantity(_memory_of(group)), spec)
    for seed in range(orders):
        if left := wanted.unplaced(seed):
            yield f"order {seed}: {left}"
            return


def _memory_of(group: dict[str, Any]) -> Any:
    return group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]


def _memory(wanted: Server, memory: Callable[[dict[str, Any]], Decimal], spec: dict[str, Any]) -> Iterator[str]:
    """A gibibyte for Ray, one for routers, and one for each rank, on a GPU two: with torch alone a rank has half."""
    if memory(spec["headGroupSpec"]) < 2 * GIB:
        yield "the head has too little memory"
    each = 2 if wanted.gpus else 1
    ranks = min(-(-wanted.ranks // wanted.nodes), wanted.cpus * 100)
    if memory(spec["workerGroupSpecs"][0]) < (2 + each * ranks) * GIB:
        yield f"a worker has too little memory for {ranks} ranks"
