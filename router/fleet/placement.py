"""Placement policies: pure functions from what each replica has cached and carries, to the replicas with the best
first.

`rank` predicts seconds, from what each replica tells of its speed (`StepCosts`): when the request's first token would
come, and what other requests lose by it. A cached prefix is worth the time that it saves. So cache affinity yields to
load gradually and for each replica on its own: no threshold over the whole fleet turns it off.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, fields

import numpy as np
from numpy.typing import NDArray

from worker.messages import StepCosts

Floats = NDArray[np.float64]
DEFAULT = StepCosts()
# Prompts have at least this part of a step: a replica computes some tokens of a prompt however many sequences decode.
MIN_PROMPT_SHARE = 0.05
# A busier replica counts as just so busy: what comes later would wait forever. Tuned with `Weights`.
MAX_BUSY_SHARE = 0.7


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as placement sees it.

    | field | meaning |
    | --- | --- |
    | `cached_tokens` | longest cached prefix of this prompt |
    | `wanted_tokens` | tokens of this prompt that it has not, and of which the fleet has fewer copies than it can use |
    | `waiting_tokens` | prompt tokens of all its requests that are neither cached nor computed |
    | `waiting_products` | for each of these, the tokens before it in its prompt; their sum |
    | `context_tokens` | KV tokens that its running requests hold |
    | `running`, `waiting` | requests |
    | `kv_tokens` | KV tokens that it has room for; 0: not known |
    | `output_tokens` | mean length of its outputs |
    | `output_limit` | most output tokens of this request |
    | `requests_s`, `tokens_s` | requests and uncached prompt tokens that it was lately given in a second |
    | others | as `StepCosts` has them |
    """

    cached_tokens: float = 0
    wanted_tokens: float = 0
    waiting_tokens: float = 0
    waiting_products: float = 0
    context_tokens: float = 0
    running: float = 0
    waiting: float = 0
    kv_tokens: float = 0
    output_tokens: float = 200
    output_limit: float = math.inf
    requests_s: float = 0
    tokens_s: float = 0
    step_s: float = DEFAULT.step_s
    token_s: float = DEFAULT.token_s
    product_s: float = DEFAULT.product_s
    decode_s: float = DEFAULT.decode_s
    context_s: float = DEFAULT.context_s
    full_s: float = DEFAULT.full_s


# An array of candidates, one a replica, with the same fields.
CANDIDATE = np.dtype([(field.name, np.float64) for field in fields(Candidate)])
Candidates = np.ndarray


def candidates_of(candidates: Iterable[Candidate]) -> Candidates:
    """The array of candidates."""
    return np.array([astuple(candidate) for candidate in candidates], dtype=CANDIDATE)


@dataclass(frozen=True, slots=True)
class Weights:
    """The worth of a second, relative to a second that this request waits for its first token.

    | weight | meaning |
    | --- | --- |
    | `others` | a second that a request which waits on the replica by now waits longer |
    | `later` | the same for requests that will come |
    | `decode` | a second of the time in which an output is made |

    `spread`: costs are random within this part of themselves. With several routers, bookings are on their way to each
    other for a moment in which all would choose the same best replica.

    Tuned by `shoal bench fleet` on its loads zipf, bursts and agents: 16 replicas, 50 to 110% of capacity, seeds 0 and
    1; `later` on 64 replicas, too. Half of `later`: 99th percentiles of the slowdown +20% (zipf at half of the
    capacity), bursts -10%. Half of `decode` and `others`: zipf +10%, bursts -10%.
    """

    others: float = 0.6
    later: float = 2.0
    decode: float = 0.1
    spread: float = 0.0


Placement = Callable[[Candidates, int, Weights, int], NDArray[np.intp]]


def rank(candidates: Candidates, num_prompt_tokens: int, weights: Weights, turn: int) -> NDArray[np.intp]:
    """Cache-aware placement: the candidates' indices, cheapest first. A copy that the fleet wants counts as if it were
    there. Replicas of equal cost take turns: `turn` is any number that grows by one with each request."""
    cached = np.minimum(candidates["cached_tokens"] + candidates["wanted_tokens"], num_prompt_tokens)
    cost = cost_s(candidates, cached, num_prompt_tokens, weights)
    if weights.spread:
        cost *= 1 + weights.spread * _uniform(turn, len(cost))
    return _order(cost, turn)


