"""Ranks that a benchmark can reach: it loses their cache events, and counts the pages that they hold."""

from typing import Any

import ray
from ray.actor import ActorHandle

from cluster.config import ReplicaConfig
from cluster.rank import Rank
from cluster.replica import Replica
from worker.engine.engine import Engine
from worker.messages import CacheEvents, decode_from_replica
from worker.parallel.rank_store import Meeting

ROLL, NAMESPACE = "rank_roll", "chaos"  # the name of the actor that knows the ranks


class RankRoll:
    """An actor that knows the leading ranks, as they have loaded their models; those that have ended, too."""

    def __init__(self) -> None:
        self._ranks: list[ActorHandle] = []

    def add(self, rank: ActorHandle) -> None:
        self._ranks.append(rank)

    def all(self) -> list[ActorHandle]:
        return self._ranks


class ReachableRank(Rank):
    """A rank that is on the roll."""

    _to_lose = 0

    def load(self, config: ReplicaConfig, rank: int = 0, meeting: Meeting | None = None) -> dict[str, Any]:
        published = super().load(config, rank, meeting)
        if self._server is not None:
            self._send = self._server._send_frame
            self._server._send_frame = self._send_or_lose  # type: ignore[method-assign]  # as a network would do it
            roll: Any = ray.get_actor(ROLL, namespace=NAMESPACE)
            ray.get(roll.add.remote(ray.get_runtime_context().current_actor))
        return published

    def lose_events(self, count: int) -> None:
        """Loses the next `count` messages with cache events."""
        self._to_lose += count

    def lost_all(self) -> bool:
        """Whether all messages of `lose_events` were lost by now."""
        return self._to_lose == 0

    def held_tokens(self) -> int:
        """KV tokens that requests hold once there is nothing to compute, which must be none. Raises AssertionError
        unless each page has one owner."""
        assert self._server is not None
        held: int = self._server.at_rest(_held_tokens)
        return held

    def _send_or_lose(self, router: bytes, frame: bytes) -> None:
        if self._to_lose and isinstance(decode_from_replica(frame), CacheEvents):
            self._to_lose -= 1
        else:
            self._send(router, frame)


class ReachableReplica(Replica):
    """A replica of such ranks."""

    rank_type = ReachableRank


def _held_tokens(engine: Engine) -> int:
    engine.check_integrity()
    return engine.load().kv_tokens_used
