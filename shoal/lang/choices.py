"""How `select` chooses among texts, given the log probabilities of their tokens.

The three methods are SGLang's. Each takes the scores of all choices, and returns a ranking value for each; the highest
is chosen, the first of several equal ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class ChoiceScore:
    """Natural log probabilities of a choice's tokens, each given the prompt and the tokens before it.

    `unconditional`: the same without the prompt; None where the first token has nothing before it. `token_ids` are None
    if the endpoint does not tell them.
    """

    token_ids: tuple[int | None, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] | None = None


class ChoicesSamplingMethod:
    """A way to rank choices. `needs_unconditional`: whether scores without the prompt are needed."""

    needs_unconditional = False

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        """A value for each choice; the highest is best."""
        raise NotImplementedError


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The mean log probability of a choice's tokens."""

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        return [fmean(score.logprobs) if score.logprobs else float("-inf") for score in scores]


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token after token, the choices whose token is likeliest stay. A choice that has ended goes on with its mean, so
    that a longer one that begins with it can be compared."""

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        means = TokenLengthNormalized().values(scores)
        left = list(range(len(scores)))
        for position in range(max((len(score.logprobs) for score in scores), default=0)):
            here = {i: scores[i].logprobs[position] if position < len(scores[i].logprobs) else means[i] for i in left}
            best = max(here.values())
            left = [i for i in left if here[i] == best]
            if len(left) == 1:
                break
        return [0.0 if i in left else float("-inf") for i in range(len(scores))]


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The mean gain of log probability that the prompt gives to a choice's tokens."""

    needs_unconditional = True

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        values = []
        for score in scores:
            if score.unconditional is None:
                raise ValueError("unconditional_likelihood_normalized needs log probabilities without the prompt")
            if len(score.unconditional) != len(score.logprobs):
                raise ValueError("a choice has other tokens with the prompt than without it")
            gains = [own - (alone or 0.0) for own, alone in zip(score.logprobs, score.unconditional, strict=True)]
            values.append(fmean(gains) if gains else float("-inf"))
        return values


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
