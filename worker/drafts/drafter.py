"""The interface of drafters: guesses at the next tokens of a sequence, which the model then verifies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from pipeline.shape import BatchShape
from worker.structured_output import GrammarState


class Proposal(NamedTuple):
    """The guess of a drafter at the next tokens of one sequence.

    | field | meaning |
    | --- | --- |
    | `token_ids` | the guessed tokens; empty if the drafter knows nothing |
    | `evidence` | how much speaks for the guess, from 0: an index into what `Acceptance` learns of the drafter |
    """

    token_ids: list[int]
    evidence: int = 0


class Draftable(Protocol):
    """A running sequence, as far as drafts need to know it."""

    slot: int

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""

    @property
    def num_known(self) -> int:
        """Tokens whose value is known."""

    @property
    def token_limit(self) -> int:
        """Tokens with which it ends."""

    @property
    def num_computed(self) -> int:
        """Tokens whose KV is computed."""

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""

    def pages(self, start: int, end: int) -> np.ndarray:
        """The pages number `start` to `end - 1`, int32."""

    def token_ids(self, start: int, end: int) -> np.ndarray:
        """The known tokens from position `start` to `end - 1`."""


class Drafter(ABC):
    """Guesses the next tokens of running sequences. A wrong guess costs time and changes no output.

    Sequences are known by `key`, an integer that belongs to one sequence at a time. One thread at a time.
    """

    name: str
    """As `shoal status` and the metrics show it."""
    num_evidence = 1
    """`Proposal.evidence` is below this number."""
    is_batched = False
    """Whether it proposes for many sequences at once, by `propose_all`, and in a time that counts. It is then asked
    only where this probably pays, and `propose` says nothing."""

    @property
    def priors(self) -> list[float]:
        """By evidence, the probability that a draft is right, before any was verified."""
        return [0.7] * self.num_evidence

    @abstractmethod
    def add(
        self,
        key: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        prediction_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        """Begins with a sequence. `output_ids` are those that it has already. `prediction_ids` are the client's own
        guess at the output. `grammar` follows the sequence's output and is not to be changed; it has accepted
        `output_ids`, and accepts further tokens before `extend` tells of them."""

    @abstractmethod
    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        """Takes in new output tokens of a sequence."""

    @abstractmethod
    def propose(self, key: int, most: int) -> Proposal:
        """The guess at the tokens after the last known one, at most `most` of them."""

    def propose_all(self, sequences: Sequence[Draftable], most: Sequence[int]) -> list[Proposal]:
        """The guesses at the tokens after the last ones of `sequences`, whose values are known; at most `most[i]` for
        sequence i. `slot` is their key."""
        return [self.propose(seq.slot, limit) for seq, limit in zip(sequences, most, strict=True)]

    def seconds(self, single: BatchShape, most: int) -> float:
        """The time that `propose_all` takes for `most` tokens of each sequence; infinite if it would propose nothing.
        `single`: one token of each of the sequences."""
        return 0.0

    def passed_over(self) -> None:  # noqa: B027 - optional
        """Called for a step in which `propose_all` was not worth its `seconds`."""

    @abstractmethod
    def remove(self, key: int) -> None:
        """Forgets a sequence. What it has taught may be kept for others."""
