"""Drafts: guesses at the next tokens, which a step verifies many at a time. No output changes by them.

Read `speculative_decoding.py` first, then `drafter.py`.
"""

from worker.drafts.drafter import Drafter, Proposal
from worker.drafts.speculative_decoding import SpeculativeDecoding

__all__ = ["Drafter", "Proposal", "SpeculativeDecoding", "make_drafters"]


def make_drafters() -> list[Drafter]:
    """All drafters."""
    from worker.drafts.suffix import SuffixDrafter

    return [SuffixDrafter()]
