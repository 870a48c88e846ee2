"""The interface of drafters: guesses at the next tokens of a sequence, which the model then verifies."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

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


class Drafter(ABC):
    """Guesses the next tokens of running sequences. A wrong guess costs time and changes no output.

    Sequences are known by `key`, an integer that belongs to one sequence at a time. One thread at a time.
    """

    name: str
    """As `shoal status` and the metrics show it."""
    num_evidence = 1
    """`Proposal.evidence` is below this number."""

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

    @abstractmethod
    def remove(self, key: int) -> None:
        """Forgets a sequence. What it has taught may be kept for others."""
