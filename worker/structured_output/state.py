"""State of a sequence in its grammar, and the masks of allowed tokens that follow from it."""

import time
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.structured_output.engines import LLGUIDANCE, XGRAMMAR
from worker.structured_output.error import GrammarError
from worker.structured_output.lazy_grammar import LazyGrammar
from worker.structured_output.lazy_matcher import LazyMatcher, fill_lazy
from worker.structured_output.mask_threads import MaskThreads

if TYPE_CHECKING:  # slow to import, and the process that compiles needs neither
    import torch
    import xgrammar

# A batch waits for the slowest of its masks. A grammar that takes longer fails its own request. Most such grammars are
# found by the trial after their compilation.
_SLOW_FILL_S = 1.0


def param_of(kind: str) -> str:
    """The request's parameter that a grammar of this kind comes in."""
    return {"json_schema": "response_format", "json_object": "response_format", "tool_calls": "tools"}.get(kind, kind)


class CompiledGrammar:
    """A grammar ready for use by any number of sequences."""

    def __init__(
        self,
        handle: "xgrammar.CompiledGrammar | LazyGrammar",
        kind: str,
        size_bytes: int = 0,
        *,
        engine: str = XGRAMMAR,
        cpu_s: float = 0.0,
        not_enforced: Sequence[str] = (),
    ) -> None:
        """`size_bytes`: approximate memory of the grammar. `cpu_s`: CPU time that its compilation took. `not_enforced`:
        keywords of its schema, with their places, that it leaves out."""
        self.handle = handle
        self.engine, self.cpu_s = engine, cpu_s
        self.size_bytes = size_bytes
        self.not_enforced = not_enforced
        self.param = param_of(kind)
        """The request's parameter that the grammar came in."""

    def matcher(self) -> Any:
        """A new matcher at the grammar's beginning: xgrammar's, or one with the same methods."""
        import xgrammar

        return self.handle.matcher() if isinstance(self.handle, LazyGrammar) else xgrammar.GrammarMatcher(self.handle)


class GrammarState:
    """Follows one sequence's output. Not thread-safe."""

    def __init__(self, compiled: CompiledGrammar) -> None:
        """Starts at the grammar's beginning."""
        self.compiled = compiled
        self.matcher = compiled.matcher()
        self.num_tokens = 0
        self.terminated = False
        """Whether the output is complete and its end token accepted. No token may follow."""
        self._end_ids = frozenset(self.matcher.stop_token_ids)

    @property
    def param(self) -> str:
        """The request's parameter that the grammar came in."""
        return self.compiled.param

    def accept(self, token_id: int) -> None:
        """Advances by one token. Raises GrammarError if the grammar does not allow it."""
        if not self.matcher.accept_token(token_id):
            raise GrammarError(
                f"the grammar does not allow token {token_id} as number {self.num_tokens + 1} of the output"
            )
        self.num_tokens += 1
        if token_id in self._end_ids:
            self.terminated = bool(self.matcher.is_terminated())

    def fill_after(self, token_ids: Sequence[int], bitmask: "torch.Tensor", rows: Sequence[int]) -> int:
        """Writes the mask that would follow each of `token_ids`, in turn, into its row of `bitmask` (see `fill_masks`).
        Ends at a token that is not allowed and at one that completes the output. Returns the number of masks written.
        The state stays as it is."""
        accepted = written = 0
        for token_id, row in zip(token_ids, rows, strict=True):
            if self.terminated or not self.matcher.accept_token(token_id):
                break
            accepted += 1
            if token_id in self._end_ids and self.matcher.is_terminated():
                break
            self.matcher.fill_next_token_bitmask(bitmask, row)
            written += 1
        if accepted:
            self.matcher.rollback(accepted)
        return written


def new_bitmask(rows: int, vocab_size: int) -> "torch.Tensor":
    """Masks for `fill_masks`: int32[rows, ceil(vocab_size / 32)] on the CPU."""
    import torch

    return torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32)


def fill_masks(
    states: Sequence[GrammarState], bitmask: "torch.Tensor", rows: Sequence[int], threads: MaskThreads | None = None
) -> dict[int, GrammarError]:
    """Writes the tokens that may follow `states[i]` into row `rows[i]` of `bitmask`, on one thread, or as many as
    `threads` says.

    `bitmask` is int32[n, ceil(vocab / 32)] on the CPU: bit t % 32 of word t // 32 is set if token t is allowed. Where
    the output can only end, the end tokens alone are allowed.

    Returns errors by position in `states`, for a state that allows no token, and for one whose mask took longer than
    `_SLOW_FILL_S`.
    """
    errors = {i: GrammarError("the output is complete already") for i, state in enumerate(states) if state.terminated}
    running = [i for i in range(len(states)) if i not in errors]
    began = time.monotonic()
    lazy = [i for i in running if isinstance(states[i].matcher, LazyMatcher)]
    # Outputs of one grammar follow each other: each thread then has its own grammars, and seldom waits for another.
    lazy.sort(key=lambda i: id(states[i].compiled))
    ahead = [i for i in running if not isinstance(states[i].matcher, LazyMatcher)] if lazy else running
    for engine, some in ((XGRAMMAR, ahead), (LLGUIDANCE, lazy)):
        if some:
            matchers, into = [states[i].matcher for i in some], [rows[i] for i in some]
            _fill(engine, matchers, bitmask, into, threads)
    if time.monotonic() - began > _SLOW_FILL_S:
        # Finds the grammars that are slow themselves, in CPU time, rather than because the machine is busy.
        for i in running:
            began = time.thread_time()
            states[i].matcher.fill_next_token_bitmask(bitmask, rows[i])
            if time.thread_time() - began > _SLOW_FILL_S:
                errors[i] = GrammarError("the grammar is too slow to follow: write it with fewer nested repetitions")
    # Several times as fast as `np.any`.
    allows = np.bitwise_or.reduce(bitmask.numpy()[: max(rows, default=-1) + 1], axis=1).tolist()
    for i in running:
        if not allows[rows[i]]:
            errors.setdefault(i, GrammarError("the grammar allows no token here"))
    return errors


def _fill(
    engine: str, matchers: Sequence[Any], bitmask: "torch.Tensor", rows: Sequence[int], threads: MaskThreads | None
) -> None:
    count = 1 if threads is None else threads.choose(engine, len(matchers))
    began = time.monotonic()
    if engine == LLGUIDANCE:
        fill_lazy(matchers, bitmask, rows, count)
    else:
        _batch(count).batch_fill_next_token_bitmask(matchers, bitmask, rows)
    if threads is not None:
        threads.took(engine, count, len(matchers), time.monotonic() - began)


def apply_bitmask(logits: "torch.Tensor", bitmask: "torch.Tensor", rows: list[int]) -> None:
    """Sets the logits of forbidden tokens to -inf, in place. Row i of `bitmask` applies to row i of `logits`
    float32[n, vocab], for each i in `rows`, which ascend. Both are on the same device."""
    import xgrammar

    indices = rows if len(rows) < len(logits) else None  # without indices, there are none to copy to the device
    xgrammar.apply_token_bitmask_inplace(logits, bitmask[: len(logits)], vocab_size=logits.shape[1], indices=indices)


@cache
def _batch(threads: int) -> Any:
    """xgrammar's object that fills many masks at once."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=threads)
