"""Placement rules of other systems, written from their public descriptions, with their defaults.

| rule | system | description |
| --- | --- | --- |
| `FewestRequests` | any load balancer | the least requests in flight |
| `SglangApproximate` | SGLang's gateway, `cache_aware` | https://github.com/lightseekorg/smg, docs/concepts/routing/cache-aware.md: thresholds 0.3, 64, 1.5 |
| `SglangEvents` | SGLang's router, `cache_aware_zmq` | the two-tier example of NVIDIA Dynamo's documentation of selection policies, which repeats it: thresholds 0.5, 32, 1.1 |
| `Dynamo` | NVIDIA Dynamo 1.6; Ray's KVAwareRouter | https://docs.dynamo.nvidia.com, "Routing Concepts": prefill blocks less overlap credit, plus decode blocks |
| `LlmD` | llm-d | https://llm-d.ai/docs, "Request Scheduler": prefix 3, queue 2, KV utilisation 2, highest score |

All have the exact prefix index of the fleet and its delay, except the approximate one. Ties are broken at random.
"""  # noqa: E501

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.fleet.simulation import Placed
from bench.fleet.workloads import FleetRequest
from bench.load.workload import TokenSpan
from radix.index import PrefixIndex
from radix.node import pack
from worker.messages import CacheEvents, ReplicaLoad


