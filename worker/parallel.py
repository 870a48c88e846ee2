"""The ranks of a stage as one group: what they add up, put together and tell each other, on their own devices."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

TIMEOUT_S = 120.0  # a collective that takes longer means that a rank has gone or hangs


class Group:
    """`size` ranks that call the same operations in the same order. NCCL on GPUs, gloo on CPUs.

    On a GPU an operation is launched on the current stream and may be captured in a CUDA graph. It raises RuntimeError
    where the backend notices that a rank has gone; on a GPU it may also never end: `worker.ranks` watches for that.
    """

    def __init__(self, backend: dist.Backend | None, rank: int, size: int, device: torch.device) -> None:
        """Use `single` or `join`."""
        self._backend = backend
        self._device = device
        self.rank, self.size = rank, size

    @classmethod
    def single(cls) -> "Group":
        """The group of one: its operations do nothing."""
        return cls(None, 0, 1, torch.device("cpu"))

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> "Group":
        """One rank's end of a group of `size`, whose other ranks come to the same store. Waits for them.

        `device` is this rank's own. Raises RuntimeError if one does not come in `timeout_s`.
        """
        timeout = timedelta(seconds=timeout_s)
        store = dist.PrefixStore("group", store)
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend: dist.Backend = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        group = cls(backend, rank, size, device)
        group.least(0)  # a communicator is made at its first use, which must not be inside a graph
        return group

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x, contiguous, becomes the sum of all ranks' x. Returns it."""
        if self._backend is not None:
            options = AllreduceOptions()
            options.asyncOp = False
            self._backend.allreduce([x], options).wait()
        return x

    def all_gather(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """All ranks' x, of one shape, side by side along `dim` in the order of the ranks. Contiguous."""
        if self._backend is None:
            return x
        x = x.contiguous()
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        options = AllgatherOptions()
        options.asyncOp = False
        self._backend._allgather_base(parts, x, options).wait()
        return torch.cat(parts.chunk(self.size), dim)

    def broadcast(self, x: torch.Tensor, source: int) -> torch.Tensor:
        """x, contiguous, becomes that of rank `source`. Returns it."""
        if self._backend is not None:
            options = BroadcastOptions()
            options.rootRank, options.rootTensor, options.asyncOp = source, 0, False
            self._backend.broadcast([x], options).wait()
        return x

    def least(self, value: int) -> int:
        """The smallest of all ranks' values. Waits for all of them."""
        if self._backend is None:
            return value
        return int(self.all_gather(torch.tensor([value], device=self._device)).min())

    def close(self) -> None:
        """Leave. What other ranks still wait for fails or never comes."""
        if self._backend is not None:
            self._backend.abort()
            self._backend = None
