"""How `select` chooses among texts, given the log probabilities of their tokens.

The three methods are SGLang's. Each takes the scores of all choices, and returns a ranking value for each; the highest
is chosen, the first of several equal ones. Classes that were written for SGLang work too: they are called with the
choices and their log probabilities, and return a `ChoicesDecision`.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class ChoiceScore:
    """Natural log probabilities of a choice's tokens, each given the prompt and the tokens before it.

    `unconditional`: the same without the prompt; None where the first token has nothing before it. `token_ids` are None
    if the endpoint does not tell them.
    """

    token_ids: tuple[int | None, ...]
    logprobs: tuple[float, ...]
    unconditional: tuple[float | None, ...] | None = None
    given_mean: float | None = None

    @property
    def mean(self) -> float:
        """The mean of `logprobs`, or `given_mean` where SGLang's arguments have one."""
        return _mean(self.logprobs) if self.given_mean is None else self.given_mean


@dataclass
class ChoicesDecision:
    """A choice, as SGLang's methods return it, and details for `get_meta_info`."""

    decision: str
    meta_info: dict[str, Any] | None = None


Logprobs = Sequence[Sequence[Sequence[Any]]]  # by choice, then by token: its log probability, its id, its text


class ChoicesSamplingMethod:
    """A way to rank choices: a subclass has `values`, or, as SGLang's, `__call__`. `needs_unconditional`: whether
    scores without the prompt are needed."""

    needs_unconditional = False

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """SGLang's name of `needs_unconditional`, for its classes to override."""
        return self.needs_unconditional

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        """A value for each choice; the highest is best."""
        raise NotImplementedError

    def details(self, scores: Sequence[ChoiceScore]) -> dict[str, Any]:
        """Further details for `meta_info`."""
        return {}

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Logprobs,
        output_token_logprobs: Logprobs,
        unconditional_token_logprobs: Logprobs | None = None,
    ) -> ChoicesDecision:
        """Chooses, with SGLang's arguments."""
        alone: Sequence[Any] = unconditional_token_logprobs or [None] * len(choices)
        scores = [
            ChoiceScore(
                tuple(token[1] for token in own),
                tuple(token[0] for token in own),
                None if other is None else tuple(token[0] for token in other),
                mean,
            )
            for own, other, mean in zip(input_token_logprobs, alone, normalized_prompt_logprobs, strict=True)
        ]
        values = self.values(scores)
        meta = {
            "normalized_prompt_logprobs": normalized_prompt_logprobs,
            "input_token_logprobs": input_token_logprobs,
            "output_token_logprobs": output_token_logprobs,
        }
        if unconditional_token_logprobs is not None:
            meta["unconditional_token_logprobs"] = unconditional_token_logprobs
        best = max(range(len(values)), key=values.__getitem__)
        return ChoicesDecision(choices[best], meta | self.details(scores))


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The mean log probability of a choice's tokens."""

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        return [score.mean for score in scores]


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Token after token, the choices whose token is likeliest stay. A choice that has ended goes on with its mean, so
    that a longer one that begins with it can be compared."""

    def values(self, scores: Sequence[ChoiceScore]) -> list[float]:
        left = list(range(len(scores)))
        for column in zip(*self._rows(scores), strict=True):
            best = max(column[i] for i in left)
            left = [i for i in left if column[i] == best]
            if len(left) == 1:
                break
        return [0.0 if i in left else float("-inf") for i in range(len(scores))]

    def details(self, scores: Sequence[ChoiceScore]) -> dict[str, Any]:
        return {"greedy_logprob_matrix": self._rows(scores)}

    @staticmethod
    def _rows(scores: Sequence[ChoiceScore]) -> list[list[float]]:
        longest = max((len(score.logprobs) for score in scores), default=0)
        return [[*score.logprobs, *[_mean(score.logprobs)] * (longest - len(score.logprobs))] for score in scores]


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
            values.append(_mean(gains))
        return values

    def details(self, scores: Sequence[ChoiceScore]) -> dict[str, Any]:
        return {"normalized_unconditional_prompt_logprobs": self.values(scores)}


def decided(
    method: Any, choices: Sequence[str], scores: Sequence[ChoiceScore], temperature: float
) -> tuple[int, dict[str, Any]]:
    """The number of the choice that a method takes, and details. With a temperature above 0 it is drawn by the softmax
    of the method's values over the temperature. `method` may be a class of SGLang's kind, which has no values. Raises
    ValueError."""
    meta: dict[str, Any] = {
        "normalized_prompt_logprobs": [score.mean for score in scores],
        "input_token_logprobs": [_tokens(score.token_ids, score.logprobs) for score in scores],
        "output_token_logprobs": [[] for _ in scores],
    }
    if getattr(type(method), "values", ChoicesSamplingMethod.values) is ChoicesSamplingMethod.values:
        if temperature > 0:
            raise ValueError("a choices_method without values takes the best choice: temperature must be 0")
        alone = None
        if needs_unconditional(method):
            alone = [_tokens(score.token_ids, score.unconditional or ()) for score in scores]
        decision = method(choices=list(choices), **meta, unconditional_token_logprobs=alone)
        if decision.decision not in choices:
            raise ValueError(f"the choices_method decided for {decision.decision!r}, which is not one of the choices")
        return choices.index(decision.decision), meta | (decision.meta_info or {})
    values = method.values(scores)
    chosen = max(range(len(values)), key=values.__getitem__)
    if temperature > 0:
        weights = [math.exp((value - values[chosen]) / temperature) for value in values]
        chosen = random.choices(range(len(values)), weights)[0]
    return chosen, meta | {"values": values}


def needs_unconditional(method: Any) -> bool:
    """Whether a method, of either kind, needs scores without the prompt."""
    asked = getattr(method, "requires_unconditional_logprobs", False)
    return bool(asked or getattr(method, "needs_unconditional", False))


def _tokens(token_ids: Sequence[int | None], logprobs: Sequence[float | None]) -> list[tuple[Any, ...]]:
    return [(logprob, token_id, None) for token_id, logprob in zip(token_ids, logprobs, strict=True)]


def _mean(logprobs: Sequence[float]) -> float:
    return fmean(logprobs) if logprobs else float("-inf")


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()
