"""Jump-forward decoding without verification: what a grammar forces becomes output at once.

The tokens of the forced text count as output as if they had been sampled, and the next step computes them as a part of
the prompt, with logits for the last one only. This is not exact: the model might have written the same text in other
tokens, and after these it might have gone on differently. `GrammarDrafter` is the exact way.
"""

from collections.abc import Collection

from worker.drafts.canonical import CanonicalTokenizer
from worker.drafts.grammar import forced_bytes
from worker.structured_output import GrammarState


class JumpForward:
    """The tokens of forced texts."""

    def __init__(self, tokenizer: CanonicalTokenizer) -> None:
        self._tokenizer = tokenizer

    def forced(self, state: GrammarState, most: int, stop_ids: Collection[int]) -> list[int]:
        """The tokens that the grammar forces now, at most `most`. Ends before a token of `stop_ids`, before an end
        token, and before tokens at the text's end that may be a part of longer ones. `state` stays as it is."""
        if most <= 0 or state.terminated:
            return []
        found = self._tokenizer.encode(forced_bytes(state.matcher))
        token_ids = list(found.token_ids[: min(most, found.num_certain)])
        return next((token_ids[:i] for i, token_id in enumerate(token_ids) if token_id in stop_ids), token_ids)
