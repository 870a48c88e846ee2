"""State of a sequence in its grammar. The sequences of a batch advance together: `batch.py`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from worker.structured_output.error import GrammarError
from worker.structured_output.matching.engines import XGRAMMAR
from worker.structured_output.matching.lazy_grammar import LazyGrammar

if TYPE_CHECKING:  # slow to import, and the process that compiles needs neither
    import torch
    import xgrammar


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
        narrowed: Sequence[str] = (),
    ) -> None:
        """`size_bytes`: approximate memory of the grammar. `cpu_s`: CPU time that its compilation took. `not_enforced`:
        keywords of its schema, with their places, that it leaves out. `narrowed`: those of which it does not have all
        values."""
        self.handle = handle
        self.engine, self.cpu_s = engine, cpu_s
        self.size_bytes = size_bytes
        self.not_enforced, self.narrowed = not_enforced, narrowed
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
            raise self.not_allowed(token_id)
        self.advanced(token_id)

    def not_allowed(self, token_id: int) -> GrammarError:
        """The error of a token that the grammar does not allow next."""
        return GrammarError(
            f"the grammar does not allow token {token_id} as number {self.num_tokens + 1} of the output"
        )

    def advanced(self, token_id: int) -> None:
        """Notes that the matcher has taken in a token."""
        self.num_tokens += 1
        if token_id in self._end_ids:
            self.terminated = bool(self.matcher.is_terminated())


def new_bitmask(rows: int, vocab_size: int) -> "torch.Tensor":
    """Masks for `batch.fill_masks`: int32[rows, ceil(vocab_size / 32)] on the CPU."""
    import torch

    return torch.zeros((rows, -(-vocab_size // 32)), dtype=torch.int32)


def apply_bitmask(logits: "torch.Tensor", bitmask: "torch.Tensor", rows: "torch.Tensor | None" = None) -> None:
    """Sets the logits of forbidden tokens to -inf, in place. Row i of `bitmask` applies to row i of `logits`
    float32[n, vocab], for each i in `rows`, which ascend, or for all. All are on the same device: the host waits for no
    copy."""
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(
        logits,
        bitmask[: len(logits)],
        vocab_size=logits.shape[1],
        indices=rows,  # type: ignore[arg-type]  # annotated as a list; all of its kernels take a tensor too
    )
