"""Where one sequence is in its grammar, and the masks that follow from that."""

import time
from typing import TYPE_CHECKING, Any

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

    def __init__(self, compiled: CompiledGrammar, matcher: Any = None, num_tokens: int = 0) -> None:
        """At the grammar's beginning; the other arguments are for `fork`."""
        import xgrammar

        self.compiled = compiled
        self._matcher = xgrammar.GrammarMatcher(compiled.handle) if matcher is None else matcher
        self.num_tokens = num_tokens

    @property
    def param(self) -> str:
        """The request's parameter that the grammar came in."""
        return self.compiled.param

    @property
    def terminated(self) -> bool:
        """Whether the output is complete and its end token accepted: nothing more may follow."""
        return bool(self._matcher.is_terminated())

    def fill(self, bitmask: "torch.Tensor") -> bool:
        """Writes which tokens may come next into `bitmask`, int32[ceil(vocab / 32)] on the CPU: bit i % 32 of word
        i // 32 is token i's. Where only the end can come, that is the end tokens alone. Returns whether anything is
        forbidden at all.

        Raises GrammarError where no token may come, or finding out took so long that it must not happen again.
        """
        if self.terminated:
            raise GrammarError("the output is complete already")
        began = time.thread_time()
        restricts = self._matcher.fill_next_token_bitmask(bitmask[None], 0)
        if time.thread_time() - began > _SLOW_FILL_S:
            raise GrammarError("the grammar is too slow to follow: write it with fewer nested repetitions")
        if restricts and not bitmask.any():
            raise GrammarError("the grammar allows no token here")
        return bool(restricts)

    def accept(self, token_id: int) -> None:
        """Goes on by one token. Raises GrammarError if the grammar does not allow it."""
        if not self._matcher.accept_token(token_id):
            raise GrammarError(
                f"the grammar does not allow token {token_id} as number {self.num_tokens + 1} of the output"
            )
        self.num_tokens += 1

    def fork(self) -> "GrammarState":
        """A second state at the same place, which goes on by itself."""
        return GrammarState(self.compiled, self._matcher.fork(), self.num_tokens)


def new_bitmask(rows: int, vocab_size: int) -> "torch.Tensor":
    """Masks for `GrammarState.fill`: int32[rows, ceil(vocab_size / 32)] on the CPU."""
    import torch

    return torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32)


def apply_bitmask(logits: "torch.Tensor", bitmask: "torch.Tensor", rows: list[int]) -> None:
    """Sets to -inf, in place, the logits float32[n, vocab] of the `rows` whose mask of the same number forbids them."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(
        logits, bitmask.to(logits.device, non_blocking=True), vocab_size=logits.shape[1], indices=rows
    )
