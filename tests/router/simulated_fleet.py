"""A fleet in simulated time. Placement is the project's; replicas cost what an 8B model does on one H200: prefill first
come first served in steps of so many tokens beside all decodes, which read their context, and a cache of whole segments
of prompts that forgets the least recently used. The router hears of a load at the end of every step."""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from router.fleet import RECENT_REQUESTS, WEIGHTS
from router.placement import Candidate, Placement, Weights

WEIGHTS_S = 4.1e-3  # a step reads them
PREFILL_S = 1 / 42_000  # a token
CONTEXT_S = 131_072 / 4.3e12  # a token: its KV by the memory's bandwidth
STEP_TOKENS = 8192
SLOTS = 256


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt is segments (name, tokens): equal names in equal places are a shared prefix."""

    at_s: float
    segments: tuple[tuple[object, int], ...]
    output_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for _, tokens in self.segments)


def shared_prefixes(
    rate_s: float, duration_s: float, num_prefixes: int, prefix_tokens: int, own_tokens: int
) -> list[Request]:
    """Poisson arrivals. Prefixes by Zipf's law, outputs of 200 tokens in the mean."""
    rng = random.Random(1)
    shares = list(accumulate(1 / (place + 1) for place in range(num_prefixes)))
    requests: list[Request] = []
    at_s = rng.expovariate(rate_s)
    while at_s < duration_s:
        (prefix,) = rng.choices(range(num_prefixes), cum_weights=shares)
        segments = ((prefix, prefix_tokens), (f"own {len(requests)}", own_tokens))
        requests.append(Request(at_s, segments, 1 + int(rng.expovariate(1 / 200))))
        at_s += rng.expovariate(rate_s)
    return requests


def conversations(sessions: int, rate_s: float) -> list[Request]:
    """Sessions begin at random with one of four system prompts, the first of which two thirds use; each turn's prompt
    is the last one's, its answer and a question more, some seconds later."""
    rng = random.Random(7)
    requests, at_s = [], 0.0
    for session in range(sessions):
        at_s += rng.expovariate(rate_s)
        system = rng.choices(range(4), [8, 2, 1, 1])[0]
        segments: list[tuple[object, int]] = [(system, 2048)]
        turn_s = at_s
        for turn in range(rng.randint(1, 7)):
            segments.append(((session, turn), rng.randint(1024, 12_000)))
            requests.append(Request(turn_s, tuple(segments), rng.randint(16, 256)))
            turn_s += rng.uniform(5.0, 30.0)
    return sorted(requests, key=lambda request: request.at_s)


@dataclass(frozen=True)
class Served:
    """What came of a load. `hit_rate`: prompt tokens that were cached. `computed`: prompt tokens that were not, the
    most that a replica had by the mean. Of requests after the first third: time to first token, and from token to
    token, in seconds."""

    hit_rate: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    replicas_used: int
    computed: float


