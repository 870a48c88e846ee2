"""The ranks of a stage as one group: what they add up, put together and tell each other, on their own devices.

Sums of few tokens, whose time is that of the start, go through memory that the GPUs of one machine share
(`kernels.all_reduce`), where they can; all else goes through NCCL.
"""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from kernels.norm import add_rms_norm
from worker import peers

if TYPE_CHECKING:  # needs Triton
    from kernels.all_reduce import PeerSums

# NCCL gives a connection over sockets one thread, but in two clouds that it knows: half of what two machines, or two
# processes of one, get with four.
SOCKET_THREADS = "4"
# What is sent to a stage that is busy is on its way meanwhile as far as NCCL's buffers hold it, which are those of 8
# chunks: on two H200s, sockets between them, the receive of 8 MiB (512 tokens of a 70B model) that were sent before
# takes 0.2 ms instead of 0.9, and of 16 MiB 0.4 instead of 1.7; larger ones gain nothing.
LINK_CHUNK_BYTES = 1 << 20
TIMEOUT_S = 120.0  # a collective that takes longer means that a rank has gone or hangs
_POLL_S = 0.02
_FAILED = "failed"


class RankLost(RuntimeError):
    """A rank of the replica ended or does not answer: the others can do nothing without it. The message says which."""


class Meeting:
    """`size` ranks that meet in a store, on the host. Several meetings may share a store, under names of their own; a
    failure that is told in one is told in all."""

    def __init__(self, store: dist.Store | None, rank: int, size: int, name: str = "ranks") -> None:
        """Without a store it is the meeting of one, who waits for nobody."""
        self._store = store
        self._room = None if store is None else dist.PrefixStore(name, store)
        self._meetings = 0
        self.rank, self.size = rank, size

    def meet(self) -> None:
        """Wait until all ranks are here, however long they take. Raises RankLost if one has failed."""
        if self._room is None:
            return
        key = f"meeting/{self._meetings}"
        self._meetings += 1
        self._room.add(key, 1)
        while self._room.add(key, 0) < self.size:
            self.check()
            time.sleep(_POLL_S)

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for all of them. Raises RankLost if one has failed."""
        if self._room is None:
            return value
        key = f"values/{self._meetings}"
        self._room.set(f"{key}/{self.rank}", str(value))
        self.meet()
        return min(int(self._room.get(f"{key}/{rank}")) for rank in range(self.size))

    def fail(self, reason: str) -> None:
        """Tell all ranks that the replica is at its end, and why. The first reason stays."""
        if self._store is not None:
            self._store.compare_set(_FAILED, "", reason)

    def check(self) -> None:
        """Raises RankLost if a rank has failed."""
        if self._store is not None and self._store.check([_FAILED]):
            raise RankLost(self._store.get(_FAILED).decode(errors="replace"))


class Group(Meeting):
    """`size` ranks that call the same operations in the same order. NCCL on GPUs, gloo on CPUs.

    On a GPU an operation is launched on the current stream and may be captured in a CUDA graph. It raises RuntimeError
    where the backend notices that a rank has gone; on a GPU it may also never end: `worker.ranks` watches for that.
    """

    def __init__(
        self, backend: Any, store: dist.Store | None, rank: int, size: int, device: torch.device, name: str = "group"
    ) -> None:
        """Use `single`, `join` or `pair`. `backend` is a `dist.Backend`, whose methods have no types."""
        super().__init__(store, rank, size, name)
        self._backend, self._device = backend, device
        self._peers: PeerSums | None = None
        self._beside: torch.cuda.Stream | None = None

    @classmethod
    def single(cls) -> "Group":
        """The group of one: its operations do nothing."""
        return cls(None, None, 0, 1, torch.device("cpu"))

    @classmethod
    def join(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
        name: str = "group",
    ) -> "Group":
        """One rank's end of a group of `size`, when all have come to the same store and name. `device` is this rank's
        own, on a GPU the current one. Collectives may take `timeout_s`. Raises RankLost if a rank has failed."""
        group = cls(None, store, rank, size, device, name)
        group._connect(timeout_s, name)
        group.least(0)  # a communicator is made at its first use, which must not be inside a graph
        if device.type == "cuda":
            assert group._room is not None
            group._peers = peers.find(group, group._room, device)
        return group

    @classmethod
    def pair(
        cls, store: dist.Store, rank: int, device: torch.device, timeout_s: float = TIMEOUT_S, name: str = "pair"
    ) -> "Group":
        """One end of a pair, of which rank 0 sends what rank 1 receives. As `join`."""
        group = cls(None, store, rank, 2, device, name)
        group._connect(timeout_s, name)
        first = torch.zeros(1, device=device)
        _wait(group.begin_send(first, 1) if rank == 0 else group.begin_receive(first, 0))
        return group

    @staticmethod
    def widen_links() -> None:
        """What is sent by pairs of this process is to go beside what the other end computes. Before the first group."""
        os.environ.setdefault("NCCL_BUFFSIZE", str(8 * LINK_CHUNK_BYTES))
        os.environ.setdefault("NCCL_P2P_NET_CHUNKSIZE", str(LINK_CHUNK_BYTES))

    def _connect(self, timeout_s: float, name: str) -> None:
        self.meet()
        assert self._room is not None
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore("backend", self._room)
        if self._device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_NTHREADS", SOCKET_THREADS)
            # What is sent beside products gets its place before those that are queued.
            options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout
            options.global_ranks_in_group, options.group_name = list(range(self.size)), name
            self._backend = dist.ProcessGroupNCCL(prefixed, self.rank, self.size, options)
        else:
            self._backend = dist.ProcessGroupGloo(prefixed, self.rank, self.size, timeout)

    def place(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        """Where to compute a part `[rows, columns]` of a sum so that it is fast; None if it does not matter. Two sums,
        one after the other, must not have the same `turn` (0, 1 or 2): what lies there is overwritten by the next."""
        return None if self._peers is None else self._peers.place(rows, columns, dtype, turn)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, contiguous, which it may overwrite."""
        if self._peers is not None and self._peers.holds(x):
            return self._peers.sum(x)
        if self._backend is not None:
            options = AllreduceOptions()
            options.asyncOp = False
            _wait(self._backend.allreduce([x], options))
        return x

    def all_reduce_beside(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins `all_reduce`, in place, beside what the current stream gets to do. Returns what is to be called, once,
        by whoever needs the sum: what the stream gets to do afterwards comes after it."""
        if x.device.type != "cuda":
            self.all_reduce(x)
            return lambda: x
        if self._beside is None:
            self._beside = torch.cuda.Stream(priority=-1)  # or products would keep it waiting
        beside = self._beside
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            self.all_reduce(x)
            done = beside.record_event()

        def summed() -> torch.Tensor:
            torch.cuda.current_stream().wait_event(done)
            return x

        return summed

    def add_rms_norm(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`kernels.norm.add_rms_norm` of the sum of all ranks' x, which it may overwrite."""
        if self._peers is not None and self._peers.holds(x):
            return self._peers.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' x, of one shape, side by side along `dim` in the order of the ranks. Contiguous."""
        if self._backend is None:
            return x
        x = x.contiguous()
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._backend._allgather_base(parts, x, options))
        return torch.cat(parts.chunk(self.size), dim)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """x, contiguous, becomes that of rank `source`. Returns it."""
        if self._backend is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, False
            _wait(self._backend.broadcast([x], options))
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for all of them, and for the device."""
        if self._backend is None:
            return value
        return int(self.all_gather(torch.tensor([value], device=self._device)).min())

    def begin_send(self, x: torch.Tensor, rank: int) -> dist.Work:
        """Begins to send x, contiguous, which stays as it is until that has ended. A GPU does so beside what the
        current stream gets to do afterwards. `wait` of what is returned waits for the end."""
        work: dist.Work = self._backend.send([x], rank, 0)
        return work

    def begin_receive(self, x: torch.Tensor, rank: int) -> dist.Work:
        """Begins to receive into x, contiguous, what `rank` sends next. As `begin_send`."""
        work: dist.Work = self._backend.recv([x], rank, 0)
        return work

    def close(self) -> None:
        """Leave. What other ranks still wait for fails or never comes."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None


def _wait(work: dist.Work | None) -> None:
    """NCCL, which has queued on the current stream what is not asynchronous, may have nothing to wait for."""
    if work is not None:
        work.wait()
