"""Masks that are filled as soon as the tokens before them are known, on a thread of their own.

With overlap, the tokens of step n come to the host while the main thread schedules and launches step n+1. This thread
lets grammars take them in, which ends some outputs. Then it fills the masks after them, while the main thread updates
the scheduler. Sampling of step n+1 waits for both. The native calls run without Python's lock.

The main thread fills the rest before sampling: first masks of new outputs, and those after inserted tokens.
"""

import heapq
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from worker.sampling.token_bitmask import TokenBitmask
from worker.structured_output import GrammarError, GrammarState


class _Filled(NamedTuple):
    """The content of a row: the mask after `num_tokens` of the output that `state` follows, or why there is none."""

    state: GrammarState
    num_tokens: int
    error: GrammarError | None


class EarlyMasks:
    """The rows of a bitmask, one for each slot whose output has a grammar, and the thread that fills them ahead.

    Only one side uses grammars and rows at a time: the thread from `submit` on, the main thread from `settle` on.
    """

    def __init__(self, num_slots: int, masks: TokenBitmask) -> None:
        self._masks = masks
        self._rows = np.full(num_slots, -1, dtype=np.int64)
        self._free = list(range(num_slots))  # a heap: low rows first, since all up to the highest are copied
        self._filled: dict[int, _Filled] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._work: Future[None] | None = None  # the newest

    def add(self, slot: int) -> None:
        """Gives a row to a slot whose output has a grammar."""
        self._rows[slot] = heapq.heappop(self._free)

    def remove(self, slot: int) -> None:
        """Takes the slot's row back, if it has one."""
        if (row := int(self._rows[slot])) >= 0:
            heapq.heappush(self._free, row)
            self._rows[slot] = -1

    def rows(self, slots: np.ndarray) -> np.ndarray:
        """The row of each slot, int64 [slots]; -1 for one without a grammar."""
        found: np.ndarray = self._rows[slots]
        return found

    def submit(self, work: Callable[[], None]) -> None:
        """Does `work` on the thread."""
        self._work = self._thread.submit(work)

    def settle(self) -> None:
        """Waits for the thread's work. Raises what it raised, once."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def forget(self) -> None:
        """Notes that the rows were used for something else."""
        self._filled.clear()

    def fill(self, states: Sequence[GrammarState], rows: Sequence[int]) -> dict[int, GrammarError]:
        """Writes the mask of each state into its row, unless it is there. Returns errors by position in `states`, as
        `fill_masks` does."""
        pairs = list(zip(states, rows, strict=True))
        missing = [i for i, (state, row) in enumerate(pairs) if not self._is_there(state, row)]
        if missing:
            found = self._masks.fill([states[i] for i in missing], [rows[i] for i in missing])
            for number, i in enumerate(missing):
                self._filled[rows[i]] = _Filled(states[i], states[i].num_tokens, found.get(number))
        errors = [(i, self._filled[row].error) for i, row in enumerate(rows)]
        return {i: error for i, error in errors if error is not None}

    def _is_there(self, state: GrammarState, row: int) -> bool:
        known = self._filled.get(row)
        return known is not None and known.state is state and known.num_tokens == state.num_tokens
