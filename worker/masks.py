"""The masks of a batch's grammars, from the host to the device."""

import os
import time
from collections.abc import Sequence

import torch

from worker.grammar import GrammarError, GrammarState, fill_masks, new_bitmask

# Most masks take a microsecond or two, and threads wait longer for each other: 64 took 110 us on one, 470 on two. Where
# tokens must be tried one by one, masks take milliseconds.
_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))
_SLOW_S, _QUICK_S = 3e-3, 1e-3


class Masks:
    """Filled on the host and sent to the device while that computes the step that they are for. On several threads
    while they take long."""

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        """For up to `most` rows."""
        self._host = new_bitmask(most, vocab_size)
        self._there = self._host
        self._threads = 1
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._host = self._host.pin_memory()
            self._there = torch.empty_like(self._host, device=device)
            self._stream = torch.cuda.Stream(device)
            # Whoever had this memory before may yet have to write into it, in steps that were launched.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def fill(self, states: Sequence[GrammarState], rows: Sequence[int]) -> dict[int, GrammarError]:
        """Masks of these states in these rows. Errors, by place in `states`, as `fill_masks` has them. The device must
        have done what read the masks before."""
        began_s = time.monotonic()
        errors = fill_masks(states, self._host, rows, self._threads)
        took_s = time.monotonic() - began_s
        if took_s > _SLOW_S:
            self._threads = _THREADS
        elif took_s < _QUICK_S:
            self._threads = 1
        return errors

    def on_device(self, count: int) -> torch.Tensor:
        """The first `count` rows, int32: there for whatever is launched on the current stream from now on."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._there[:count].copy_(self._host[:count], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._there[:count]
