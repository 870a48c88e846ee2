"""Fairness between clients: virtual token counters.

Each client has a counter of the tokens that it was served. The client with the least counter is next, so clients that
have requests get equal service, by weight, however many requests they send (Sheng et al. 2024, "Fairness in Serving
Large Language Models", arXiv 2401.00588). Nothing is held back: without others a client gets everything.

The counters form a tree: tenants first, by weight, then the users of a tenant, who divide its share equally.

- A prompt is charged when it starts, without what is cached: a client whose prompts share prefixes gets more of them
  (as in Cao et al. 2025, "Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312). Output tokens are charged
  as they are made, each as much as `OUTPUT_TOKENS` of a prompt.
- A tenant that comes back is lifted to the least counter of those that wait, less `CREDIT`: of the service that it did
  not ask for, only this much is saved up. A tenant that asks for less than its share so goes first for a while when it
  sends several requests at once. The same holds for service that a waiting tenant could not take: no
  tenant falls further behind one that starts.
- Users save nothing up, since a tenant may name as many as it likes: a name that comes, new or known, begins at the
  least counter of the tenant's users that wait.
- A counter that is forgotten does not come back lower (`_Sharers`), and a tenant's names push out no other tenant's.
- Outputs are charged late, and those of long sequences very late: a client could take all slots before it has been
  charged for them. So the tokens that running sequences are expected to make count as served in the order (`expect`).
- A tenant that stays far behind the others even after its requests has the step for itself: no prompts of others
  lengthen the step that brings its first token.
- Which of a client's own requests goes first is not decided here, nor between priorities.

Each replica is fair by itself, over the requests of all routers. So the counters are exact without any exchange, and a
client's share holds on whichever replica its prefixes are.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from typing import Generic, TypeVar

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
MOST_IDLE = 1024  # tenants without requests whose counters are kept
MOST_IDLE_USERS = 128  # the same of each tenant's users


class Member:
    """A client among those that divide a share, by `weight`. `index`: its place in the arrays of `FairShare`.
    `waiting`: its sequences in the queue. `sequences`: all of its sequences. `started_s`: when one of them started
    last."""

    __slots__ = ("index", "name", "sequences", "started_s", "waiting", "weight")

    def __init__(self, name: str, index: int) -> None:
        self.name = name
        self.index = index
        self.weight = 1.0
        self.started_s = -math.inf
        self.waiting = self.sequences = 0


M = TypeVar("M", bound=Member)


class Tenant(Member):
    """A client of the server. `users`: those that it names."""

    __slots__ = ("users",)

    def __init__(self, name: str, index: int, nodes: "_Counters") -> None:
        super().__init__(name, index)
        self.users = _Sharers[ClientShare](nodes, 0.0, MOST_IDLE_USERS)


class ClientShare(Member):
    """A client as fairness sees it: a tenant's user."""

    __slots__ = ("tenant",)

    def __init__(self, name: str, index: int, tenant: Tenant) -> None:
        super().__init__(name, index)
        self.tenant = tenant


