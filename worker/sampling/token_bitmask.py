"""Grammar masks of a batch: filled on the host, copied to the device."""

import os
from collections.abc import Sequence

import torch

from worker.structured_output import GrammarError, GrammarState, MaskThreads, fill_masks, new_bitmask

_MOST_THREADS = max(1, min(8, (os.cpu_count() or 1) // 2))


class TokenBitmask:
    """Bitmask of the allowed tokens of each row. The host fills it while the device computes the step that it is
    for."""

    def __init__(self, most: int, vocab_size: int, device: torch.device) -> None:
        """`most`: the largest number of rows."""
        self._host = new_bitmask(most, vocab_size)
        self._there = self._host
        self._threads = MaskThreads(_MOST_THREADS)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._host = self._host.pin_memory()
            self._there = torch.empty_like(self._host, device=device)
            self._stream = torch.cuda.Stream(device)
            # Steps that were launched earlier may still write into this memory, on behalf of its previous owner.
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def fill(self, states: Sequence[GrammarState], rows: Sequence[int]) -> dict[int, GrammarError]:
        """Writes the mask of each state into its row of the host's bitmask. Returns errors by position in `states`, as
        `fill_masks` does. The device must have finished reading the masks that were filled before."""
        return fill_masks(states, self._host, rows, self._threads)

    def fill_after(self, state: GrammarState, token_ids: Sequence[int], rows: Sequence[int]) -> int:
        """Writes the masks that would follow each of `token_ids` into these rows. Returns the number of masks written:
        fewer if the grammar does not allow a token, or if one completes the output."""
        return state.fill_after(token_ids, self._host, rows)

    def on_device(self, count: int) -> torch.Tensor:
        """The first `count` rows on the device, int32[count, ceil(vocab / 32)], for use on the current stream from now
        on."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._there[:count].copy_(self._host[:count], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._there[:count]
