"""The grammars of a batch: all outputs take in their tokens, and all masks are filled, in one call for each engine.

The calls run without Python's lock, on several threads where that is quicker (`grammar_threads.py`).
"""

import time
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from worker.structured_output.error import GrammarError
from worker.structured_output.matching.engines import LLGUIDANCE, XGRAMMAR
from worker.structured_output.matching.grammar_threads import GrammarThreads
from worker.structured_output.matching.lazy_matcher import LazyMatcher, accept_lazy, fill_lazy
from worker.structured_output.matching.state import GrammarState

if TYPE_CHECKING:  # slow to import
    import torch

# A batch waits for the slowest of its masks. A grammar that takes longer fails its own request. Most such grammars are
# found by the trial after their compilation.
_SLOW_FILL_S = 1.0


def accept_tokens(
    states: Sequence[GrammarState], token_ids: Sequence[int], threads: GrammarThreads | None = None
) -> dict[int, GrammarError]:
    """Advances each state by its token, on one thread, or as many as `threads` says. Returns errors by position in
    `states`, for tokens that a grammar does not allow. Such a state is of no further use."""
    errors: dict[int, GrammarError] = {}
    for engine, some in _by_engine(states):
        matchers, ids = [states[i].matcher for i in some], [token_ids[i] for i in some]
        if engine == LLGUIDANCE:
            accept = partial(accept_lazy, matchers, ids)
            taken = accept(1) if threads is None else threads.run("llguidance's tokens", len(some), accept)
        else:
            taken = _batch(1).batch_accept_token(matchers, ids)
        for i, token_id, is_taken in zip(some, ids, taken, strict=True):
            if is_taken:
                states[i].advanced(token_id)
            else:
                errors[i] = states[i].not_allowed(token_id)
    return errors


def fill_masks(
    states: Sequence[GrammarState],
    bitmask: "torch.Tensor",
    rows: Sequence[int],
    threads: GrammarThreads | None = None,
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
    _fill([states[i] for i in running], bitmask, [rows[i] for i in running], threads)
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


def fill_masks_after(
    states: Sequence[GrammarState],
    token_ids: Sequence[Sequence[int]],
    bitmask: "torch.Tensor",
    rows: Sequence[Sequence[int]],
    threads: GrammarThreads | None = None,
) -> list[int]:
    """Writes the masks that would follow each of `token_ids[i]`, in turn, into `rows[i]` of `bitmask` (see
    `fill_masks`). Ends for a state at a token that is not allowed and at one that completes the output. Returns the
    number of masks written for each state. The states stay as they are."""
    accepted, written = [0] * len(states), [0] * len(states)
    going = [i for i, state in enumerate(states) if not state.terminated]
    for number in range(max(map(len, token_ids), default=0)):
        going = [
            i for i in going if number < len(token_ids[i]) and states[i].matcher.accept_token(token_ids[i][number])
        ]
        for i in going:
            accepted[i] += 1
        going = [i for i in going if not states[i].matcher.is_terminated()]
        _fill([states[i] for i in going], bitmask, [rows[i][number] for i in going], threads)
        for i in going:
            written[i] += 1
    for i, count in enumerate(accepted):
        if count:
            states[i].matcher.rollback(count)
    return written


def _fill(
    states: Sequence[GrammarState], bitmask: "torch.Tensor", rows: Sequence[int], threads: GrammarThreads | None
) -> None:
    """Writes the mask of each state into its row."""
    for engine, some in _by_engine(states):
        matchers, into = [states[i].matcher for i in some], [rows[i] for i in some]
        fill = partial(fill_lazy if engine == LLGUIDANCE else _fill_ahead, matchers, bitmask, into)
        if threads is None:
            fill(1)
        else:
            threads.run(f"{engine}'s masks", len(some), fill)


def _fill_ahead(matchers: Sequence[Any], bitmask: "torch.Tensor", rows: Sequence[int], threads: int) -> None:
    """As `fill_lazy`, of xgrammar's matchers."""
    _batch(threads).batch_fill_next_token_bitmask(matchers, bitmask, rows)


def _by_engine(states: Sequence[GrammarState]) -> Iterator[tuple[str, list[int]]]:
    """Each engine with the positions of the states that it follows, of the engines that follow any."""
    lazy = [i for i, state in enumerate(states) if isinstance(state.matcher, LazyMatcher)]
    if len(lazy) < len(states):
        followed = set(lazy)
        yield XGRAMMAR, [i for i in range(len(states)) if i not in followed]
    if lazy:
        # Outputs of one grammar follow each other: each thread then has its own grammars, and seldom waits for another.
        lazy.sort(key=lambda i: id(states[i].compiled))
        yield LLGUIDANCE, lazy


@cache
def _batch(threads: int) -> Any:
    """xgrammar's object for many matchers at once."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=threads)