def least_load(candidates: Candidates, num_prompt_tokens: int, weights: Weights, turn: int) -> NDArray[np.intp]:
    """Least cost first, as if nothing were cached anywhere."""
    return _order(cost_s(candidates, np.zeros(len(candidates)), num_prompt_tokens, weights), turn)


def round_robin(candidates: Candidates, num_prompt_tokens: int, weights: Weights, turn: int) -> NDArray[np.intp]:
    """Each replica in its turn; ignores caches and load."""
    return _order(np.zeros(len(candidates)), turn)


def expected_output(candidates: Candidates) -> float:
    """The expected output tokens of the request. Of the fleet: how long an output will be does not depend on the
    replica. The means of two replicas differ by chance, and by more than what a cached prefix saves."""
    if not len(candidates):
        return 0.0
    return float(min(candidates["output_tokens"].mean(), candidates["output_limit"].min()))


def cost_s(candidates: Candidates, cached: Floats, num_prompt_tokens: int, weights: Weights) -> Floats:
    """The seconds that a request costs on each candidate, weighted, float64 [replicas]. `cached` [replicas]: tokens of
    the prompt that need no computing there.

    | cost | seconds |
    | --- | --- |
    | its own first token | the step that runs, the prompts that wait ahead, its own; decodes come first in each step |
    | room | until enough running requests have ended for its KV to fit in |
    | others that wait | its own computing for each |
    | later ones | its own computing w is work that a queue with V seconds of work has more. Arrivals at rate r to a replica that is busy for a part b of the time lose r w (V + w / 2) / (1 - b) by it: the value function of a queue with Poisson arrivals (Hyytiä, Penttinen, Aalto 2012, "Size- and state-aware dispatching problem with queue-specific job sizes") |
    | decodes | its own prompt stops those that run; then each of its own steps is as long as all decodes make it, and the others' are longer by its own |
    """  # noqa: E501
    c = {name: candidates[name] for name in CANDIDATE.names or ()}
    output_tokens = candidates["output_tokens"].mean() if len(candidates) else 0.0
    decoding_s = c["step_s"] + c["decode_s"] * c["running"] + c["context_s"] * c["context_tokens"]
    share = np.maximum(MIN_PROMPT_SHARE, 1 - decoding_s / c["full_s"])
    waiting_s = c["waiting_tokens"] * c["token_s"] + c["waiting_products"] * c["product_s"]
    missing = num_prompt_tokens - cached
    own_s = missing * (c["token_s"] + c["product_s"] * (cached + missing / 2))
    ahead_s, work_s = waiting_s / share, own_s / share
    running_s = np.where(c["running"] + c["waiting"] > 0, np.minimum(c["full_s"], decoding_s + waiting_s), 0.0)
    first_s = running_s / 2 + np.maximum(decoding_s + waiting_s + own_s, ahead_s + work_s)
    own_tokens = expected_output(candidates)
    context = num_prompt_tokens + own_tokens / 2
    generation_s = own_tokens * decoding_s
    over = np.maximum(0.0, c["context_tokens"] + c["waiting_tokens"] + context - c["kv_tokens"])
    room_s = np.where(c["kv_tokens"] > 0, over / np.maximum(1.0, c["context_tokens"]) * output_tokens * decoding_s, 0.0)
    busy = np.minimum(MAX_BUSY_SHARE, c["tokens_s"] * c["token_s"] / share)
    later_s = c["requests_s"] / (1 - busy) * work_s * (ahead_s + work_s / 2)
    slower_s = own_tokens * (c["decode_s"] + c["context_s"] * context) * (1 + c["running"])
    return (
        first_s
        + room_s
        + weights.others * work_s * c["waiting"]
        + weights.later * later_s
        + weights.decode * (own_s * c["running"] + generation_s + slower_s)
    )


def _uniform(turn: int, count: int) -> Floats:
    """Numbers from 0 to 1 for each of `count` replicas, other ones in each turn: multiples of irrational numbers,
    modulo 1 (Weyl 1916)."""
    return (turn % 2**20 * math.sqrt(2) + np.arange(count) * (1 + math.sqrt(5)) / 2) % 1


def _order(cost: Floats, turn: int) -> NDArray[np.intp]:
    """Indices by ascending cost; equal ones in their order from `turn` on."""
    order = (np.arange(len(cost)) + turn) % max(1, len(cost))
    return order[np.argsort(cost[order], kind="stable")]
