"""Slots and pages that the running sequences hold of a replica, and are to take."""

from functools import cached_property

import numpy as np

from worker.scheduler.backfill import RunningDemand
from worker.scheduler.fair_share import FairShare, Tenant
from worker.scheduler.holdings import Holdings
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


class Occupancy:
    """The running sequences at one moment, [n] by rank. Each column is made once, and only if it is asked for.

    - `rows`: of the `SequenceTable`, int64.
    """

    def __init__(
        self,
        running: RunningSequences,
        table: SequenceTable[Sequence],
        kv_cache: KVCacheManager,
        shares: FairShare,
    ) -> None:
        self.rows = running.rows
        self._num_slots = len(running) + running.num_free
        self._table, self._kv_cache, self._shares = table, kv_cache, shares

    @cached_property
    def clients(self) -> np.ndarray:
        """`ClientShare.index`, int64."""
        return self._table.client[self.rows]

    @cached_property
    def tenants(self) -> np.ndarray:
        """`Tenant.index`, int64."""
        return self._shares.tenants_of(self.clients)

    @cached_property
    def is_ending(self) -> np.ndarray:
        """Which have as many tokens as they may have, so that they end with a step in flight; bool."""
        is_ending: np.ndarray = self._table.num_tokens[self.rows] >= self._table.token_limit[self.rows]
        return is_ending

    @cached_property
    def demand(self) -> RunningDemand:
        """As a forecast sees them."""
        table, rows = self._table, self.rows
        tokens, pages, limits = table.num_tokens[rows], table.num_pages[rows], table.token_limit[rows]
        to_come = table.expected_tokens[rows] - tokens
        # One that has outlived what was expected goes on for as long again.
        to_come = np.where(to_come > 0, to_come, tokens - table.num_prompt[rows])
        steps = np.clip(to_come, 1, np.maximum(limits - tokens, 1))
        return RunningDemand(steps, tokens, pages, self._held_pages)

    @cached_property
    def of_tenants(self) -> Holdings:
        """Holdings of all tenants."""
        num_pages = self._kv_cache.pool.num_pages
        return Holdings(self._shares.active_tenants(), self.tenants, self._held_pages, self._num_slots, num_pages)

    def of_users(self, tenant: Tenant) -> Holdings:
        """Holdings of the users of a tenant."""
        is_its = self.tenants == tenant.index
        num_slots, num_pages = int(np.count_nonzero(is_its)), float(self._held_pages[is_its].sum())
        return Holdings(tenant.users.active(), self.clients, self._held_pages, num_slots, num_pages)

    @cached_property
    def _held_pages(self) -> np.ndarray:
        """Pages that each holds, float64; those that several share count in part for each."""
        shared = self._table.num_shared[self.rows]
        own = self._table.num_pages[self.rows] - shared
        used = self._kv_cache.pool.num_pages - self._kv_cache.num_available
        of_tree, all_shared = max(0, used - int(own.sum())), int(shared.sum())
        held: np.ndarray = own + shared * (min(1.0, of_tree / all_shared) if all_shared else 0.0)
        return held
