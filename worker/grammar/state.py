"""Where one sequence is in its grammar, and the masks that follow from that."""

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.grammar.error import GrammarError

if TYPE_CHECKING:  # both are slow to import, and the process that compiles does without
    import torch
    import xgrammar

# A batch waits for the slowest of its masks. A grammar that takes longer fails its own request; most of these are
# found when the grammar is tried out after its compilation.
_SLOW_FILL_S = 1.0


class CompiledGrammar:
    """A grammar ready for use by any number of sequences."""

    def __init__(self, handle: "xgrammar.CompiledGrammar", kind: str) -> None:
        self.handle = handle
        self.size_bytes: int = handle.memory_size_bytes
        # The request's parameter that the grammar came in.
        self.param = "response_format" if kind.startswith("json") else kind


class GrammarState:
    """Follows one sequence's output. Not for several threads at once."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        """At the grammar's beginning."""
        import xgrammar

        self.compiled = compiled
        self.matcher: Any = xgrammar.GrammarMatcher(compiled.handle)
        self.num_tokens = 0
        self.terminated = False
        """Whether the output is complete and its end token accepted: nothing more may follow."""
        self._end_ids = frozenset(self.matcher.stop_token_ids)

    @property
    def param(self) -> str:
        """The request's parameter that the grammar came in."""
        return self.compiled.param

    def accept(self, token_id: int) -> None:
        """Goes on by one token. Raises GrammarError if the grammar does not allow it."""
        if not self.matcher.accept_token(token_id):
            raise GrammarError(
                f"the grammar does not allow token {token_id} as number {self.num_tokens + 1} of the output"
            )
        self.num_tokens += 1
        if token_id in self._end_ids:
            self.terminated = bool(self.matcher.is_terminated())


def new_bitmask(rows: int, vocab_size: int) -> "torch.Tensor":
    """Masks for `fill_masks`: int32[rows, ceil(vocab_size / 32)] on the CPU."""
    import torch

    return torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32)


def fill_masks(
    states: Sequence[GrammarState], bitmask: "torch.Tensor", rows: Sequence[int], threads: int = 1
) -> dict[int, GrammarError]:
    """Writes which tokens may come next in each of `states` into that row of `bitmask`, int32[n, ceil(vocab / 32)] on
    the CPU: bit i % 32 of word i // 32 is token i's. Where only the end can come, that is the end tokens alone. On
    so many threads.

    Returns errors by place in `states`: where no token may come, or finding out took so long that it must not happen
    again.
    """
    errors = {i: GrammarError("the output is complete already") for i, state in enumerate(states) if state.terminated}
    running = [i for i in range(len(states)) if i not in errors]
    began = time.monotonic()
    _batch(threads).batch_fill_next_token_bitmask(
        [states[i].matcher for i in running], bitmask, [rows[i] for i in running]
    )
    if time.monotonic() - began > _SLOW_FILL_S:
        # Whoever is slow by himself, and not because the machine is busy.
        for i in running:
            began = time.thread_time()
            states[i].matcher.fill_next_token_bitmask(bitmask, rows[i])
            if time.thread_time() - began > _SLOW_FILL_S:
                errors[i] = GrammarError("the grammar is too slow to follow: write it with fewer nested repetitions")
    allows = np.any(bitmask.numpy()[: max(rows, default=-1) + 1], axis=1).tolist()
    for i in running:
        if not allows[rows[i]]:
            errors.setdefault(i, GrammarError("the grammar allows no token here"))
    return errors


def apply_bitmask(logits: "torch.Tensor", bitmask: "torch.Tensor", rows: list[int]) -> None:
    """Sets to -inf, in place, the logits float32[n, vocab] of the `rows` whose mask of the same number forbids them.
    Both are on one device."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, bitmask, vocab_size=logits.shape[1], indices=rows)


@cache
def _batch(threads: int) -> Any:
    """What fills many masks at once."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=threads)
