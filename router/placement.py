"""Where a request goes: pure functions from what each replica has cached and carries to replica ids, best first.

The cost of a replica is the work that stands between this request and its answer there, in tokens of prefill: what it
must compute of this prompt, what waits ahead, what the requests already there will take from it. A cached prefix is
worth the tokens that it saves, so affinity yields to load smoothly and for each candidate alone: there is no gate over
the whole fleet that turns it off. (The sum is that of NVIDIA Dynamo's router: prefill to do, plus decode context.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Candidate:
    """One replica as placement sees it.

    `cached_tokens`: longest cached prefix of this prompt. `waiting_tokens`: prompt tokens of all its requests, neither
    cached nor computed. `context_tokens`: KV that its running requests hold. `running`, `waiting`: requests.
    `recent_tokens`: uncached prompt tokens that it was given lately, whether or not they are computed by now.
    """

    replica_id: str
    cached_tokens: int = 0
    waiting_tokens: int = 0
    context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    recent_tokens: float = 0


@dataclass(frozen=True, slots=True)
class Weights:
    """What things cost, in tokens of prefill that wait ahead of the request.

    `uncached`: a token of this prompt that must be computed. More than 1, for it delays not this request alone but all
    that follow. `context`: a token of decode context, which slows every step. `request`: a request that is there.
    `recent`: a token of recent work. Small, it only keeps an idle fleet from sending every new conversation to the one
    replica that has the prefix that all of them share, until that replica's cache overflows and the others' lie empty.

    Tuned on the Mooncake conversation trace in simulation (4 replicas, finite caches, from idle to overload); a factor
    of two in any of them changes little.
    """

    uncached: float = 4.0
    context: float = 0.05
    request: float = 64.0
    recent: float = 0.05


Placement = Callable[[Sequence[Candidate], int, Weights, int], list[str]]


def rank(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """Cache-aware: replica ids, cheapest first. A prompt that is cached nowhere goes where the load is least; equals
    take turns: `turn` is any number that goes up by one a request."""

    def cost(candidate: Candidate) -> float:
        uncached = max(0, num_prompt_tokens - candidate.cached_tokens)
        return weights.uncached * uncached + _load(candidate, weights)

    return _order(candidates, cost, turn)


def least_load(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """By the same load, blind to caches."""
    return _order(candidates, lambda candidate: _load(candidate, weights), turn)


def round_robin(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """Each in its turn, blind to caches and load."""
    return _order(candidates, lambda candidate: 0.0, turn)


def _load(candidate: Candidate, weights: Weights) -> float:
    return (
        candidate.waiting_tokens
        + weights.context * candidate.context_tokens
        + weights.request * (candidate.running + candidate.waiting)
        + weights.recent * candidate.recent_tokens
    )


def _order(candidates: Sequence[Candidate], cost: Callable[[Candidate], float], turn: int) -> list[str]:
    count = len(candidates)
    order = sorted(range(count), key=lambda index: (cost(candidates[index]), (index - turn) % count))
    return [candidates[index].replica_id for index in order]
