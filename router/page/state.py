"""The state of a server as one router knows it, for the page at `/`."""

import asyncio
from typing import Literal

import msgspec

from router.metrics.metrics import values
from router.models import Models
from router.service import Service
from router.wire.server_state import ModelState, Refusals, ReplicaState, ServerState, Times

REPLICAS_AT_ONCE = 8  # the event loop does other work between: they take about a millisecond


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
        resumed=_happened(_of_model(values(models.metrics.resumed), name)),
        taken_out=_happened(_of_model(values(models.metrics.taken_out), name)),
        replicas=await _replica_states(service),
    )


def _of_model(counts: dict[tuple[str, ...], float], model: str) -> dict[str, int]:
    """The values of a metric with the labels model and reason, by reason."""
    return {reason: int(count) for (of, reason), count in counts.items() if of == model}


def _happened(counts: dict[str, int]) -> dict[str, int]:
    return {reason: count for reason, count in counts.items() if count}


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
