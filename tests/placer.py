"""Placement without Ray."""

import asyncio

from router.fleet.fleet import Fleet
from router.programs import Home
from router.replicas.replicas import Replicas
from router.wire.errors import NoReplica


class DirectPlacer:
    """Asks the fleet at once; with no replica it waits `wait_s` for one."""

    def __init__(self, fleet: Fleet, replicas: Replicas, wait_s: float) -> None:
        self.fleet, self.replicas, self.wait_s = fleet, replicas, wait_s
        self.placed: list[tuple[str, list[int], str]] = []

    async def place(
        self,
        request_id: str,
        prompt_ids: list[int],
        exclude: frozenset[str],
        refused: frozenset[str] = frozenset(),
        home: Home | None = None,
        output_limit: int | None = None,
    ) -> str:
        try:
            async with asyncio.timeout(0 if refused else self.wait_s):
                while not (candidates := self.replicas.ready - refused):  # what was excluded may be back
                    await self.replicas.changed()
        except TimeoutError:
            raise NoReplica() from None
        replica_id = self.fleet.place(request_id, prompt_ids, candidates, home, output_limit).replica_id
        self.placed.append((request_id, prompt_ids, replica_id))
        return replica_id
