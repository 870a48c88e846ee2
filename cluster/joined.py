"""A Ray cluster that was joined: what of Shoal runs there, and which `shoal serve` looks after it.

Everything here is kept by Ray, so that the server outlives `shoal serve`, and the next one can take it over.

| in Ray | what it is | lives |
| --- | --- | --- |
| an actor, `KEEPER` | the `shoal serve` that looks after the server | as long as that process |
| an entry of Ray's table, `Deployed` | what was deployed | as long as the server |
| placement groups, `RESERVED` | the CPUs of routers, which replicas would take otherwise | as long as the server |
"""

import contextlib
import hashlib
import os
import socket
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import ray
from pydantic import SecretStr
from ray import serve
from ray._private.state import available_resources_per_node
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put
from ray.serve.exceptions import RayServeException
from ray.util import list_named_actors
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from cluster.config import Config
from cluster.deployed import APP
from cluster.followed_config import settings
from cluster.replica import STOP_S, bundles
from cluster.room import machines_of

NAMESPACE = "shoal"
KEEPER = "shoal serve"
RESERVED = "shoal-router"
NODE_SHARE = 0.001  # of the resource that stands for a node: an actor or bundle that asks for some of it is there
KEEPER_ENDS_S = 20.0  # how long Ray may take to notice that a `shoal serve` was killed
FIT_S = 10.0  # how long Ray may take to reserve CPUs that are free
POLL_S = 0.2
PACKAGES = ("cluster", "kernels", "pipeline", "radix", "router", "shoal", "worker")


class Kept(RuntimeError):
    """Another `shoal serve` looks after the server. The message says where."""


class NoRoom(RuntimeError):
    """Routers do not fit on their machine. The message is for the user."""


class Deployed(msgspec.Struct):
    """A server as it was deployed. `build`: a digest of the code. `settings`: a digest of each setting but the numbers,
    by name. `devices`: cpu or cuda, by the model's name. `has_serve`: whether Ray Serve was started for it."""

    build: str
    settings: dict[str, str]
    devices: dict[str, str]
    drain_s: float
    has_serve: bool

    @classmethod
    def of(cls, given: Config, settled: Config, has_serve: bool) -> "Deployed":
        """`given`: as the user has said it. `settled`: with the devices that it has got."""
        devices: dict[str, str] = {each.name: each.device for each in settled.deployments}
        return cls(build(), digests(given), devices, given.drain_s, has_serve)

    def changes(self, given: Config) -> list[str]:
        """The names of the settings in which a configuration differs from this."""
        new = digests(given)
        return [name for name in self.settings | new if self.settings.get(name) != new.get(name)]

    def write(self) -> None:
        _internal_kv_put(KEEPER, msgspec.json.encode(self), overwrite=True, namespace=NAMESPACE.encode())


def deployed() -> Deployed | None:
    """Returns what was deployed; None if nothing was, or not by `shoal serve`."""
    found = _internal_kv_get(KEEPER, namespace=NAMESPACE.encode())
    return None if found is None else msgspec.json.decode(found, type=Deployed)


def runs() -> bool:
    """Whether the application is in Serve."""
    return APP in serve.status().applications


def digests(config: Config) -> dict[str, str]:
    """A digest of each setting but the numbers, by name: secrets cannot be read from it."""
    return {name: hashlib.sha256(_shown(value).encode()).hexdigest()[:16] for name, value in settings(config).items()}


def _shown(value: Any) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else repr(value)


def build() -> str:
    """A digest of Shoal's code, as it lies on this machine."""
    found = hashlib.sha256()
    for package in PACKAGES:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for file in sorted(Path(folder).rglob("*.py")):
                found.update(f"{package}/{file.relative_to(folder)}".encode())
                found.update(file.read_bytes())
    return found.hexdigest()[:16]


# ---------------------------------------------------------------- who looks after it


class _Keeper:
    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return self._name


def keep() -> Any:
    """Makes this process the one that looks after the server, until it ends or drops what this returns. Raises Kept if
    another one does."""
    deadline = time.monotonic() + KEEPER_ENDS_S
    while True:
        with contextlib.suppress(ValueError):  # the name is taken
            name = f"process {os.getpid()} on {socket.gethostname()}"
            return ray.remote(_Keeper).options(name=KEEPER, namespace=NAMESPACE, num_cpus=0).remote(name)
        if time.monotonic() > deadline:
            with contextlib.suppress(ValueError, RayError):
                other: Any = ray.get(ray.get_actor(KEEPER, NAMESPACE).name.remote(), timeout=FIT_S)
                raise Kept(f"{other} looks after the server of this Ray cluster: end that first")
        time.sleep(POLL_S)