class _Counters:
    """The counters of tenants and users, in one array, so that a step's tokens are charged in a few operations.

    - `values`: served tokens; of tenants, divided by the weight.
    - `to_come`: the same for what running sequences are expected to make.
    - `prices`: of a token, for tenants.
    - `parents`: the tenant's index, for users.
    """

    def __init__(self) -> None:
        self.values, self.to_come = np.zeros(8), np.zeros(8)
        self.prices, self.parents = np.ones(8), np.zeros(8, dtype=np.int64)
        self._free = list(range(7, -1, -1))

    @property
    def num_used(self) -> int:
        return len(self.values) - len(self._free)

    def take(self, value: float, parent: int = 0) -> int:
        """Returns the index of a new counter."""
        if not self._free:
            size = len(self.values)
            self._free = list(range(2 * size - 1, size - 1, -1))
            for name in ("values", "to_come", "prices", "parents"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        index = self._free.pop()
        self.values[index], self.to_come[index] = value, 0.0
        self.prices[index], self.parents[index] = 1.0, parent
        return index

    def give_back(self, index: int) -> None:
        self._free.append(index)


class _Sharers(Generic[M]):
    """The members that divide a share between them: the tenants of a replica, or the users of a tenant.

    Of the members without sequences, `most_idle` are kept at least and twice as many at most. Those with the least
    counters are forgotten, since a member that comes back is lifted anyway. New members begin with the most that was
    forgotten, so no name is worth changing for another one.
    """

    def __init__(self, counters: _Counters, credit: float, most_idle: int) -> None:
        """`credit`: of the service that a member did not ask for, what it saves up."""
        self.members: dict[str, M] = {}
        self.beginning = 0.0  # counter of a new member
        self._counters, self._credit, self._most_idle = counters, credit, most_idle
        self._idle: dict[M, None] = {}
        self._waiting: dict[M, None] = {}
        self._last = 0.0  # counter of the member that left the queue last

    def __len__(self) -> int:
        """Number of known members."""
        return len(self.members)

    def wakes(self, member: M) -> None:
        """Called before the first sequence of a member that had none."""
        self._idle.pop(member, None)

    def rests(self, member: M) -> list[M]:
        """Called after the last sequence of a member. Returns the members that are forgotten."""
        self._idle[member] = None
        if len(self._idle) <= 2 * self._most_idle:
            return []
        values = self._counters.values
        forgotten = sorted(self._idle, key=lambda idle: float(values[idle.index]))[: self._most_idle]
        self.beginning = max(self.beginning, float(values[forgotten[-1].index]))
        for idle in forgotten:
            del self._idle[idle], self.members[idle.name]
        return forgotten

    def joins(self, member: M) -> None:
        """Called when a member without sequences in the queue gets one there."""
        values = self._counters.values
        least = min((float(values[other.index]) for other in self._waiting), default=self._last)
        values[member.index] = max(float(values[member.index]), least - self._credit)
        self._waiting[member] = None

    def active(self) -> list[M]:
        """The members that have sequences."""
        return [member for member in self.members.values() if member.sequences]

    def most(self) -> float:
        """The greatest counter of those that have sequences, with what is to come."""
        indices = [member.index for member in self.members.values() if member.sequences]
        return float((self._counters.values[indices] + self._counters.to_come[indices]).max())

    def first(self, count: int) -> list[M]:
        """The `count` members with the least counters, with what is to come, of those that have sequences in the
        queue."""
        values, to_come = self._counters.values, self._counters.to_come
        return nsmallest(count, self._waiting, key=lambda member: float(values[member.index] + to_come[member.index]))

    def leaves(self, member: M) -> None:
        """Called when a member's last sequence has left the queue."""
        del self._waiting[member]
        self._last = float(self._counters.values[member.index])

    def keep_up(self, member: M) -> None:
        """Lifts those that wait far behind a member that is about to be charged for a start."""
        if len(self._waiting) > 1 or (self._waiting and member not in self._waiting):
            values = self._counters.values
            least = float(values[member.index]) - CREDIT
            behind = [other.index for other in self._waiting if values[other.index] < least]
            if behind:
                values[behind] = least


class FairShare:
    """The counters of all clients of a replica."""

    def __init__(self) -> None:
        self._counters = _Counters()
        self._tenants = _Sharers[Tenant](self._counters, CREDIT, MOST_IDLE)
        self._num_active = 0
        self.counts = False  # whether service is counted: clients have names

    @property
    def is_contended(self) -> bool:
        """Whether more than one client has sequences."""
        return self._num_active > 1

    @property
    def num_known(self) -> int:
        """Number of counters."""
        return self._counters.num_used

    def counter(self, member: Member) -> float:
        """The counter of a client, in prompt tokens: of a user within its tenant's share, of a tenant by weight."""
        return float(self._counters.values[member.index])

    def turn(self, member: Member) -> float:
        """The counter of a client with what its running sequences are expected to make: the least is next."""
        return float(self._counters.values[member.index] + self._counters.to_come[member.index])

    def turns_at(self, indices: np.ndarray) -> np.ndarray:
        """The same for members by their `index`, float64."""
        return self._counters.values[indices] + self._counters.to_come[indices]

    def tenants_of(self, clients: np.ndarray) -> np.ndarray:
        """`Tenant.index` for each `ClientShare.index` of `clients`, int64."""
        return self._counters.parents[clients]

    def active_tenants(self) -> list[Tenant]:
        """The tenants that have sequences."""
        return self._tenants.active()

    def next_clients(self, count: int) -> list[ClientShare]:
        """The users that are next, of the `count` tenants with the least counters that have sequences in the queue."""
        return [tenant.users.first(1)[0] for tenant in self._tenants.first(count)]

    # ------------------------------------------------------------ sequences come and go

    def open(self, tenant: str, user: str, weight: float) -> ClientShare:
        """The share of a new sequence. The users of a tenant divide the tenant's `weight`."""
        self.counts = self.counts or (tenant, user) != ANYBODY
        tenants = self._tenants
        of_tenant = tenants.members.get(tenant)
        if of_tenant is None:
            of_tenant = Tenant(tenant, self._counters.take(tenants.beginning), self._counters)
            tenants.members[tenant] = of_tenant
        of_tenant.weight = weight
        self._counters.prices[of_tenant.index] = 1 / weight
        users = of_tenant.users
        share = users.members.get(user)
        if share is None:
            share = ClientShare(user, self._counters.take(users.beginning, of_tenant.index), of_tenant)
            users.members[user] = share
        if not of_tenant.sequences:
            tenants.wakes(of_tenant)
        if not share.sequences:
            self._num_active += 1
            users.wakes(share)
        of_tenant.sequences += 1
        share.sequences += 1
        return share

    def close(self, share: ClientShare) -> None:
        """A sequence has ended."""
        tenant = share.tenant
        share.sequences -= 1
        tenant.sequences -= 1
        if not share.sequences:
            self._num_active -= 1
            for user in tenant.users.rests(share):
                self._counters.give_back(user.index)
        if not tenant.sequences:
            for forgotten in self._tenants.rests(tenant):
                for member in (forgotten, *forgotten.users.members.values()):
                    self._counters.give_back(member.index)

    def enqueue(self, share: ClientShare) -> None:
        """A sequence joins the queue."""
        tenant = share.tenant
        if not tenant.waiting:
            self._tenants.joins(tenant)
        if not share.waiting:
            tenant.users.joins(share)
        tenant.waiting += 1
        share.waiting += 1

    def dequeue(self, share: ClientShare) -> None:
        """A sequence leaves the queue."""
        tenant = share.tenant
        tenant.waiting -= 1
        share.waiting -= 1
        if not share.waiting:
            tenant.users.leaves(share)
        if not tenant.waiting:
            self._tenants.leaves(tenant)

    # ------------------------------------------------------------ service

    def is_behind(self, share: ClientShare) -> bool:
        """Whether another tenant, or another user of its tenant, is ahead by more than a client saves up."""
        tenant = share.tenant
        return self._tenants.most() > self.turn(tenant) + CREDIT or (
            len(tenant.users) > 1 and tenant.users.most() > self.turn(share) + CREDIT
        )

    def starts(self, share: ClientShare, now_s: float) -> None:
        """A sequence is about to leave the queue for a slot. Those that wait though their counters are less may have
        no room now; they do not save up what others get meanwhile."""
        share.started_s = share.tenant.started_s = now_s
        if self.counts and self._num_active > 1:
            self._tenants.keep_up(share.tenant)
            share.tenant.users.keep_up(share)

    def charge(self, share: ClientShare, prompt_tokens: int) -> None:
        """Counts prompt tokens that are to be computed."""
        if self.counts:
            counters, tenant = self._counters, share.tenant.index
            counters.values[share.index] += prompt_tokens
            counters.values[tenant] += prompt_tokens * counters.prices[tenant]

    def charge_outputs(self, indices: np.ndarray) -> None:
        """Counts output tokens. `indices`: int64 [n], `ClientShare.index` for each of them."""
        if self.counts:
            counters = self._counters
            tenants = counters.parents[indices]
            np.add.at(counters.values, indices, OUTPUT_TOKENS)
            np.add.at(counters.values, tenants, OUTPUT_TOKENS * counters.prices[tenants])

    def expect(self, clients: np.ndarray, tokens: np.ndarray) -> None:
        """Sets what the running sequences are expected to make. `clients`: int64 [n], their `ClientShare.index`;
        `tokens` [n]."""
        counters, tokens = self._counters, OUTPUT_TOKENS * tokens
        size = len(counters.values)
        of_tenants = np.bincount(counters.parents[clients], tokens, minlength=size)
        counters.to_come = np.bincount(clients, tokens, minlength=size) + of_tenants * counters.prices

    def order(
        self,
        queues: Iterable[tuple[ClientShare, Iterator[T]]],
        rank: Callable[[T], tuple[int, ...]],
        tokens_of: Callable[[T], float],
        is_served: Callable[[T], bool],
    ) -> Iterator[T]:
        """The members of all `queues`, one for each client, in the order in which they should be served: by `rank`,
        ascending, then by the counters of the tenants, then by those of their users, as if each were charged its
        `tokens_of` in its turn. Members of a queue keep their order, and their ranks must ascend. Ends early after
        the last member of a tenant that is far behind if the caller has served that member (`is_served`)."""
        of_tenant: dict[Tenant, list[tuple[tuple[int, ...], float, int, int, T, Iterator[T]]]] = {}
        for number, (share, queue) in enumerate(queues):
            for first in queue:
                # Of equal counters, that of a client that has just come: it has fewer sequences.
                head = rank(first), self.turn(share), share.sequences, number, first, queue
                of_tenant.setdefault(share.tenant, []).append(head)
                break
        turns = []
        for tenant, heads in of_tenant.items():
            heapify(heads)
            turns.append((heads[0][0], self.turn(tenant), tenant.sequences, heads[0][3], tenant, heads))
        heapify(turns)
        while turns:
            _, counter, sequences, place, tenant, heads = turns[0]
            _, own, num_own, number, member, queue = heappop(heads)
            yield member
            tokens = tokens_of(member)
            for following in queue:
                heappush(heads, (rank(following), own + tokens, num_own, number, following, queue))
                break
            counter += tokens / tenant.weight
            if heads:
                heapreplace(turns, (heads[0][0], counter, sequences, place, tenant, heads))
                continue
            heappop(turns)
            if turns and is_served(member):
                # Of what was promised, this does not count: it takes no part of this step.
                ahead = turns[0][1] - self._to_come(turns[0][4]) - (counter - self._to_come(tenant))
                if ahead > FAR_BEHIND:
                    return

    def _to_come(self, member: Member) -> float:
        return float(self._counters.to_come[member.index])
