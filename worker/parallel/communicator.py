"""Collectives among the ranks of a stage, and sends between two ranks, on their own devices.

An all-reduce of few tokens is bound by latency. Where possible, it goes through memory that the GPUs of one machine
share (`kernels.comm.all_reduce`). All else goes through NCCL.
"""

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from kernels.ops.norm import add_rms_norm
from worker.parallel import custom_all_reduce
from worker.parallel.rank_store import RankStore
from worker.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:  # needs Triton
    from kernels.comm.all_reduce import CustomAllReduce

# NCCL uses one thread for a connection over sockets, except in two clouds that it recognises. Four threads double the
# throughput between two machines, or between two processes of one machine.
SOCKET_THREADS = "4"
# A send to a busy stage proceeds as far as NCCL's buffers, 8 chunks, hold its data. On two H200s connected by sockets,
# receiving 8 MiB (512 tokens of a 70B model) that were sent earlier takes 0.2 ms instead of 0.9 ms, and receiving 16
# MiB takes 0.4 ms instead of 1.7 ms. Larger chunks gain nothing.
LINK_CHUNK_BYTES = 1 << 20
TIMEOUT_S = 120.0  # a collective that takes longer means that a rank has gone or hangs


def own_address(store: dist.Store) -> str | None:
    """The address from which this machine reaches the store; None for a store without one."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, RankStore):
        return None
    url = urlsplit(store.address)
    with socket.socket(socket.AF_INET6 if ":" in str(url.hostname) else socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((url.hostname, url.port))  # sends nothing
        return str(way.getsockname()[0])


class Communicator(Rendezvous):
    """Group of `size` ranks that call the same operations in the same order: NCCL on GPUs, gloo on CPUs.

    On a GPU an operation is launched on the current stream and may be captured in a CUDA graph.

    An operation raises RuntimeError if the backend notices that a rank has gone. On a GPU the operation may never end
    instead: `worker.executor.multi_rank` watches for that.
    """

    def __init__(
        self, backend: Any, store: dist.Store | None, rank: int, size: int, device: torch.device, name: str = "group"
    ) -> None:
        """Use `single`, `join` or `pair` instead. `backend` is a `dist.Backend`, whose methods have no types."""
        super().__init__(store, rank, size, name)
        self._backend, self._device = backend, device
        self._custom_all_reduce: CustomAllReduce | None = None
        self._beside: torch.cuda.Stream | None = None

    @classmethod
    def single(cls) -> "Communicator":
        """A group of one rank, whose operations do nothing."""
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
    ) -> "Communicator":
        """Joins a group of `size` ranks. Returns when all of them have come to the same store and name.

        `device` is this rank's own, on a GPU the current one. Collectives may take `timeout_s`. Raises RankLost if a
        rank has failed.
        """
        group = cls(None, store, rank, size, device, name)
        group._connect(timeout_s, name)
        group.all_reduce_min(0)  # NCCL connects at the first use, which must not be inside a CUDA graph
        if device.type == "cuda":
            assert group._room is not None
            group._custom_all_reduce = custom_all_reduce.find(group, group._room, device)
        return group

    @classmethod
    def pair(
        cls, store: dist.Store, rank: int, device: torch.device, timeout_s: float = TIMEOUT_S, name: str = "pair"
    ) -> "Communicator":
        """Joins a pair, in which rank 0 sends and rank 1 receives. Otherwise as `join`."""
        group = cls(None, store, rank, 2, device, name)
        group._connect(timeout_s, name)
        first = torch.zeros(1, device=device)
        _wait(group.begin_send(first, 1) if rank == 0 else group.begin_receive(first, 0))
        return group

    @staticmethod
    def set_nccl_buffers() -> None:
        """Sizes NCCL's buffers so that sends of this process overlap the receiver's computation. Call before the first
        group is made."""
        os.environ.setdefault("NCCL_BUFFSIZE", str(8 * LINK_CHUNK_BYTES))
        os.environ.setdefault("NCCL_P2P_NET_CHUNKSIZE", str(LINK_CHUNK_BYTES))

    def _connect(self, timeout_s: float, name: str) -> None:
        self.barrier()
        assert self._room is not None
        timeout = timedelta(seconds=timeout_s)
        prefixed = dist.PrefixStore("backend", self._room)
        if self._device.type == "cuda":
            os.environ.setdefault("NCCL_SOCKET_NTHREADS", SOCKET_THREADS)
            # Sends that overlap matrix products are scheduled before products that are queued.
            options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options._timeout = timeout
            options.global_ranks_in_group, options.group_name = list(range(self.size)), name
            self._backend = dist.ProcessGroupNCCL(prefixed, self.rank, self.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._timeout = timeout
            # By itself gloo listens on the address of the machine's name, which on many machines is a loopback one.
            address = own_address(self._room)
            device = gloo.create_default_device() if address is None else gloo.create_device(hostname=address)
            options._devices = [device]
            self._backend = gloo(prefixed, self.rank, self.size, options)

    def reduce_buffer(self, rows: int, columns: int, dtype: torch.dtype, turn: int) -> torch.Tensor | None:
        """Buffer in which to compute this rank's part, `[rows, columns]`, of a sum so that the sum is fast. None if any
        memory will do. Consecutive sums must have different `turn`s (0, 1 or 2): sums of the same turn share memory."""
        return None if self._custom_all_reduce is None else self._custom_all_reduce.buffer(rows, columns, dtype, turn)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which must be contiguous and may be overwritten."""
        if self._custom_all_reduce is not None and self._custom_all_reduce.holds(x):
            return self._custom_all_reduce.sum(x)
        if self._backend is not None:
            options = AllreduceOptions()
            options.asyncOp = False
            _wait(self._backend.allreduce([x], options))
        return x

    def all_reduce_async(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins `all_reduce` in place, concurrently with later work of the current stream. The caller must call the
        returned function once, before using the sum: work queued after that call waits for the sum."""
        if x.device.type != "cuda":
            self.all_reduce(x)
            return lambda: x
        if self._beside is None:
            self._beside = torch.cuda.Stream(priority=-1)  # otherwise matrix products would delay it
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
        """`kernels.ops.norm.add_rms_norm` of the sum of all ranks' x, which may be overwritten."""
        if self._custom_all_reduce is not None and self._custom_all_reduce.holds(x):
            return self._custom_all_reduce.add_rms_norm(x, residual, weight, eps)
        return add_rms_norm(self.all_reduce(x), residual, weight, eps)

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' x, of the same shape, concatenated along `dim` in the order of the ranks. Contiguous."""
        if self._backend is None:
            return x
        x = x.contiguous()
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._backend._allgather_base(parts, x, options))
        return torch.cat(parts.chunk(self.size), dim)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """Overwrites x, contiguous, with the x of rank `source`. Returns x."""
        if self._backend is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, False
            _wait(self._backend.broadcast([x], options))
        return x

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for all of them, and for the device."""
        if self._backend is None:
            return value
        return int(self.all_gather(torch.tensor([value], device=self._device)).min())

    def begin_send(self, x: torch.Tensor, rank: int) -> dist.Work:
        """Begins to send x, contiguous, which must not change until the send has ended. On a GPU the send overlaps
        later work of the current stream. The `wait` of the returned handle waits for the end."""
        work: dist.Work = self._backend.send([x], rank, 0)
        return work

    def begin_receive(self, x: torch.Tensor, rank: int) -> dist.Work:
        """Begins to receive into x, contiguous, the next matrix that `rank` sends. Otherwise as `begin_send`."""
        work: dist.Work = self._backend.recv([x], rank, 0)
        return work

    def close(self) -> None:
        """Leaves the group. Operations that other ranks still wait for fail or never end."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None


def _wait(work: dist.Work | None) -> None:
    """Waits for `work`. NCCL may return none: synchronous operations are queued on the current stream already."""
    if work is not None:
        work.wait()
