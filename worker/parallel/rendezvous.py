"""Barriers on the host, among ranks that reach the same store."""

import time

import torch.distributed as dist

from worker.errors import RankLost

_POLL_S = 0.02
_FAILED = "failed"


class Rendezvous:
    """Group of `size` ranks that meet on the host, in a store. Several groups may share a store under different names.
    A failure that is reported in one group is reported in all."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, name: str = "ranks") -> None:
        """Without a store the group is one rank, which never waits."""
        self._store = store
        self._room = None if store is None else dist.PrefixStore(name, store)
        self._meetings = 0
        self.rank, self.size = rank, size

    def barrier(self) -> None:
        """Waits until all ranks are here, however long they take. Raises RankLost if a rank has failed."""
        if self._room is None:
            return
        key = f"meeting/{self._meetings}"
        self._meetings += 1
        self._room.add(key, 1)
        while self._room.add(key, 0) < self.size:
            self.check()
            time.sleep(_POLL_S)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for all ranks. Raises RankLost if a rank has failed."""
        if self._room is None:
            return value
        key = f"values/{self._meetings}"
        self._room.set(f"{key}/{self.rank}", str(value))
        self.barrier()
        return min(int(self._room.get(f"{key}/{rank}")) for rank in range(self.size))

    def fail(self, reason: str) -> None:
        """Tells all ranks that the replica has failed, and why. The first reason stays."""
        if self._store is not None:
            self._store.compare_set(_FAILED, "", reason)

    def check(self) -> None:
        """Raises RankLost if a rank has failed."""
        if self._store is not None and self._store.check([_FAILED]):
            raise RankLost(self._store.get(_FAILED).decode(errors="replace"))
