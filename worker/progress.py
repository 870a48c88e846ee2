"""How far a replica and its ranks have come, for those who watch for a hang: they must not import torch."""

from typing import NamedTuple


class WorkProgress(NamedTuple):
    """Where a replica's work is. `number` changes whenever it gets on. `limit_s`: how long, in seconds, it may stay the
    same."""

    number: int
    limit_s: float


class NewestSteps(NamedTuple):
    """How far a rank has come: the newest step that it has begun, and the newest that its device has computed."""

    begun: int = 0
    ended: int = 0
