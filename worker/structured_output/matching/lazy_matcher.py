"""llguidance as a second engine: masks from automata that are built while outputs follow them.

Its matchers have the methods of xgrammar's that this project uses, with the same meaning. What differs is kept in
here:

- After an error, llguidance lets every output end. Here no token is allowed then.
- It takes in tokens only. Text that ends within a token is taken in by the tokens that stand for single bytes.
- It does not count the end token as a step.
"""

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from worker.structured_output.matching.boundary_tokens import BoundaryTokens
from worker.structured_output.tokens import BY_ID

if TYPE_CHECKING:
    import torch


_FULL = "too many states"  # llguidance's words


@cache
def _executor(threads: int) -> Any:
    """llguidance's object that fills many masks at once."""
    import llguidance

    return llguidance.LLExecutor(num_threads=threads)


class LazyVocabulary:
    """A vocabulary as llguidance needs it: built once per process, in 0.35 s for 49,152 tokens."""

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Sequence[int]) -> None:
        """`token_bytes`: as `GrammarVocabulary.lazy_bytes` has them. `end_ids`: tokens that end an output, and are no
        text."""
        import llguidance

        ends = {token_id: BY_ID + token_bytes[token_id].removeprefix(BY_ID) for token_id in end_ids}
        self.tokens = token_bytes = [ends.get(token_id, text) for token_id, text in enumerate(token_bytes)]
        self.num_tokens = len(token_bytes)
        self.end_ids = list(end_ids)
        ids = {text: token_id for token_id, text in enumerate(token_bytes) if len(text) == 1}
        self.byte_ids = [ids.get(bytes([byte])) for byte in range(256)]
        """The token of each byte, None for those that have none."""
        wrapper = llguidance.TokenizerWrapper(_Bytes(token_bytes, self.end_ids, self.byte_ids))
        self.handle: Any = llguidance.LLTokenizer(wrapper, n_vocab=self.num_tokens, eos_token=self.end_ids or [0])

    @cached_property
    def boundaries(self) -> BoundaryTokens:
        """The tokens by what they may end. Made when it is first needed, in 0.1 s for 49,152 tokens."""
        return BoundaryTokens(self.tokens)


class _Bytes:
    """The attributes that llguidance reads from a tokenizer. Calls of the tokenizer are for forced text,
    which is not used here."""

    bos_token_id = None
    special_token_ids: Sequence[int] = ()

    def __init__(self, tokens: Sequence[bytes], end_ids: Sequence[int], byte_ids: Sequence[int | None]) -> None:
        self.tokens, self._byte_ids = tokens, byte_ids
        self.eos_token_id = end_ids[0] if end_ids else 0

    def __call__(self, text: bytes) -> list[int]:
        return [token_id for byte in text if (token_id := self._byte_ids[byte]) is not None]


