"""Hidden states to embeddings: the sums of a step's chunks, computed on the device, read later."""

import numpy as np
import torch

from kernels.host_device import all_to_device, to_host
from worker.step import PooledChunks


class PendingPooled:
    """Sums of hidden states, on their way to the host."""

    def __init__(self, hidden: torch.Tensor, counts: np.ndarray) -> None:
        """`hidden`: float32 [n, hidden_size], on any device. `counts`: `Plan.hidden`, the chunks and their numbers of
        rows. Each chunk's rows are added up in their order, so that the sum does not depend on the other chunks."""
        self._chunks = counts[:, 0].tolist()
        sums = hidden
        if len(hidden) > len(counts):
            (lengths,) = all_to_device([counts[:, 1].astype(np.int64)], hidden.device)
            sums = torch.segment_reduce(hidden, "sum", lengths=lengths, axis=0, unsafe=True)
        self._sums = to_host(sums)
        self._event = None
        if hidden.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> PooledChunks:
        """The sums. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        return PooledChunks(self._chunks, self._sums.numpy())
