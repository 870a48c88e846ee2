"""Drafts: guesses at the next tokens, which a step verifies many at a time. No output changes by them.

Read `speculative_decoding.py` first, then `drafter.py`.
"""

from contextlib import suppress
from pathlib import Path

from worker.drafts.drafter import Drafter, Proposal
from worker.drafts.speculative_decoding import SpeculativeDecoding
from worker.structured_output import GrammarError

__all__ = ["Drafter", "Proposal", "SpeculativeDecoding", "make_drafters"]


def make_drafters(model_dir: Path, vocab_size: int, *, grammar: bool = True) -> list[Drafter]:
    """All drafters for a model. With `grammar`, its grammars' one is among them if it has a tokenizer."""
    from worker.drafts.canonical import CanonicalTokenizer
    from worker.drafts.grammar import GrammarDrafter
    from worker.drafts.suffix import SuffixDrafter

    drafters: list[Drafter] = [SuffixDrafter()]
    if grammar:
        with suppress(GrammarError):
            drafters.append(GrammarDrafter(CanonicalTokenizer(model_dir, vocab_size)))
    return drafters
