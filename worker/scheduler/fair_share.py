"""Fairness between clients: virtual token counters.

Each client has a counter of the tokens that it was served. The client with the least counter is next, so clients that
have requests get equal service, by weight, however many requests they send (Sheng et al. 2024, "Fairness in Serving
Large Language Models", arXiv 2401.00588). Nothing is held back: without others a client gets everything.

The counters form a tree: tenants first, by weight, then the users of a tenant, who divide its share equally.

- A prompt is charged when it starts, without what is cached: a client whose prompts share prefixes gets more of them
  (as in Cao et al. 2025, "Locality-aware Fair Scheduling in LLM Serving", arXiv 2501.14312). Output tokens are charged
  as they are made, each as much as `OUTPUT_TOKENS` of a prompt.
- A tenant that comes back is lifted to the least counter of those that wait, less a credit (`CREDIT_S`): of the service
  that it did not ask for, only this much is saved up. A tenant that asks for less than its share so goes first for a
  while when it sends several requests at once. The same holds for service that a waiting tenant could not take: no
  tenant falls further behind one that starts.
- Users save nothing up, since a tenant may name as many as it likes: a name that comes, new or known, begins at the
  least counter of the tenant's users that wait.
- A counter that is forgotten does not come back lower (`_Sharers`), and a tenant's names push out no other tenant's.
- Outputs are charged late, and those of long sequences very late: a client could take all slots before it has been
  charged for them. So the tokens that running sequences are expected to make count as served in the order (`expect`).
- A tenant that was served far less than its share lately is quiet, and goes before those that are not. It asks for so
  little that the others hardly wait for it, and so it does not wait until their credit is used up.
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

from worker.scheduler.service_speed import WINDOW_S, ServiceSpeed

T = TypeVar("T")

# The weight of an output token against that of a prompt token, as in the paper on virtual token counters.
OUTPUT_TOKENS = 2.0
# Seconds of service, at the speed of the replica, that a client may save up, and the prompt tokens that these are at
# most. The tokens were tuned with an 8B model on an H200, where they are 0.4 s of prompts alone and 1 s of all service:
# with none, the mean TTFT of a quiet client alongside one that sends 10 times as many requests is 1.6 times as long in
# `shoal bench fleet --fair`, at 1.1 of the capacity; with twice as many tokens it is the same within 2%.
# As tokens alone, they were half a minute of a small model on a core.
CREDIT_S, CREDIT_TOKENS = 1.0, 16_384.0
# A client that is this far behind the next one has steps for itself. Without such steps, the mean TTFT of the quiet
# client is 13% longer at 1.1 of the capacity.
FAR_BEHIND_S, FAR_BEHIND_TOKENS = 0.25, 4096.0
# A tenant is quiet if it was served no more than this part of its share of what all were served lately: in about as
# many seconds. Tuned in virtual time at 17,000 and at 480 tokens of service a second (`tests/worker/scheduler/
# test_bystander.py`).
QUIET_SHARE, LATELY_S = 0.5, 1.5
# Service of a request that goes first, at most: long ones take their turns by the counters.
SHORT_TOKENS = 1024.0
# So long after a quiet tenant's last start, steps take no longer than `STEP_S` for prompts: the next request of such a
# client waits for the rest of a step that was made before.
QUIET_STAYS_S, STEP_S, MIN_STEP_TOKENS = 2.0, 0.03, 128
ANYBODY = ("", "")  # all clients of an open server
MAX_IDLE_TENANTS = 1024  # tenants without requests whose counters are kept
MAX_IDLE_USERS = 128  # the same of each tenant's users


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
        self.users = _Sharers[ClientShare](nodes, MAX_IDLE_USERS, saves_up=False)


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
    - `lately`: of tenants, what was served in the last `LATELY_S`; older service fades.
    - `prices`: of a token, for tenants.
    - `parents`: the tenant's index, for users.
    """

    def __init__(self) -> None:
        self.values, self.to_come, self.lately = np.zeros(8), np.zeros(8), np.zeros(8)
        self.prices, self.parents = np.ones(8), np.zeros(8, dtype=np.int64)
        self._free = list(range(7, -1, -1))
        self.credit = CREDIT_TOKENS  # that a tenant saves up

    @property
    def num_used(self) -> int:
        return len(self.values) - len(self._free)

    def take(self, value: float, parent: int = 0) -> int:
        """Returns the index of a new counter."""
        if not self._free:
            size = len(self.values)
            self._free = list(range(2 * size - 1, size - 1, -1))
            for name in ("values", "to_come", "lately", "prices", "parents"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        index = self._free.pop()
        self.values[index], self.to_come[index], self.lately[index] = value, 0.0, 0.0
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

    def __init__(self, counters: _Counters, most_idle: int, *, saves_up: bool) -> None:
        """`saves_up`: whether members save up service that they did not ask for."""
        self.members: dict[str, M] = {}
        self.beginning = 0.0  # counter of a new member
        self._counters, self._saves_up, self._most_idle = counters, saves_up, most_idle
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
        credit = self._counters.credit if self._saves_up else 0.0
        values[member.index] = max(float(values[member.index]), least - credit)
        self._waiting[member] = None

    def active(self) -> list[M]:
        """The members that have sequences."""
        return [member for member in self.members.values() if member.sequences]

    def most(self) -> float:
        """The greatest counter of those that have sequences, with what is to come."""
        indices = [member.index for member in self.members.values() if member.sequences]
        return float((self._counters.values[indices] + self._counters.to_come[indices]).max())

    def first(self, count: int, is_quiet: Callable[[M], bool] = lambda member: False) -> list[M]:
        """The `count` members with the least counters, with what is to come, of those that have sequences in the
        queue; the quiet ones first."""
        values, to_come = self._counters.values, self._counters.to_come

        def turn(member: M) -> tuple[bool, float]:
            return not is_quiet(member), float(values[member.index] + to_come[member.index])

        return nsmallest(count, self._waiting, key=turn)

    def leaves(self, member: M) -> None:
        """Called when a member's last sequence has left the queue."""
        del self._waiting[member]
        self._last = float(self._counters.values[member.index])

    def keep_up(self, member: M) -> None:
        """Lifts those that wait far behind a member that is about to be charged for a start."""
        if len(self._waiting) > 1 or (self._waiting and member not in self._waiting):
            values = self._counters.values
            least = float(values[member.index]) - self._counters.credit
            behind = [other.index for other in self._waiting if values[other.index] < least]
            if behind:
                values[behind] = least


class FairShare:
    """The counters of all clients of a replica."""

    def __init__(self) -> None:
        self._counters = _Counters()
        self._tenants = _Sharers[Tenant](self._counters, MAX_IDLE_TENANTS, saves_up=True)
        self._num_active = 0
        self._weight = 0.0  # of all tenants that have sequences
        self._speed = ServiceSpeed()
        self._now_s = self._faded_s = 0.0  # of the step that is made; when `lately` faded last
        self._quiet_until_s = -math.inf
        self.counts = False  # whether service is counted: clients have names

    @property
    def is_contended(self) -> bool:
        """Whether more than one client has sequences."""
        return self._num_active > 1

    @property
    def num_known(self) -> int:
        """Number of counters."""
        return self._counters.num_used

    @property
    def credit(self) -> float:
        """Prompt tokens of service that a client may save up."""
        return self._counters.credit

    def most_prompt_tokens(self, least: int) -> int | None:
        """Prompt tokens of which a step should have no more, since a quiet client may send its next request meanwhile.
        None without such a client, and while the replica's speed is unknown. `least`: with fewer, prompts would cost
        much more."""
        if self._now_s > self._quiet_until_s or self._speed.tokens_s == math.inf:
            return None
        return max(MIN_STEP_TOKENS, least, int(STEP_S * self._speed.tokens_s))

    def is_quiet(self, member: Member) -> bool:
        """Whether a tenant was served far less than its share lately. Users are not quiet: a tenant may name as many
        as it likes."""
        if not self.is_contended or not isinstance(member, Tenant):
            return False
        return float(self._counters.lately[member.index]) <= self._quiet_tokens * member.weight

    @property
    def _quiet_tokens(self) -> float:
        """The most service of a quiet tenant lately, for a weight of 1."""
        return QUIET_SHARE * float(self._counters.lately.sum()) / self._weight

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
        return [tenant.users.first(1)[0] for tenant in self._tenants.first(count, self.is_quiet)]

    # ------------------------------------------------------------ sequences come and go

    def open(self, tenant: str, user: str, weight: float) -> ClientShare:
        """The share of a new sequence. The users of a tenant divide the tenant's `weight`."""
        self.counts = self.counts or (tenant, user) != ANYBODY
        tenants = self._tenants
        of_tenant = tenants.members.get(tenant)
        if of_tenant is None:
            of_tenant = Tenant(tenant, self._counters.take(tenants.beginning), self._counters)
            tenants.members[tenant] = of_tenant
        self._weight += (weight - of_tenant.weight) * (of_tenant.sequences > 0)
        of_tenant.weight = weight
        self._counters.prices[of_tenant.index] = 1 / weight
        users = of_tenant.users
        share = users.members.get(user)
        if share is None:
            share = ClientShare(user, self._counters.take(users.beginning, of_tenant.index), of_tenant)
            users.members[user] = share
        if not of_tenant.sequences:
            self._weight += weight
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
            self._weight -= tenant.weight
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

    def passes(self, now_s: float) -> None:
        """Called before each step, with the time."""
        if not self.counts:
            return
        self._now_s = now_s
        self._speed.passes(now_s, self.is_contended)
        self._counters.credit = min(CREDIT_TOKENS, CREDIT_S * self._speed.tokens_s)
        if now_s - self._faded_s >= WINDOW_S:
            self._counters.lately *= math.exp((self._faded_s - now_s) / LATELY_S)
            self._faded_s = now_s

    def computes(self, share: ClientShare, prompt_tokens: int) -> None:
        """Counts prompt tokens that a step computes."""
        if self.counts:
            self._counters.lately[share.tenant.index] += prompt_tokens
            self._speed.served(prompt_tokens)

    def is_behind(self, share: ClientShare) -> bool:
        """Whether another tenant, or another user of its tenant, is ahead by more than a client saves up."""
        tenant = share.tenant
        credit = self.credit
        return self._tenants.most() > self.turn(tenant) + credit or (
            len(tenant.users) > 1 and tenant.users.most() > self.turn(share) + credit
        )

    def starts(self, share: ClientShare, now_s: float) -> None:
        """A sequence is about to leave the queue for a slot. Those that wait though their counters are less may have
        no room now; they do not save up what others get meanwhile."""
        share.started_s = share.tenant.started_s = now_s
        if self.is_quiet(share.tenant):
            self._quiet_until_s = now_s + QUIET_STAYS_S
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
            np.add.at(counters.lately, tenants, OUTPUT_TOKENS)
            self._speed.served(OUTPUT_TOKENS * len(indices))

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
        missing: Callable[[T], float] = lambda member: 0.0,
    ) -> Iterator[T]:
        """The members of all `queues`, one for each client, in the order in which they should be served: by `rank`,
        ascending, then those of quiet tenants, then by the counters of the tenants, then by those of their users, as if
        each were charged its `tokens_of` in its turn. Members of a queue keep their order, and their ranks must ascend.
        `missing`: tokens that a member still needs; one that needs many is not short, though it runs.
        Ends early after the last member of a tenant that is far behind if the caller has served that member
        (`is_served`)."""
        of_tenant: dict[Tenant, list[tuple[tuple[int, ...], float, int, int, T, Iterator[T]]]] = {}
        for number, (share, queue) in enumerate(queues):
            for first in queue:
                # Of equal counters, that of a client that has just come: it has fewer sequences.
                head = rank(first), self.turn(share), share.sequences, number, first, queue
                of_tenant.setdefault(share.tenant, []).append(head)
                break
        quiet = self._quiet_tokens
        lately = {tenant: float(self._counters.lately[tenant.index]) for tenant in of_tenant}

        def is_loud(tenant: Tenant, head: T) -> bool:
            """Whether a tenant is not quiet, or this member is not short, or more than its share of the same time."""
            most = quiet * tenant.weight
            tokens = max(tokens_of(head), missing(head))
            return lately[tenant] > most or tokens > SHORT_TOKENS or lately[tenant] + tokens > most / QUIET_SHARE

        turns = []
        for tenant, heads in of_tenant.items():
            heapify(heads)
            rank_of_first, _, _, number, first, _ = heads[0]
            key = rank_of_first, is_loud(tenant, first), self.turn(tenant), tenant.sequences, number
            turns.append((*key, tenant, heads))
        heapify(turns)
        far_behind = min(FAR_BEHIND_TOKENS, FAR_BEHIND_S * self._speed.tokens_s)
        while turns:
            _, _, counter, sequences, place, tenant, heads = turns[0]
            _, own, num_own, number, member, queue = heappop(heads)
            yield member
            tokens = tokens_of(member)
            for following in queue:
                heappush(heads, (rank(following), own + tokens, num_own, number, following, queue))
                break
            counter += tokens / tenant.weight
            lately[tenant] += tokens
            if heads:
                key = heads[0][0], is_loud(tenant, heads[0][4]), counter, sequences, place
                heapreplace(turns, (*key, tenant, heads))
                continue
            heappop(turns)
            if turns and is_served(member):
                # Of what was promised, this does not count: it takes no part of this step.
                ahead = turns[0][2] - self._to_come(turns[0][5]) - (counter - self._to_come(tenant))
                if ahead > far_behind:
                    return

    def _to_come(self, member: Member) -> float:
        return float(self._counters.to_come[member.index])
