"""Placement policies: pure functions from what each replica has cached and carries, to replica ids with the best first.

The cost of a replica is the work between this request and its answer there, in tokens of prefill: the part of the
prompt that must be computed, the prefill that waits ahead, and the share of each step that running requests take. A
cached prefix is worth the tokens that it saves. So cache affinity yields to load gradually and for each replica on its
own: no threshold over the whole fleet turns it off. (The sum is that of NVIDIA Dynamo's router: prefill to do, plus
decode context.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_low


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as placement sees it.

    | field | meaning |
    | --- | --- |
    | `cached_tokens` | longest cached prefix of this prompt |
    | `waiting_tokens` | prompt tokens of all its requests that are neither cached nor computed |
    | `context_tokens` | KV tokens that its running requests hold |
    | `running`, `waiting` | requests |
    | `recent_tokens` | uncached prompt tokens that it was recently given, computed by now or not |
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
    """The terms of a replica's cost, in tokens of prefill that wait ahead of the request.

    | weight | meaning |
    | --- | --- |
    | `uncached` | cost of a prompt token to be computed while little waits: it delays this request alone |
    | `uncached_busy` | the same on a busy fleet, where the token delays all later requests as well |
    | `busy_prompts` | the fleet is busy once this many prompts like this one wait at the median replica |
    | `context` | cost of a token of decode context: it slows every step |
    | `request` | cost of a request that is on the replica |
    | `recent` | cost of a token of recent work |

    `recent` is small. It only keeps an idle fleet from sending every new conversation to the one replica that has the
    prefix that all conversations share, until that replica's cache overflows while the others' are empty.

    Tuned in simulation (`tests/router/simulated_fleet.py`):

    - `uncached_busy`, `context`, `request` and `recent` on the Mooncake conversation trace: 4 replicas, finite caches,
      from idle to overload. A factor of two in any of them changes little.
    - `uncached` and `busy_prompts` on prefixes that many requests share: 8 and 64 replicas of an 8B model on H200, from
      a tenth of their capacity to more than all of it. With a weight of 4 throughout, a hot prefix stayed on 13 of 64
      replicas. With 1 throughout, a full fleet computed 1.1 to 1.6 times as many tokens.
    """

    uncached: float = 1.0
    uncached_busy: float = 4.0
    busy_prompts: float = 0.5
    context: float = 0.05
    request: float = 64.0
    recent: float = 0.05


Placement = Callable[[Sequence[Candidate], int, Weights, int], list[str]]


def rank(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """Cache-aware placement: replica ids, cheapest first. A prompt that is cached nowhere goes to the least load.
    Replicas of equal cost take turns: `turn` is any number that grows by one with each request."""
    weight = uncached_weight(candidates, num_prompt_tokens, weights)

    def cost(candidate: Candidate) -> float:
        uncached = max(0, num_prompt_tokens - candidate.cached_tokens)
        return weight * uncached + _load(candidate, weights)

    return _order(candidates, cost, turn)


def uncached_weight(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights) -> float:
    """The cost of a token of this prompt that must be computed. Linear in the waiting tokens of the median replica:
    from `weights.uncached` where half of the replicas have none, up to `weights.uncached_busy`.

    While replicas are idle, computing a prefix twice costs nothing, and a prefix in demand must spread to more replicas
    before the first ones are crowded. When all replicas are busy, every waiting request pays for it.
    """
    if not candidates:
        return weights.uncached
    queue = median_low(candidate.waiting_tokens for candidate in candidates)
    busy = min(1.0, queue / (weights.busy_prompts * max(1, num_prompt_tokens)))
    return weights.uncached + (weights.uncached_busy - weights.uncached) * busy


def least_load(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """Least load first, by the load of `rank`; ignores caches."""
    return _order(candidates, lambda candidate: _load(candidate, weights), turn)


def round_robin(candidates: Sequence[Candidate], num_prompt_tokens: int, weights: Weights, turn: int) -> list[str]:
    """Each replica in its turn; ignores caches and load."""
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
