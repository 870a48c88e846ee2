"""Drafts: guesses at the next tokens, which a step verifies many at a time. No output changes by them.

Read `speculative_decoding.py` first, then `drafter.py`.
"""

from pathlib import Path

from worker.drafts.drafter import Drafter, Proposal
from worker.drafts.speculative_decoding import SpeculativeDecoding

__all__ = ["Drafter", "Proposal", "SpeculativeDecoding", "make_drafters"]


def make_drafters(model_dir: Path) -> list[Drafter]:
    """All drafters for a model."""
    return []
