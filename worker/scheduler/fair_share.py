"""Fairness between clients: virtual token counters.

Each client has a counter of the tokens that it was served. The client with the least counter is next, so clients that
have requests get equal service, by weight, however many requests they send (Sheng et al. 2024, "Fairness in Serving
Large Language Models", arXiv 2401.00588). Nothing is held back: without others a client gets everything.

- A prompt is charged when it starts, without what is cached: a client whose prompts share prefixes gets more of them
  (as in Cao et al. 2025, "Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312). Output tokens are charged
  as they are made, each as much as `OUTPUT_TOKENS` of a prompt.
- A client that comes back is lifted to the least counter of those that wait, less `CREDIT`: of the service that it did
  not ask for, only this much is saved up. A client that asks for less than its share so goes first for a while when it
  sends several requests at once.
- A client that stays far behind the others even after its requests has the step for itself: no prompts of others
  lengthen the step that brings its first token.
- Which of a client's own requests goes first is not decided here, nor between priorities.

Each replica is fair by itself, over the requests of all routers. So the counters are exact without any exchange, and a
client's share holds on whichever replica its prefixes are.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import TypeVar

import numpy as np

T = TypeVar("T")

# The weight of an output token against that of a prompt token, as in the paper on virtual token counters.
OUTPUT_TOKENS = 2.0
# Prompt tokens of service that a client may save up, about 0.4 s of an 8B model on an H200. With none, the mean TTFT of
# a quiet client alongside one that sends 10 times as many requests is 1.6 times as long in `shoal bench fleet --fair`,
# at 1.1 of the capacity; with twice as many tokens it is the same within 2%.
CREDIT = 16_384.0
# A client that is this many prompt tokens behind the next one, about 0.1 s, has steps for itself. Without such steps,
# the mean TTFT of the quiet client is 13% longer at 1.1 of the capacity.
FAR_BEHIND = 4096.0
ANYBODY = ("", "")  # all clients of an open server
MOST_IDLE = 1024  # clients without requests whose counters are kept


class ClientShare:
    """A client as fairness sees it. `index`: its place in the arrays of `FairShare`. `waiting`: its sequences in the
    queue. `sequences`: all of its sequences."""

    __slots__ = ("index", "key", "sequences", "tenant", "waiting", "weight")

    def __init__(self, key: tuple[str, str], index: int, tenant: int) -> None:
        self.key = key
        self.index = index
        self.tenant = tenant
        self.weight = 1.0
        self.waiting = self.sequences = 0


class FairShare:
    """The counters of all clients of a replica."""

    def __init__(self) -> None:
        self._shares: dict[tuple[str, str], ClientShare] = {}  # those without sequences in order of their ends
        self._num_active = 0
        self._waiting: dict[ClientShare, None] = {}  # clients that have sequences in the queue
        self._counters = np.zeros(8)
        self._prices = np.ones(8)  # of a token, without the number of users
        self._tenants = np.zeros(8, dtype=np.int64)  # the tenant of each client
        self._users = np.zeros(8)  # active clients of each tenant
        self._tenant_index: dict[str, int] = {}
        self._free = list(range(7, -1, -1))
        self._free_tenants = list(range(7, -1, -1))
        self._last = 0.0  # counter of the client that left the queue last

    @property
    def is_contended(self) -> bool:
        """Whether more than one client has sequences."""
        return self._num_active > 1

    @property
    def counts(self) -> bool:
        """Whether service is counted: clients have names, or another one is there."""
        return len(self._shares) > 1 or ANYBODY not in self._shares

    def counter(self, share: ClientShare) -> float:
        """The client's counter, in prompt tokens."""
        return float(self._counters[share.index])

    # ------------------------------------------------------------ sequences come and go

    def open(self, tenant: str, user: str, weight: float) -> ClientShare:
        """The share of a new sequence. The users of a tenant divide the tenant's `weight`."""
        key = (tenant, user)
        share = self._shares.get(key)
        if share is None:
            share = self._shares[key] = self._new(key)
        share.weight = weight
        self._prices[share.index] = 1 / weight
        if not share.sequences:
            self._num_active += 1
            self._users[share.tenant] += 1
        share.sequences += 1
        return share

    def close(self, share: ClientShare) -> None:
        """A sequence has ended."""
        share.sequences -= 1
        if share.sequences:
            return
        self._num_active -= 1
        self._users[share.tenant] -= 1
        self._shares[share.key] = self._shares.pop(share.key)  # the newest of those without sequences
        if len(self._shares) > self._num_active + MOST_IDLE:
            self._forget(next(share for share in self._shares.values() if not share.sequences))

    def enqueue(self, share: ClientShare) -> None:
        """A sequence joins the queue."""
        if not share.waiting:
            least = min((self._counters[other.index] for other in self._waiting), default=self._last)
            self._counters[share.index] = max(self._counters[share.index], least - CREDIT)
            self._waiting[share] = None
        share.waiting += 1

    def dequeue(self, share: ClientShare) -> None:
        """A sequence leaves the queue."""
        share.waiting -= 1
        if not share.waiting:
            del self._waiting[share]
            self._last = self.counter(share)

    # ------------------------------------------------------------ service

    def charge(self, share: ClientShare, prompt_tokens: int) -> None:
        """Counts prompt tokens that are to be computed."""
        if self.counts:
            self._counters[share.index] += self._cost(share, prompt_tokens)

    def charge_outputs(self, indices: np.ndarray) -> None:
        """Counts output tokens. `indices`: int64 [n], `ClientShare.index` for each of them."""
        if self.counts:
            prices = self._prices[indices] * self._users[self._tenants[indices]]
            np.add.at(self._counters, indices, OUTPUT_TOKENS * prices)

    def order(
        self,
        queues: Iterable[tuple[ClientShare, Iterator[T]]],
        rank: Callable[[T], tuple[int, ...]],
        prompt_tokens: Callable[[T], int],
        is_served: Callable[[T], bool],
    ) -> Iterator[T]:
        """The members of all `queues`, one for each client, in the order in which they should be served: by `rank`,
        ascending, then by the counters, as if each were charged its `prompt_tokens` in its turn. Members of a queue
        keep their order, and their ranks must ascend. Ends early after the last member of a client that is far behind
        if the caller has served that member (`is_served`)."""
        heads: list[tuple[tuple[int, ...], float, int, int, T, ClientShare, Iterator[T]]] = []
        for number, (share, queue) in enumerate(queues):
            for first in queue:
                # Of equal counters, that of a client that has just come: it has fewer sequences.
                heads.append((rank(first), self.counter(share), share.sequences, number, first, share, queue))
                break
        heapify(heads)
        while heads:
            _, counter, sequences, number, member, share, queue = heappop(heads)
            yield member
            counter += self._cost(share, prompt_tokens(member))
            for following in queue:
                heappush(heads, (rank(following), counter, sequences, number, following, share, queue))
                break
            else:
                if heads and heads[0][1] - counter > FAR_BEHIND and is_served(member):
                    return

    def _cost(self, share: ClientShare, prompt_tokens: int) -> float:
        return prompt_tokens * float(self._users[share.tenant]) / share.weight

    # ------------------------------------------------------------ the arrays

    def _new(self, key: tuple[str, str]) -> ClientShare:
        tenant = self._tenant_index.get(key[0])
        if tenant is None:
            if not self._free_tenants:
                self._free_tenants = _grown(len(self._users))
                self._users = np.concatenate((self._users, np.zeros_like(self._users)))
            tenant = self._tenant_index[key[0]] = self._free_tenants.pop()
        if not self._free:
            self._free = _grown(len(self._counters))
            for name in ("_counters", "_prices", "_tenants"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        share = ClientShare(key, self._free.pop(), tenant)
        self._counters[share.index], self._tenants[share.index] = 0.0, tenant
        return share

    def _forget(self, share: ClientShare) -> None:
        del self._shares[share.key]
        self._free.append(share.index)
        tenant = share.key[0]
        if not any(key[0] == tenant for key in self._shares):
            self._free_tenants.append(self._tenant_index.pop(tenant))


def _grown(size: int) -> list[int]:
    return list(range(2 * size - 1, size - 1, -1))
