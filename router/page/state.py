"""The state of a server as one router knows it, for the page at `/`."""

import asyncio
from typing import Literal

import msgspec

from router.metrics.metrics import values
from router.models import Models
from router.service import Service
from worker.messages import ReplicaLoad

REPLICAS_AT_ONCE = 8  # the event loop does other work between: they take about a millisecond


class Times(msgspec.Struct):
    """Times that this router has measured, of one kind: their number, and their sum in seconds."""

    count: int = 0
    sum_s: float = 0.0


class ReplicaState(msgspec.Struct, kw_only=True):
    """A replica.

    | field | meaning |
    | --- | --- |
    | `state` | ready; silent: connected, but not heard for too long; leaving: it is being taken away; connecting: not connected, or without a load yet |
    | `load` | the load that it told last |
    | `load_age_s` | seconds since then |
    | `queue_s` | predicted seconds until a prompt that comes now would begin |
    | `first_token`, `inter_token` | times to first tokens, and between tokens |
    | `attention`, `attention_problem` | the attention backend, and why it is not a faster one |
    """  # noqa: E501

    name: str
    state: Literal["ready", "silent", "leaving", "connecting"]
    load: ReplicaLoad | None = None
    load_age_s: float | None = None
    queue_s: float | None = None
    first_token: Times
    inter_token: Times
    attention: str = ""
    attention_problem: str = ""


class ModelState(msgspec.Struct, kw_only=True):
    """A model that replicas serve.

    | field | meaning |
    | --- | --- |
    | `wanted` | how many replicas there should be; without autoscaling 0 if that is not known |
    | `scaled_for` | why autoscaling changed that number last, as `shoal_replicas_wanted_because` has it; null without |
    | `hit_rate` | part of the prompts' tokens that was cached; null before the first |
    | `ended` | sequences, by how they ended |
    | `resumed` | sequences that went on elsewhere, by reason |
    | `taken_out` | how many times a replica got no more requests, by reason |
    """

    name: str
    wanted: int
    scaled_for: str | None
    hit_rate: float | None
    ended: dict[str, int]
    resumed: dict[str, int]
    taken_out: dict[str, int]
    replicas: list[ReplicaState]


class Refusals(msgspec.Struct):
    """Requests that were refused. `model` is empty where the refusal came before the model was known."""

    model: str
    status: int
    reason: str
    count: int


class ServerState(msgspec.Struct, kw_only=True):
    """The state of a server. Counts are since the start of what counts them: a replica, or this router.

    | field | meaning |
    | --- | --- |
    | `router` | name of the router that answers; empty if it has none |
    | `needs_key` | whether requests need an API key |
    | `names` | all names of models, in the order of their configuration, aliases and other endpoints' too |
    """

    version: str
    router: str
    needs_key: bool
    names: list[str]
    models: list[ModelState]
    refused: list[Refusals]


async def server_state(models: Models, version: str, needs_key: bool) -> ServerState:
    """The state now. The event loop never waits for longer than `REPLICAS_AT_ONCE` replicas take."""
    metrics = models.metrics
    return ServerState(
        version=version,
        router=metrics.router,
        needs_key=needs_key,
        names=[listed.name for listed in models],
        models=[await _model_state(models, service) for service in models.services],
        refused=[
            Refusals(model, int(status), reason, int(count))
            for (model, status, reason), count in values(metrics.refused).items()
        ],
    )


async def _model_state(models: Models, service: Service) -> ModelState:
    metrics, name = service.metrics, service.model
    return ModelState(
        name=name,
        wanted=int(values(models.metrics.wanted).get((name,), 0)),
        scaled_for=metrics.scaled_for,
        hit_rate=metrics.hit_rate,
        ended=_of_model(values(models.metrics.sequences), name),
        resumed=_of_model(values(models.metrics.resumed), name),
        taken_out=_of_model(values(models.metrics.taken_out), name),
        replicas=await _replica_states(service),
    )


def _of_model(counts: dict[tuple[str, ...], float], model: str) -> dict[str, int]:
    """The values of a metric with the labels model and reason, by reason."""
    return {reason: int(count) for (of, reason), count in counts.items() if of == model}


async def _replica_states(service: Service) -> list[ReplicaState]:
    metrics, found = service.metrics, []
    queues = {view.replica_id: view.queue_s for view in service.views()}
    ages = metrics.load_ages()
    states: dict[str, Literal["ready", "silent", "leaving"]] = {
        **dict.fromkeys(metrics.ready, "ready"),
        **dict.fromkeys(metrics.leaving, "leaving"),
        **dict.fromkeys(metrics.silent, "silent"),
    }
    for number, name in enumerate(sorted(service.replicas.known)):
        if number % REPLICAS_AT_ONCE == REPLICAS_AT_ONCE - 1:
            await asyncio.sleep(0)
        load = metrics.loads.get(name)
        attention, problem = metrics.attention.get(name, ("", ""))
        found.append(
            ReplicaState(
                name=name,
                state=states.get(name, "connecting"),
                load=None if load is None else msgspec.structs.replace(load, peers_seen={}),
                load_age_s=ages.get(name),
                queue_s=queues.get(name),
                first_token=Times(*metrics.totals(name, "first_token")),
                inter_token=Times(*metrics.totals(name, "inter_token")),
                attention=attention,
                attention_problem=problem,
            )
        )
    return found
