"""Leases by owner, with an end: which paths of a tree are evicted last, for how long, how many pages at most, and how
clients share these."""

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from radix.node import NodeLease, PagedNode
from radix.tree import Tree


@dataclass(slots=True)
class _Owner:
    """`renewed_s`: when its leases were last renewed. `client`: whose it is."""

    renewed_s: float
    client: str
    grants: dict[str, "_Grant"] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Grant:
    """A lease of an owner. `serial` is that of its entry in the heap; 0 after its end."""

    owner_id: str
    owner: _Owner
    name: str
    lease: NodeLease
    seconds: float
    serial: int = 0

    @property
    def ends_s(self) -> float:
        return self.owner.renewed_s + self.seconds


class Leases:
    """The leases on one tree. Each has an owner and a name; an owner has at most one lease of a name.

    All leases of an owner are renewed whenever the owner asks for one, and last for their own number of seconds from
    then on. When more than `most_pages` would be leased, the client with the most of them gives some up: no
    client loses leases for one that has more. Of its owners, the one that has had leases for the shortest time gives
    its up, the latest first. Giving up the least recently renewed instead would keep nothing for programs that take
    turns and do not all fit: each would lose its lease just before its next turn.
    """

    def __init__(self, tree: Tree, most_pages: int) -> None:
        self._tree = tree
        self._most_pages = most_pages
        self._owners: dict[str, _Owner] = {}
        self._by_client: dict[str, dict[str, _Owner]] = {}  # the one that has had leases for the longest time first
        # (end, serial number, lease), soonest first. The end may be later by now: leases are renewed without the heap.
        self._ends: list[tuple[float, int, _Grant]] = []
        self._serials = itertools.count(1)
        self._num_grants = 0

    def __len__(self) -> int:
        """Number of leases."""
        return self._num_grants

    def renew(self, owner: str, now_s: float) -> None:
        """Renews all leases of an owner."""
        if owner in self._owners:
            self._owners[owner].renewed_s = now_s

    def grant(self, owner: str, name: str, node: PagedNode, seconds: float, now_s: float, client: str = "") -> None:
        """Leases the path to `node` for `seconds`, instead of what the owner had leased under this name. With 0
        seconds, that lease just ends. Renews the owner's other leases. `client`: whose owner it is, always the same."""
        lease = self._tree.lease(node, client) if seconds > 0 else None
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = _Owner(now_s, client)
            self._by_client.setdefault(client, {})[owner] = known
        known.renewed_s = now_s
        former = known.grants.get(name)
        if former is not None:
            self._drop(former)
        if lease is None:
            self._forget_if_idle(owner)
            return
        grant = known.grants[name] = _Grant(owner, known, name, lease, seconds, next(self._serials))
        self._num_grants += 1
        heapq.heappush(self._ends, (grant.ends_s, grant.serial, grant))
        while self._tree.num_leased > self._most_pages:
            leased_by = self._tree.leased_by
            # Of clients with equally many pages, the one that is asking gives some up.
            owners = self._by_client[max(leased_by, key=lambda other: (leased_by[other], other == client))]
            newest = owners[next(reversed(owners))]
            self._end(newest.grants[next(reversed(newest.grants))])
        if len(self._ends) > 2 * self._num_grants + 64:
            self._ends = [entry for entry in self._ends if entry[2].serial == entry[1]]
            heapq.heapify(self._ends)

    def release(self, owners: Iterable[str]) -> None:
        """Ends all leases of these owners. Unknown ones are ignored."""
        for owner in owners:
            if owner in self._owners:
                for grant in list(self._owners[owner].grants.values()):
                    self._end(grant)

    def expire(self, now_s: float) -> None:
        """Ends the leases whose time is over."""
        while self._soonest() and self._ends[0][0] <= now_s:
            self._end(self._ends[0][2])

    def _soonest(self) -> bool:
        """Brings the lease that ends soonest to the front of the heap. Returns whether there is one."""
        ends = self._ends
        while ends:
            listed_s, serial, grant = ends[0]
            if grant.serial != serial:
                heapq.heappop(ends)
            elif grant.ends_s > listed_s:
                heapq.heapreplace(ends, (grant.ends_s, serial, grant))
            else:
                return True
        return False

    def _end(self, grant: _Grant) -> None:
        """Ends a lease, and forgets its owner with the last one."""
        self._drop(grant)
        self._forget_if_idle(grant.owner_id)

    def _drop(self, grant: _Grant) -> None:
        self._tree.end_lease(grant.lease)
        grant.serial = 0
        self._num_grants -= 1
        del grant.owner.grants[grant.name]

    def _forget_if_idle(self, owner: str) -> None:
        known = self._owners.get(owner)
        if known is not None and not known.grants:
            del self._owners[owner]
            of_client = self._by_client[known.client]
            del of_client[owner]
            if not of_client:
                del self._by_client[known.client]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every lease is listed once, on a node of the tree, and few enough are."""
        grants = [grant for owner in self._owners.values() for grant in owner.grants.values()]
        assert len(grants) == self._num_grants, "leases are counted wrongly"
        assert sorted(grant.serial for grant in grants) == sorted(
            serial for _, serial, grant in self._ends if grant.serial == serial
        ), "a lease is not among the ends"
        assert all(grant.lease in grant.lease.node.own_leases for grant in grants), "a lease is on no node"
        assert self._tree.num_leased <= self._most_pages, "too many pages are leased"
        owners = [owner for of_client in self._by_client.values() for owner in of_client]
        assert sorted(owners) == sorted(self._owners), "an owner is of no client"
