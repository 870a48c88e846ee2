"""Drafts that are right as often as asked, for a model with random weights, whose output no drafter could guess.

A run without drafts records the outputs of a batch. Afterwards `SyntheticDrafter` guesses from the recording, with
errors, and `ReplayingSampler` says what was recorded. It has to: with 16-bit weights the likeliest token hangs on the
order of additions, which differs between a step of single tokens and one with drafts, and random weights give many
tokens about the same logits. One other token in ten, and an output has nothing in common with its recording soon.

Everything else is as in a replica: the choice by cost, the steps and their CUDA graphs, sampling, and the comparison of
drafts with samples. The tokens are replaced when they have come to the host.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from worker.drafts import Drafter, Proposal
from worker.sampling.sampler import PendingSample, Sampler
from worker.step import SampledTokens
from worker.structured_output import GrammarState


class RecordedOutputs:
    """The outputs of a batch, and a guess at the tokens after each of their positions."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        acceptance: Sequence[float],
        vocab_size: int,
        seed: int = 0,
    ) -> None:
        """`outputs`: of each prompt, all of the same length. `acceptance`: its item i is the probability that guess i
        is right if those before it are. Errors depend on `seed`, sequence, position and i alone. A prompt that occurs
        twice has the same output both times."""
        self.outputs = np.array(outputs, dtype=np.int64)
        self._rows = {tuple(prompt): row for row, prompt in enumerate(prompts)}
        positions = np.arange(self.outputs.shape[1])
        ahead = np.minimum(positions[:, None] + np.arange(len(acceptance)), positions[-1])
        self.guesses: list[list[list[int]]] = []
        """By sequence and number of tokens that it has, the guessed next ones."""
        for row, said in enumerate(self.outputs):
            is_right = np.random.default_rng((seed, row)).random(ahead.shape) < np.array(acceptance)
            self.guesses.append(np.where(is_right, said[ahead], (said[ahead] + 1) % vocab_size).tolist())

    def row(self, prompt_ids: Sequence[int]) -> int:
        """The sequence of a prompt. Raises KeyError for a prompt that was not recorded."""
        return self._rows[tuple(prompt_ids)]


class SyntheticDrafter(Drafter):
    """Guesses from a recording."""

    name = "synthetic"

    def __init__(self, recording: RecordedOutputs) -> None:
        self._recording = recording
        self._places: dict[int, tuple[list[list[int]], int]] = {}  # a sequence's guesses, and the tokens that it has

    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        self._places[key] = self._recording.guesses[self._recording.row(prompt_ids)], len(output_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        guesses, known = self._places[key]
        self._places[key] = guesses, known + len(token_ids)

    def propose(self, key: int, most: int) -> Proposal:
        guesses, known = self._places[key]
        return Proposal(guesses[known][: max(0, most)] if known < len(guesses) else [])

    def remove(self, key: int) -> None:
        del self._places[key]


class ReplayingSampler(Sampler):
    """Samples as any sampler, and then says the recorded tokens instead."""

    def __init__(self, recording: RecordedOutputs, *arguments: Any) -> None:
        """`arguments`: those of `Sampler`."""
        super().__init__(*arguments)
        self._recording = recording
        self._rows = np.zeros(len(self._states), dtype=np.int64)  # of the recording, by slot

    def add(self, slot: int, sampling: Any, prompt_ids: Sequence[int], *others: Any) -> None:
        super().add(slot, sampling, prompt_ids, *others)
        self._rows[slot] = self._recording.row(prompt_ids)

    def launch(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        likeliest: torch.Tensor | None = None,
        draft_ids: np.ndarray | None = None,
    ) -> PendingSample:
        pending = super().launch(logits, slots, likeliest, draft_ids)
        return _ReplayedSample(pending, self._recording, self._rows, self._num_output)


class _ReplayedSample(PendingSample):
    """The tokens of a launch, of which those of the recording come to the host."""

    def __init__(
        self, pending: PendingSample, recording: RecordedOutputs, rows: np.ndarray, num_output: np.ndarray
    ) -> None:
        """`rows`: the recording's sequence by slot. `num_output`: tokens by slot, with one of this launch."""
        self.__dict__ = pending.__dict__
        metadata = self._metadata
        ahead = 0 if self._drafts is None else self._drafts.offsets
        places = np.minimum(num_output[metadata.slots] - 1 + ahead, recording.outputs.shape[1] - 1)
        self._recorded = recording.outputs[rows[metadata.slots], places]

    def result(self) -> SampledTokens:
        self._landing.wait()
        self._tokens[self._metadata.sampled_rows] = self._recorded
        return super().result()
