"""Requests of every kind that drafts must not change, and a drafter that knows their outputs."""

import random
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from pipeline.shape import BatchShape
from worker.drafts import Drafter, Proposal
from worker.engine.engine import Engine, Finished
from worker.messages import Grammar, Output, SamplingParams

TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0, seed=5)
EVERY: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "filtered": replace(DRAWN, top_k=20, top_p=0.9, min_p=0.01, seed=6),
    "penalties": replace(DRAWN, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
    "greedy penalties": replace(GREEDY, frequency_penalty=1.5, logit_bias={3: 4.0, 9: -100.0}),
    "min_tokens": replace(DRAWN, min_tokens=9, stop_token_ids=tuple(range(0, 256, 3))),
    "stop": replace(DRAWN, stop_token_ids=tuple(range(0, 256, 9)), seed=11),
    "logprobs": replace(DRAWN, logprobs=3, seed=8),
    "greedy logprobs": replace(GREEDY, logprobs=0),
    "regex": replace(DRAWN, grammar=Grammar("regex", "(abc|[a-f]{2}x){6}"), seed=9),
    "greedy regex": replace(GREEDY, grammar=Grammar("regex", "[0-9]{3}-[0-9]{4}")),
    "everything": replace(
        DRAWN, grammar=Grammar("regex", "([a-f]{3}-){1,5}"), logprobs=1, min_tokens=6, frequency_penalty=0.7
    ),
}
PROMPTS = [[(7 * i + j * j) % 250 for j in range(3 + 5 * i)] for i in range(len(EVERY))]
EACH = list(EVERY.values())


class Cheater(Drafter):
    """Knows the outputs, and says them with errors: as many and as wrong as its random numbers want."""

    name = "cheater"

    def __init__(self, outputs: Sequence[Sequence[int]], right: float, seed: int = 0, prompts=PROMPTS) -> None:
        self._outputs = {tuple(prompt): list(said) for prompt, said in zip(prompts, outputs, strict=True)}
        self._right, self._random = right, random.Random(seed)
        self._said: dict[int, tuple[list[int], int]] = {}
        self.proposed = 0

    def add(self, key, prompt_ids, output_ids, prediction_ids, grammar) -> None:
        assert key not in self._said
        self._said[key] = self._outputs[tuple(prompt_ids)], len(output_ids)

    def extend(self, key: int, token_ids: Sequence[int]) -> None:
        said, told = self._said[key]
        assert list(token_ids) == said[told : told + len(token_ids)]
        self._said[key] = said, told + len(token_ids)

    def propose(self, key: int, most: int) -> Proposal:
        said, told = self._said[key]
        drafts = said[told : told + self._random.randint(0, most)]
        drafts = [token if self._random.random() < self._right else self._random.randrange(250) for token in drafts]
        self.proposed += len(drafts)
        return Proposal(drafts)

    def remove(self, key: int) -> None:
        del self._said[key]


def said(finished: Sequence[Finished]) -> list[object]:
    """What clients are told, with log probabilities up to the last bits."""
    assert not any(each.failure for each in finished), [each.failure for each in finished]
    return [
        (
            each.token_ids,
            each.finish_reason,
            [(one.token_id, pytest.approx(one.logprob, abs=1e-4)) for one in each.logprobs],
        )
        for each in finished
    ]


def outputs(one: Engine) -> Iterator[Output]:
    """All outputs until nothing is left to do."""
    while len(one.scheduler):
        if not one.has_work:
            one.readiness.wait()
        yield from one.step()


class Passes:
    """Each pass takes a given time, and the reading of a chunk as long as of its tokens one by one."""

    def __init__(self, each_s: float = 0.0) -> None:
        self.each_s = each_s
        self.observed: list[int] = []

    def seconds(self, shape: BatchShape) -> float:
        return self.each_s * ((shape.chunks and shape.tokens) or 1)

    def observe(self, shape: BatchShape, seconds: Sequence[float]) -> None:
        self.observed += [shape.tokens] * len(seconds)
