"""The adapters (LoRA) of one rank: copies in the host's memory, by number, and those that are in the device's slots."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from worker.checkpoint.adapters import AdapterLayout, LowRank
from worker.models.adapted_layers import AdaptedLayers
from worker.models.decoder import Decoder
from worker.models.sharding import Shard


class AdapterStore:
    """Reads adapters in a thread of its own, so that steps go on meanwhile, and copies them to the slots of plans.

    `adapted`: the layers that run with the adapters in the slots.
    """

    def __init__(self, decoder: Decoder, shard: Shard, num_slots: int, max_rank: int, max_tokens: int) -> None:
        """Allocates the slots. `max_tokens`: of a step. Raises ValueError for a model that can have no adapters."""
        self._layout = AdapterLayout(shard)
        if not self._layout.parts and shard.stages == 1:
            raise ValueError(f"LoRA adapters are not supported for {shard.whole.model_type} models: set max_loras to 0")
        self.adapted = AdaptedLayers(decoder, self._layout.parts, num_slots, max_rank, max_tokens)
        self._max_rank, self._dtype = max_rank, decoder.dtype
        self._pins = decoder.is_on_gpu
        self._reads: dict[int, Future[LowRank]] = {}
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._in_slots = [0] * num_slots  # numbers of the adapters, 0 for none

    def prepare(self, number: int, folder: Path) -> Future[None]:
        """As `Executor.prepare_adapter`, for this rank."""
        done: Future[None] = Future()
        read = self._thread.submit(self._layout.read, folder, self._max_rank, self._dtype, self._pins)
        self._reads[number] = read

        def tell(read: Future[LowRank]) -> None:
            if read.cancelled():
                done.cancel()
            elif (error := read.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(None)

        read.add_done_callback(tell)
        return done

    def forget(self, number: int) -> None:
        """As `Executor.forget_adapter`. A copy in a slot stays until another adapter takes the slot."""
        self._reads.pop(number, None)

    def place(self, wanted: np.ndarray) -> None:
        """Copies adapters to their slots. `wanted`: `Plan.adapters`. Waits for an adapter that is not read yet, which
        only happens on a rank that is behind the leading one."""
        for slot, number in {(slot, number) for _, slot, number in wanted.tolist()}:
            if self._in_slots[slot] != number:
                self._in_slots[slot] = 0
                self.adapted.write(slot, self._reads[number].result())
                self._in_slots[slot] = number

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
