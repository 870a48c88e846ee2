"""Drafts: guesses at the next tokens of sequences, which the model verifies in one step.

Owns the drafters and what is learned of them. A guess changes no output: a drafted token counts only where the sampler
chooses the same. Read `drafter.py` first, then `suffix.py`.
"""
