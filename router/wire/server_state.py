"""The body of `/state`: what the live page shows of a server, as one router knows it."""

from typing import Literal

import msgspec

from worker.messages import ReplicaLoad


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
    | `hit_rate`, `hit_ceiling` | part of the prompts' tokens that was cached, and the most that it could be |
    | `ended` | sequences, by how they ended |
    | `resumed` | sequences that went on elsewhere, by reason |
    | `taken_out` | how many times a replica got no more requests, by reason |
    """

    name: str
    wanted: int
    scaled_for: str | None
    hit_rate: float | None
    hit_ceiling: float | None
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