class LazyMatcher:
    """Follows one output. Has the methods of `xgrammar.GrammarMatcher`."""

    narrows: ClassVar[bool] = False
    """Whether `narrow` does anything."""

    def __init__(self, vocabulary: LazyVocabulary, matcher: Any, renew: Callable[[], Any] | None = None) -> None:
        """`matcher`: llguidance's, at the beginning of its grammar. `renew` makes another with an automaton of its own,
        for when that one is full."""
        self._vocabulary, self.handle, self._renew = vocabulary, matcher, renew
        self._steps: list[int] = []  # tokens of each step; 0 for the end token
        self._taken: list[int] = []  # tokens that `handle` has taken in
        self._ended = False
        self.stop_token_ids = self._vocabulary.end_ids
        self._ends = frozenset(self.stop_token_ids)

    def accept_token(self, token_id: int) -> bool:
        """Advances by a token if the grammar allows it."""
        if self._ended:
            return False
        if token_id in self._ends:
            self._ended = self.is_completed()
            if self._ended:
                self._steps.append(0)
            return self._ended
        if self.handle.try_consume_tokens([token_id]) != 1 and not (
            self.renewed() and self.handle.try_consume_tokens([token_id]) == 1
        ):
            return False
        self.advanced(token_id)
        return True

    def is_plain(self, token_id: int) -> bool:
        """Whether llguidance alone says if this token is allowed next."""
        return not (self.narrows or self._ended or token_id in self._ends)

    def advanced(self, token_id: int) -> None:
        """Notes that llguidance has taken in a plain token."""
        self._steps.append(1)
        self._taken.append(token_id)

    def renewed(self) -> bool:
        """Whether an error was for want of states, and another automaton has taken the output in."""
        if self._renew is None or not self.handle.is_error() or _FULL not in self.handle.get_error():
            return False
        handle = self._renew()
        if handle.try_consume_tokens(self._taken) != len(self._taken):
            return False
        self.handle = handle
        return True

    def accept_string(self, text: str | bytes) -> bool:
        """Advances by a text, as one step, if the grammar allows it and every byte of it is a token."""
        data = text.encode() if isinstance(text, str) else text
        ids = [token_id for byte in data if (token_id := self._vocabulary.byte_ids[byte]) is not None]
        if self._ended or len(ids) < len(data):
            return False
        taken = self.handle.try_consume_tokens(ids)
        if taken != len(ids) and self.renewed():
            taken = self.handle.try_consume_tokens(ids)
        if taken != len(ids):
            if taken:
                self.handle.rollback(taken)
            return False
        self._steps.append(taken)
        self._taken += ids
        return True

    def rollback(self, num_steps: int) -> None:
        """Takes back the last steps."""
        if not num_steps:
            return
        tokens = sum(self._steps[-num_steps:])
        del self._steps[-num_steps:]
        if tokens:
            del self._taken[-tokens:]
        self._ended = False
        if tokens and not self.handle.rollback(tokens):
            raise RuntimeError(f"llguidance cannot take back {tokens} tokens: {self.handle.get_error()}")

    def fill_next_token_bitmask(self, bitmask: "torch.Tensor | np.ndarray[Any, Any]", index: int = 0) -> None:
        """Writes the tokens that may follow into row `index` of `bitmask` int32[n, ceil(vocab / 32)], on the CPU.
        None may follow after an error."""
        row = bitmask[index].numpy() if not isinstance(bitmask, np.ndarray) else bitmask[index]
        if not self.handle.is_error():
            self.handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self.finish(row)

    def finish(self, row: "np.ndarray[Any, Any]") -> None:
        """Completes a mask int32[ceil(vocab / 32)] that llguidance has computed. None may follow after an error."""
        if self.handle.is_error() and self.renewed():
            self.handle.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self.handle.is_error():
            row[:] = 0
        elif self.narrows:
            self.narrow(row)

    def narrow(self, row: "np.ndarray[Any, Any]") -> None:
        """Leaves out tokens of the mask int32[ceil(vocab / 32)] for what the grammar does not say: none here."""

    def find_jump_forward_string(self) -> str:
        """The text that alone may follow. Raises UnicodeDecodeError, with the bytes, if it ends within a character."""
        return "" if self._ended or self.is_completed() else bytes(self.handle.compute_ff_bytes()).decode()

    def is_completed(self) -> bool:
        """Whether the output may end here."""
        return bool(self.handle.is_accepting())

    def is_terminated(self) -> bool:
        """Whether the end token has been accepted."""
        return self._ended


def accept_lazy(matchers: Sequence[LazyMatcher], token_ids: Sequence[int], threads: int) -> list[bool]:
    """Advances each matcher by its token, on `threads` threads. Returns whether it was allowed. A matcher whose token
    was not may be at an error from then on."""
    both = list(zip(matchers, token_ids, strict=True))
    plain = [i for i, (matcher, token_id) in enumerate(both) if matcher.is_plain(token_id)]
    pairs = [(both[i][0].handle, both[i][1]) for i in plain]
    if pairs and threads > 1:
        found = _executor(threads).consume_token_par(pairs)
    else:
        found = [handle.consume_token(token_id) for handle, token_id in pairs]
    allowed = dict(zip(plain, found, strict=True))
    for i, is_allowed in allowed.items():
        if is_allowed:
            matchers[i].advanced(token_ids[i])
        elif matchers[i].renewed():
            allowed[i] = matchers[i].accept_token(token_ids[i])
    return [
        allowed[i] if i in allowed else matcher.accept_token(token_id) for i, (matcher, token_id) in enumerate(both)
    ]


def fill_lazy(matchers: Sequence[LazyMatcher], bitmask: "torch.Tensor", rows: Sequence[int], threads: int) -> None:
    """Writes the mask of each matcher into its row of `bitmask` int32[n, ceil(vocab / 32)], on `threads` threads."""
    address, row_bytes = bitmask.data_ptr(), 4 * bitmask.shape[1]
    if threads > 1 and len(matchers) > 1:
        pairs = [(matcher.handle, row) for matcher, row in zip(matchers, rows, strict=True)]
        _executor(threads).unsafe_compute_mask_ptr(pairs, address, row_bytes, len(bitmask))
    else:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.handle.unsafe_compute_mask_ptr(address + row * row_bytes, row_bytes)
    words = bitmask.numpy()
    for matcher, row in zip(matchers, rows, strict=True):
        matcher.finish(words[row])
