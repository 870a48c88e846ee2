"""Grammar masks of a batch: filled on the host, copied to the device."""

from collections.abc import Sequence

import torch

from worker.structured_output import (
    GrammarError,
    GrammarState,
    GrammarThreads,
    fill_masks,
    fill_masks_after,
    new_bitmask,
)


class TokenBitmask:
    """Bitmask of the allowed tokens of each row. The host fills it while the device computes the step that it is
    for."""

    def __init__(self, most: int, vocab_size: int, device: torch.device, threads: GrammarThreads) -> None:
        """`most`: the largest number of rows."""
        self._host = new_bitmask(most, vocab_size)
        self._there = self._host
        self._threads = threads
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

    def fill_after(
        self, states: Sequence[GrammarState], token_ids: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]
    ) -> list[int]:
        """Writes the masks that would follow each of `token_ids[i]`, in turn, into `rows[i]`. Returns how many were
        written for each state: fewer where its grammar does not allow a token, or where one completes the output."""
        return fill_masks_after(states, token_ids, self._host, rows, self._threads)

    def on_device(self, count: int) -> torch.Tensor:
        """The first `count` rows on the device, int32[count, ceil(vocab / 32)], for use on the current stream from now
        on."""
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._there[:count].copy_(self._host[:count], non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._there[:count]