# ---------------------------------------------------------------- room for routers


def reserve(numbers: Mapping[str, int], cpus: float) -> list[str]:
    """Reserves the CPUs of these numbers of routers, by the machine's address in Ray, and gives back what is reserved
    beyond that. A machine that is not there yet gets them once it is; returns the addresses of such machines. Raises
    NoRoom, after which nothing is reserved that was not before."""
    have = _reserved()
    wanted = {_name(address, index, cpus): address for address, number in numbers.items() for index in range(number)}
    machines = machines_of(ray.nodes())
    for address, number in numbers.items():
        if address in machines and number * cpus > machines[address].get("CPU", 0.0):
            raise _no_room(address, number, cpus, machines[address])
    made = {
        name: placement_group([{"CPU": cpus, f"node:{address}": NODE_SHARE}], name=name, lifetime="detached")
        for name, address in wanted.items()
        if name not in have
    }
    _remove(group for name, group in have.items() if name not in wanted)
    deadline = time.monotonic() + FIT_S
    for name, group in made.items():
        address = wanted[name]
        if address in machines and not group.wait(max(0.0, deadline - time.monotonic())):
            for other in made.values():
                remove_placement_group(other)
            raise _no_room(address, numbers[address], cpus, machines[address])
    return [address for address in numbers if address not in machines]


def _no_room(address: str, number: int, cpus: float, there: Mapping[str, float]) -> NoRoom:
    missing = number * cpus - there.get("CPU", 0.0)
    lacks = f": {missing:g} are missing" if missing > 0 else " that replicas or others use too"
    return NoRoom(
        f"{number} routers of cpus_per_router={cpus:g} do not fit on {address}, which has {there.get('CPU', 0.0):g} "
        f"CPUs{lacks}. Lower routers, cpus_per_router or replicas"
    )


def release() -> None:
    """Gives back all that is reserved."""
    _remove(_reserved().values())


def _name(address: str, index: int, cpus: float) -> str:
    return f"{RESERVED}-{address}-{index}-{cpus:g}"


def _reserved() -> dict[str, str]:
    """The ids of the placement groups that there are, by name."""
    table = placement_group_table().items()
    return {
        group["name"]: name
        for name, group in table
        if group["name"].startswith(f"{RESERVED}-") and group["state"] != "REMOVED"
    }


def _remove(groups: Iterable[str]) -> None:
    for group in groups:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(group))))


def with_room(config: Config) -> set[str]:
    """The models of which one more replica fits into what is free, next to those of the models before it."""
    free: list[dict[str, float]] = list(available_resources_per_node().values())
    found = set()
    for deployment in config.deployments:
        after = [dict(node) for node in free]
        for bundle in bundles(deployment):
            node = next((node for node in after if all(node.get(name, 0) >= bundle[name] for name in bundle)), None)
            if node is None:
                break
            for name, amount in bundle.items():
                node[name] -= amount
        else:
            free = after
            found.add(deployment.name)
    return found


# ---------------------------------------------------------------- its end


def end() -> None:
    """Ends the server: answers that are on their way first, within `drain_s`. Nothing of it is left in Ray. Without a
    server, does nothing."""
    found = deployed()
    with contextlib.suppress(RayServeException, RayError, TimeoutError):  # Serve is gone
        end_application(found.drain_s if found else 0.0)
    _internal_kv_del(KEEPER, namespace=NAMESPACE.encode())  # a `shoal serve` that finds no Serve looks for this
    release()
    if found is not None and found.has_serve:
        with contextlib.suppress(RayServeException, RayError, TimeoutError):
            serve.shutdown()


def end_application(drain_s: float) -> None:
    """Ends routers and replicas. Streams may go on for `drain_s` seconds; what has not ended then is killed."""
    if runs():
        serve.delete(APP, _blocking=False)
    deadline = time.monotonic() + drain_s + STOP_S
    while runs():
        if time.monotonic() > deadline:
            for actor in list_named_actors(all_namespaces=True):
                if actor["name"].startswith(f"SERVE_REPLICA::{APP}#"):
                    with contextlib.suppress(ValueError):  # it has ended
                        ray.kill(ray.get_actor(actor["name"], actor["namespace"]))
            deadline += STOP_S
        time.sleep(POLL_S)