class InFlightRule:
    """Base of all these rules: counts its own requests on each replica. As it is, the fewest requests win."""

    def __init__(self, num_replicas: int, page_size: int = 16, seed: int = 0) -> None:
        self.num_replicas, self.page_size = num_replicas, page_size
        self.requests = np.zeros(num_replicas)  # in flight
        self._random = np.random.default_rng(seed)
        self._replica: dict[int, int] = {}  # of requests in flight

    def place(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> Placed:
        replica = self.choose(request, tokens, now_s)
        self.requests[replica] += 1
        self._replica[request.number] = replica
        self.placed(request, replica, tokens, now_s)
        return Placed(replica)

    def choose(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> int:
        return self.any_of(self.requests == self.requests.min())

    def placed(self, request: FleetRequest, replica: int, tokens: np.ndarray, now_s: float) -> None:
        """The request was placed on the replica."""

    def any_of(self, chosen: np.ndarray) -> int:
        """The index of a random true entry. `chosen`: bool [replicas]."""
        return int(self._random.choice(np.flatnonzero(chosen)))

    def replica_of(self, request: FleetRequest) -> int:
        return self._replica[request.number]

    def apply_events(self, replica: int, events: CacheEvents) -> None:
        pass

    def apply_load(self, replica: int, load: ReplicaLoad) -> None:
        pass

    def news(self) -> Sequence[Any]:
        return ()

    def hear(self, news: Sequence[Any], now_s: float) -> None:
        pass

    def first_token(self, request: FleetRequest) -> None:
        pass

    def ended(self, request: FleetRequest) -> None:
        self.requests[self._replica.pop(request.number)] -= 1


class FewestRequests(InFlightRule):
    """The replica with the fewest requests of this router."""


class SglangApproximate(InFlightRule):
    """A tree of what was sent where, not of what is cached. While requests in flight differ by more than `ABSOLUTE` and
    by more than the factor `RELATIVE`: the fewest. Else the replica with the longest match if that is more than
    `THRESHOLD` of the prompt, or the one with the smallest tree. The tree is cut to `MAX_TOKENS` for a replica."""

    THRESHOLD, ABSOLUTE, RELATIVE = 0.3, 64, 1.5
    MAX_TOKENS = 1 << 24

    def __init__(self, num_replicas: int, page_size: int = 16, seed: int = 0) -> None:
        super().__init__(num_replicas, page_size, seed)
        self._sent: list[OrderedDict[tuple[TokenSpan, ...], int]] = [OrderedDict() for _ in range(num_replicas)]
        self._sizes = np.zeros(num_replicas)

    def choose(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> int:
        least, most = self.requests.min(), self.requests.max()
        if most - least > self.ABSOLUTE and most > self.RELATIVE * least:
            return self.any_of(self.requests == least)
        matches = np.array([self._match(request, sent) for sent in self._sent])
        if matches.max() > self.THRESHOLD * len(tokens):
            return self.any_of(matches == matches.max())
        return self.any_of(self._sizes == self._sizes.min())

    def placed(self, request: FleetRequest, replica: int, tokens: np.ndarray, now_s: float) -> None:
        sent = self._sent[replica]
        for end in range(len(request.spans), 0, -1):  # longest first, so that prefixes leave last
            key = request.spans[:end]
            if key not in sent:
                sent[key] = key[-1].tokens
                self._sizes[replica] += key[-1].tokens
            sent.move_to_end(key)
        while self._sizes[replica] > self.MAX_TOKENS:
            self._sizes[replica] -= sent.popitem(last=False)[1]

    @staticmethod
    def _match(request: FleetRequest, sent: OrderedDict[tuple[TokenSpan, ...], int]) -> int:
        matched = 0
        for end in range(1, len(request.spans) + 1):
            tokens = sent.get(request.spans[:end])
            if tokens is None:
                break
            matched += tokens
        return matched


class EventRule(InFlightRule):
    """A rule that knows what each replica has cached, from its events."""

    def __init__(self, num_replicas: int, page_size: int = 16, seed: int = 0) -> None:
        super().__init__(num_replicas, page_size, seed)
        self._index = PrefixIndex(page_size)
        self._caches = [self._index.add() for _ in range(num_replicas)]

    def apply_events(self, replica: int, events: CacheEvents) -> None:
        for event in events.events:
            self._caches[replica].apply(event)

    def cached_blocks(self, tokens: np.ndarray) -> np.ndarray:
        """Blocks of the prompt that each replica has cached, int [replicas]. A block is a page."""
        return self._index.match(pack(tokens))[: self.num_replicas].astype(np.intp) // self.page_size


class SglangEvents(EventRule):
    """While requests in flight differ by more than `ABSOLUTE` and the factor `RELATIVE`: the fewest. Else, if the
    longest match is more than `THRESHOLD` of the prompt's blocks, the fewest requests among the replicas that have it;
    or else among all."""

    THRESHOLD, ABSOLUTE, RELATIVE = 0.5, 32, 1.1

    def choose(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> int:
        least, most = self.requests.min(), self.requests.max()
        eligible = np.ones(self.num_replicas, dtype=bool)
        if not (most - least > self.ABSOLUTE and most > self.RELATIVE * least):
            blocks = self.cached_blocks(tokens)
            if blocks.max() > self.THRESHOLD * (len(tokens) // self.page_size):
                eligible = blocks == blocks.max()
        return self.any_of(eligible & (self.requests == self.requests[eligible].min()))


class Dynamo(EventRule):
    """The lowest prefill blocks, active ones and this prompt's, less its cached blocks, plus active decode blocks with
    this prompt's. Shared blocks of active requests count once."""

    def __init__(self, num_replicas: int, page_size: int = 16, seed: int = 0) -> None:
        super().__init__(num_replicas, page_size, seed)
        self._prefill_tokens = np.zeros(num_replicas)  # active
        self._prefilling: dict[int, int] = {}  # tokens of each request before its first token
        self._blocks: list[Counter[tuple[TokenSpan, ...]]] = [Counter() for _ in range(num_replicas)]
        self._decode_tokens = np.zeros(num_replicas)
        self._cached = np.zeros(num_replicas)

    def choose(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> int:
        self._cached = self.cached_blocks(tokens) * self.page_size
        new = np.array([self._new_tokens(request, blocks) for blocks in self._blocks])
        prefill = np.maximum(self._prefill_tokens + len(tokens) - self._cached, 0) / self.page_size
        cost = prefill + (self._decode_tokens + new) / self.page_size
        return self.any_of(cost == cost.min())

    def placed(self, request: FleetRequest, replica: int, tokens: np.ndarray, now_s: float) -> None:
        self._prefilling[request.number] = uncached = int(len(tokens) - self._cached[replica])
        self._prefill_tokens[replica] += uncached
        self._decode_tokens[replica] += self._new_tokens(request, self._blocks[replica])
        self._blocks[replica].update(_prefixes(request))

    def first_token(self, request: FleetRequest) -> None:
        self._prefill_tokens[self.replica_of(request)] -= self._prefilling.pop(request.number, 0)

    def ended(self, request: FleetRequest) -> None:
        replica = self.replica_of(request)
        blocks = self._blocks[replica]
        blocks.subtract(_prefixes(request))
        for prefix in _prefixes(request):
            if not blocks[prefix]:
                del blocks[prefix]
                self._decode_tokens[replica] -= prefix[-1].tokens
        super().ended(request)

    @staticmethod
    def _new_tokens(request: FleetRequest, blocks: Counter[tuple[TokenSpan, ...]]) -> int:
        """Tokens of the prompt that no active request shares."""
        return sum(prefix[-1].tokens for prefix in _prefixes(request) if prefix not in blocks)


class LlmD(EventRule):
    """The highest 3 x (cached part of the prompt) + 2 x (queue, 1 for the shortest and 0 for the longest) + 2 x (free
    part of the KV cache). Queue and KV utilisation are those that the replica told last. What was placed counts as
    cached for two seconds."""

    SPECULATIVE_S = 2.0

    def __init__(self, num_replicas: int, page_size: int = 16, seed: int = 0) -> None:
        super().__init__(num_replicas, page_size, seed)
        self._queued = np.zeros(num_replicas)
        self._used = np.zeros(num_replicas)
        self._placed: list[OrderedDict[tuple[TokenSpan, ...], float]] = [OrderedDict() for _ in range(num_replicas)]

    def choose(self, request: FleetRequest, tokens: np.ndarray, now_s: float) -> int:
        expected = np.array([self._expected(request, placed, now_s) for placed in self._placed])
        cached = np.maximum(self.cached_blocks(tokens) * self.page_size, expected) / len(tokens)
        spread = self._queued.max() - self._queued.min()
        queue = (self._queued.max() - self._queued) / spread if spread else np.ones(self.num_replicas)
        score = 3 * cached + 2 * queue + 2 * (1 - self._used)
        return self.any_of(score == score.max())

    def placed(self, request: FleetRequest, replica: int, tokens: np.ndarray, now_s: float) -> None:
        placed = self._placed[replica]
        for prefix in _prefixes(request):
            placed[prefix] = now_s + self.SPECULATIVE_S
            placed.move_to_end(prefix)

    def apply_load(self, replica: int, load: ReplicaLoad) -> None:
        self._queued[replica] = load.waiting
        self._used[replica] = load.kv_tokens_used / load.kv_tokens_total

    @staticmethod
    def _expected(request: FleetRequest, placed: OrderedDict[tuple[TokenSpan, ...], float], now_s: float) -> int:
        while placed and next(iter(placed.values())) < now_s:
            placed.popitem(last=False)
        expected = 0
        for prefix in _prefixes(request):
            if prefix not in placed:
                break
            expected += prefix[-1].tokens
        return expected


def _prefixes(request: FleetRequest) -> list[tuple[TokenSpan, ...]]:
    """The prompt's prefixes at the ends of spans, shortest first: what requests can share."""
    return [request.spans[:end] for end in range(1, len(request.spans) + 1)]


OTHER_RULES: dict[str, type[InFlightRule]] = {
    "fewest_requests": FewestRequests,
    "sglang_approximate": SglangApproximate,
    "sglang_events": SglangEvents,
    "dynamo": Dynamo,
    "llm_d": LlmD,
}