class Replica:
    """One replica. `read_once`: a prefix that decodes share is read once for all of them in a step."""

    def __init__(self, name: str, cache_tokens: int, read_once: bool) -> None:
        self.name = name
        self.recent_tokens = 0.0
        self.computed_tokens = 0
        self.requests: list[Request] = []
        self.first_token_s: dict[Request, float] = {}
        self.last_token_s: dict[Request, float] = {}
        self._cache: OrderedDict[object, int] = OrderedDict()
        self._cache_tokens = cache_tokens
        self._cached = 0
        self._read_once = read_once
        self._waiting: deque[list] = deque()  # [request, tokens still to be computed]
        self._waiting_tokens = 0
        self._decoding: list[tuple[int, int, Request]] = []  # a heap by the step of the last token
        self._prefixes: Counter[object] = Counter()  # of those
        self._context = self._read = 0  # tokens of those: held, and read by a step
        self._steps = 0
        self._step_ends_s: float | None = None
        self._step: tuple[int, list[Request]] = (0, [])  # prompt tokens in it, and whose last ones

    def cached_tokens(self, request: Request) -> int:
        cached = 0
        for name, tokens in request.segments:
            if name not in self._cache:
                return cached
            cached += tokens
        return cached

    def candidate(self, request: Request) -> Candidate:
        return Candidate(
            self.name,
            self.cached_tokens(request),
            self._waiting_tokens,
            self._context,
            len(self._decoding),
            len(self._waiting),
            self.recent_tokens,
        )

    def take(self, request: Request) -> int:
        """Returns how many tokens of the prompt were cached. The rest counts as cached from now on: whoever comes next
        waits for it."""
        cached = self.cached_tokens(request)
        missing = request.prompt_tokens - cached
        for name, tokens in reversed(request.segments):
            self._cached += tokens if name not in self._cache else 0
            self._cache[name] = tokens
            self._cache.move_to_end(name)
        while self._cached > self._cache_tokens:
            self._cached -= self._cache.popitem(last=False)[1]
        self.requests.append(request)
        self.recent_tokens += missing
        self.computed_tokens += missing
        self._waiting.append([request, missing])
        self._waiting_tokens += missing
        if self._step_ends_s is None:
            self._begin(request.at_s)
        return cached

    def advance(self, until_s: float) -> None:
        while self._step_ends_s is not None and self._step_ends_s <= until_s:
            self._end(self._step_ends_s)

    def _begin(self, now_s: float) -> None:
        left, slots, last = STEP_TOKENS - len(self._decoding), SLOTS - len(self._decoding), []
        while self._waiting and left > 0 and slots > len(last):
            first = self._waiting[0]
            chunk = min(left, first[1])
            first[1] -= chunk
            left -= chunk
            if not first[1]:
                last.append(self._waiting.popleft()[0])
        prompt_tokens = STEP_TOKENS - len(self._decoding) - left
        self._step, self._step_ends_s = (prompt_tokens, last), None
        if self._decoding or prompt_tokens:
            self._step_ends_s = now_s + WEIGHTS_S + prompt_tokens * PREFILL_S + self._read * CONTEXT_S

    def _end(self, now_s: float) -> None:
        prompt_tokens, last = self._step
        self._steps += 1
        self._waiting_tokens -= prompt_tokens
        self._context += len(self._decoding)
        self._read += len(self._decoding)
        while self._decoding and self._decoding[0][0] <= self._steps:
            request = heappop(self._decoding)[2]
            self.last_token_s[request] = now_s
            self._count(request, request.output_tokens, -1)
        for request in last:
            self.first_token_s[request] = now_s
            self._count(request, 0, 1)
            heappush(self._decoding, (self._steps + request.output_tokens, len(self.first_token_s), request))
        self._begin(now_s)

    def _count(self, request: Request, outputs: int, sign: int) -> None:
        """A request that decodes now, or no more."""
        prefix, tokens = request.segments[0]
        context = request.prompt_tokens + outputs
        others = self._prefixes[prefix] - (sign < 0)
        self._prefixes[prefix] += sign
        self._context += sign * context
        self._read += sign * (context - (tokens if self._read_once and others else 0))


def simulate(
    place: Placement,
    requests: Sequence[Request],
    num_replicas: int,
    weights: Weights = WEIGHTS,
    cache_tokens: int = 800_000,
    read_once: bool = False,
) -> Served:
    """Serves all of them, on replicas that are empty at first."""
    replicas = {name: Replica(name, cache_tokens, read_once) for name in map(str, range(num_replicas))}
    cached = 0
    for turn, request in enumerate(requests):
        for replica in replicas.values():
            replica.advance(request.at_s)
        candidates = [replica.candidate(request) for replica in replicas.values()]
        chosen = replicas[place(candidates, request.prompt_tokens, weights, turn)[0]]
        for replica in replicas.values():
            replica.recent_tokens *= 1 - 1 / RECENT_REQUESTS
        cached += chosen.take(request)
    for replica in replicas.values():
        replica.advance(float("inf"))
    begin_s = requests[len(requests) // 3].at_s
    measured = [(r, replica) for replica in replicas.values() for r in replica.requests if r.at_s >= begin_s]
    ttft_s = sorted(replica.first_token_s[r] - r.at_s for r, replica in measured)
    tpot_s = [(replica.last_token_s[r] - replica.first_token_s[r]) / r.output_tokens for r, replica in measured]
    computed = [replica.computed_tokens for replica in replicas.values()]
    return Served(
        hit_rate=cached / sum(request.prompt_tokens for request in requests),
        ttft_mean_s=sum(ttft_s) / len(ttft_s),
        ttft_p99_s=ttft_s[len(ttft_s) * 99 // 100],
        tpot_mean_s=sum(tpot_s) / len(tpot_s),
        replicas_used=sum(bool(replica.requests) for replica in replicas.values()),
        computed=max(computed) * num_replicas / sum(computed),
    )
