"""Admission: which waiting sequences start, in the order of the queue, while there are slots, tokens and pages.

With clients in turn, a sequence that has no room closes the step to its own client only. The others do not wait for it:

- **Overtaking.** A later sequence of another client may start if it ends before the pages of the first one will be
  there, or fits alongside (`backfill.py`). Lengths are expected ones. An overtaker that is not over by then gives its
  pages back. So a sequence that needs more than is ever free at once starts, too.
- **Shares.** A client that holds more than its share of slots or pages (`holdings.py`) keeps no other client back: it
  waits for itself. It gives a sequence back if a client that holds less than its share has no room and is behind, or
  has waited for `PATIENCE_S`, or has nothing that runs. The last running sequence of a client is never taken for the
  share of another; one that overtook and is not over in time may be its client's last.

What is given back waits in its client's queue, first of the client's sequences but not before other clients, and goes
on from the pages that are still cached. Each step, at most one sequence gets room in these ways.
"""

from collections.abc import Iterator

import numpy as np

from worker.config import WorkerConfig
from worker.lengths import OutputLengthPredictor
from worker.scheduler.adapter_slots import AdapterSlots
from worker.scheduler.backfill import Opening, opening, peaks
from worker.scheduler.fair_share import ClientShare, FairShare, Member
from worker.scheduler.holdings import Holdings
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.kv_demand import PeakKVEstimator
from worker.scheduler.occupancy import Occupancy
from worker.scheduler.running import RunningSequences
from worker.scheduler.sequence import Sequence, pages_for
from worker.scheduler.sequence_table import SequenceTable
from worker.scheduler.step_builder import StepBuilder
from worker.scheduler.waiting_queue import PROMPT_TOKENS_A_STEP, QueueOrder, WaitingQueue

# Steps after which admission is tried again even if no sequence has arrived or left. For as many steps after one found
# no pages, pages count as short.
RETRY_STEPS = 16
# Most tokens that count for an output of which too little is known: a limit that the client has not set is that of the
# context, and says nothing.
UNKNOWN_TOKENS = 256
PREDICTED_SEQUENCES = 4  # waiting sequences whose outputs are predicted again when an output has ended
SPARE_CANDIDATES = 4  # candidates beyond the free slots: some may wait for a prefix that another sequence computes
MAX_BLOCKED_CLIENTS = 32  # clients without room in a step after which it is closed to all, since each costs a forecast
MAX_BLOCKED_USERS = 8  # the same of a tenant, after which it is closed to the tenant
MAX_RESERVATIONS = 4  # of them, those that are not kept waiting by overtakers: the first in the order
# Pages that are given back for each page that is needed: they have to be computed again.
MAX_WASTED_FACTOR = 2.0
# How long a client within its share waits for one above it that is not far ahead by its counter. Between clients that
# are served alike, a sequence ends by then, most often.
PATIENCE_S = 1.0
LITTLE_SHARE = 0.25  # of its share: a client that holds no more does not wait for so long
HURRY_S = 0.1  # least time between starts of a client, unless it is quiet, for which others give way
MAX_GIVING_WAY = 16  # sequences that give way to one
LOOK_EVERY_STEPS = 4  # so often it is looked whether others should give way; at once for a quiet client
MAX_DOUBLINGS = 5  # of the pause after giving way in vain


class Admission:
    """The sequences without a slot, from arrival or preemption until they start or are removed.

    - `queue`: sequences that may start.
    - `held`: sequences whose grammar is being compiled.
    """

    def __init__(
        self,
        config: WorkerConfig,
        running: RunningSequences,
        kv_cache: KVCacheManager,
        adapters: AdapterSlots,
        table: SequenceTable[Sequence],
        order: QueueOrder,
        shares: FairShare,
    ) -> None:
        self.queue = WaitingQueue(config.starvation_s, kv_cache.cached_tokens, order, table, shares)
        self.held: dict[str, Sequence] = {}  # by request id
        self.kv_demand = PeakKVEstimator(kv_cache.page_size)
        self._running = running
        self._adapters = adapters
        self._starvation_s = config.starvation_s
        self._now_s = 0.0  # of the step that is built
        self._kv_cache = kv_cache
        self._page_size = kv_cache.page_size
        self._table = table
        self._num_changes = 0  # how often a sequence was added or left
        self._shares = shares
        # The clients, None for all, of which the next sequence found no room, in the order of trial; valid at
        # `_blocked_at`. The sequence is None if it would have room, but must not overtake.
        self._blocked: dict[ClientShare | None, Sequence | None] = {}
        self._blocked_at: tuple[int, int] | None = None  # `_comings`
        self._blocked_step = -RETRY_STEPS  # the step for which a sequence last found no room
        # For those among them that others must not keep waiting, when they have room: of this step, until one starts.
        self._reservations: list[tuple[Sequence, Opening]] | None = None
        self._closed: set[Member | None] = set()  # clients, None for all, of which no sequence may start in this step
        self._favoured: Sequence | None = None  # for which others have given way
        self._given_way_step = -RETRY_STEPS  # before this step, none give way
        self._made_way_step = -1  # the step for which sequences have given way last
        self._refusals = 0  # how often, one after the other, a sequence did not start for which others had given way
        # Whether it is looked before the next step whether others should give way: clients did not compete, so that
        # what is to come is out of date, or a sequence of a quiet client has no room yet.
        self._looks = True
        self._builder: StepBuilder  # of the step that is built
        self._step = 0
        self._is_closed = True  # whether no sequence may start in this step any more
        self._has_forecast = False  # whether `kv_demand` knows the pages that running sequences hold now

    def __len__(self) -> int:
        return len(self.queue) + len(self.held)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.queue
        yield from self.held.values()

    @property
    def rows(self) -> np.ndarray:
        """Rows of all these sequences in the `SequenceTable`, int64."""
        held = np.array([seq.row for seq in self.held.values()], dtype=np.int64)
        return np.concatenate((self.queue.rows, held))

    def add(self, seq: Sequence, step: int, ready: bool = True) -> None:
        """Adds a sequence. With `ready` False, it does not start before `release`."""
        self._blocked.pop(self._closed_with(seq), None)
        self._expect(seq)
        if ready:
            self.queue.add(seq, step)
            self._looks |= self._shares.is_quiet(seq.share.tenant)
        else:
            self.held[seq.request_id] = seq

    def predict_again(self, lengths: OutputLengthPredictor) -> None:
        """Predicts the outputs of the next few waiting sequences again, in turn: called when an output has ended. Most
        of a job arrives before anything has been learned."""
        for seq in self.queue.to_predict(PREDICTED_SEQUENCES):
            if seq.length is not None:
                seq.length = lengths.again(seq.length)
                self._expect(seq)

    def add_preempted(self, seq: Sequence) -> None:
        """Adds a sequence that was preempted for the step that is built."""
        self.kv_demand.preempt()
        seq.gave_way = False
        self.add(seq, self._step)

    def add_given_way(self, seq: Sequence) -> None:
        """Adds a sequence that has given way to another one."""
        seq.gave_way = True
        self.add(seq, self._step)

    def release(self, request_id: str, step: int) -> Sequence:
        """Moves a sequence from `held` to the queue. Returns it. Raises KeyError if there is none with this id."""
        seq = self.held.pop(request_id)
        self.add(seq, step)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence that has ended without a slot."""
        self._num_changes += 1
        if seq is self._favoured:
            self._favoured = None
        if self.held.pop(seq.request_id, None) is None:
            self.queue.remove(seq)

    def is_blocked(self, step: int) -> bool:
        """Whether the next sequences of all clients found no room, and nothing has changed since."""
        self._refresh(step)
        return len(self._blocked) >= (len(self.queue.clients) if self._is_fair else 1)

    def blocked(self, step: int) -> np.ndarray:
        """The clients that are blocked, `ClientShare.index`, while others are not; int64."""
        self._refresh(step)
        return np.array([share.index for share in self._blocked if share is not None], dtype=np.int64)

    def vacated(self, seq: Sequence) -> None:
        """Called when a running sequence has given up its slot and pages."""
        self._adapters.release(seq)
        self._num_changes += 1

    def begin(self, builder: StepBuilder, step: int) -> None:
        """Begins a new step, the one after number `step`. The next calls of `candidates` and `admit` refer to it."""
        self._builder, self._step = builder, step
        self._is_closed = self.is_blocked(step) and self._favoured is None
        self._has_forecast = False
        self._closed.clear()
        self._reservations = None
        self._adapters.begin()

    def candidates(self, now_s: float) -> list[Sequence]:
        """The waiting sequences of which some may start in this step, those that should start first at the front."""
        self._now_s = now_s
        if not self.is_open:
            return []
        orders = QueueOrder.SHORTEST_PREFILL, QueueOrder.LONGEST_PREFIX
        if self.queue.order is QueueOrder.LEAST_WORK or (self._is_short and self.queue.order in orders):
            found = self.queue.most_due(self._running.num_free + SPARE_CANDIDATES, self._step, now_s)
        else:
            found = self.queue.by_urgency(self.queue.window(self._step), now_s)
        if self._blocked:
            found = [seq for seq in found if seq.share not in self._blocked or seq is self._favoured]
        return found

    def admit(self, seq: Sequence) -> bool:
        """Lets a waiting sequence start if there are a slot, tokens and pages for it. Returns whether it does.

        Then it holds its cached prefix. The caller gives it a slot and its first chunk, and then calls `started`.
        Candidates are to be tried in the order of their urgency: one that does not fit closes the step to those of its
        client behind it, or a long prompt would wait forever. Where clients do not take turns, it closes the step to
        all. A sequence whose prefix another one is computing does not close it, nor does one whose adapter has no place
        on the device.
        """
        if not self.is_open:
            return False
        if seq.gave_way and self._made_way_step == self._step:
            return False  # its last chunk may be in flight, and a sequence that starts must have no such chunk
        client = self._closed_with(seq)
        if client in self._closed or seq.share.tenant in self._closed:
            return False
        if client in self._blocked and seq is not self._favoured:
            return False
        if not self._builder.may_start(seq):
            self._closed.add(client)
            return False
        if self._kv_cache.reuses_prefixes and self._builder.computes_prefix_of(seq):
            self.queue.outdate(seq, self._step)
            return False  # also a starved one: it is next anyway, and then has less to compute
        if not self._adapters.has_room(seq, self._now_s - seq.arrived_s > self._starvation_s):
            return False
        if not self._may_overtake(seq):
            self._block(client, None)
            return False
        if not self._open(seq):
            self._block(client, seq)
            return False
        if seq is self._favoured:
            self._favoured, self._refusals = None, 0
        seq.blocked_step = None
        if self._blocked.pop(client, None) is not None:
            self._num_changes += 1
        self._shares.starts(seq.share, self._now_s)
        self.queue.remove(seq)
        self._adapters.acquire(seq)
        return True

    def started(self, seq: Sequence) -> None:
        """Called when an admitted sequence has its first chunk."""
        self.kv_demand.start(seq)
        self._reservations = None

    def running_grew(self) -> None:
        """Called when a running sequence may have got pages."""
        self._has_forecast = False

    @property
    def is_open(self) -> bool:
        """Whether a sequence could still start in this step. Pages that a preemption has just freed are for running
        sequences."""
        return (
            len(self.queue) > 0
            and not self._is_closed
            and not self._builder.has_preempted
            and self._running.has_room
            and self._builder.budget.tokens_left > 0
        )

    @property
    def _is_short(self) -> bool:
        """Whether slots or pages are short: not all waiting sequences can start now."""
        return len(self.queue) > self._running.num_free or self._step < self._blocked_step + RETRY_STEPS

    def _expect(self, seq: Sequence) -> None:
        """Sets the expected length of a sequence."""
        to_come = self.kv_demand.expected_tokens(seq)
        is_known = seq.ends_at_limit or seq.estimate is not None
        if not is_known and self.queue.order is not QueueOrder.LONGEST_OUTPUT:
            to_come = min(to_come, UNKNOWN_TOKENS)
        seq.expected_tokens = seq.num_tokens + to_come

    def _comings(self, step: int) -> tuple[int, int]:
        """A value that changes whenever sequences that found no room should try again."""
        return self._num_changes, step // RETRY_STEPS

    @property
    def _is_fair(self) -> bool:
        """Whether clients take turns."""
        return self.queue.is_fair

    def _closed_with(self, seq: Sequence) -> ClientShare | None:
        """For whom the step is closed by a sequence that does not fit: its client, or None for all."""
        return seq.share if self._is_fair else None

    def _refresh(self, step: int) -> None:
        """Forgets who found no room once that may have changed."""
        if self._blocked_at != (now := self._comings(step)):
            self._blocked_at = now
            self._blocked.clear()

    def _block(self, client: ClientShare | None, seq: Sequence | None) -> None:
        """Closes the step to a client whose next sequence has no room, or (None) must not overtake."""
        self._refresh(self._step)
        self._blocked[client] = seq
        if seq is not None:
            self._reservations = None
            self._blocked_step = self._step
            if seq.blocked_step is None:
                seq.blocked_step = self._step
                self._looks |= self._shares.is_quiet(seq.share.tenant)
            if seq is self._favoured:
                self._refuse_favoured(self._step)
            if client is not None:
                tenant = client.tenant
                if sum(share.tenant is tenant for share in self._blocked if share) >= MAX_BLOCKED_USERS:
                    self._closed.add(tenant)
        self._is_closed = client is None or len(self._blocked) >= MAX_BLOCKED_CLIENTS

    # ------------------------------------------------------------ overtaking and giving way

    @property
    def favoured(self) -> Sequence | None:
        """The waiting sequence for which others have given way: it starts first."""
        return self._favoured

    def _may_overtake(self, seq: Sequence) -> bool:
        """Whether a sequence may start before those that found no room. Notes from when on it is to give way to
        these."""
        until = 0
        if self._blocked:
            if self._reservations is None:
                self._reservations = self._reserve()
            steps, pages = self._expected_steps(seq), self._expected_pages(seq)
            for first, room in self._reservations:
                if first.share is not seq.share and first.priority >= seq.priority:
                    if steps > room.steps and pages > room.spare:
                        return False
                    until = max(until, room.steps, steps)
        self._table.gives_way_from[seq.row] = self._step + until + 1 if until else 0
        self._table.start_step[seq.row] = self._step
        return True

    def _reserve(self) -> list[tuple[Sequence, Opening]]:
        """The sequences that found no room and, since their clients hold no more than their share, must not be kept
        waiting by others of their priority or less; and when they have room."""
        waiting = [seq for seq in self._blocked.values() if seq is not None][:MAX_RESERVATIONS]
        if not waiting or not len(self._running):
            return []
        now, available = self._occupancy(), self._kv_cache.num_unreserved
        return [
            (seq, opening(now.demand, self._expected_pages(seq), available, self._page_size))
            for seq in waiting
            if not now.of_tenants.is_above(seq.share.tenant)
        ]

    def to_give_way(self, step: int, now_s: float, is_ending: bool) -> list[Sequence]:
        """The running sequences that should be preempted before the next step so that one that waits has room.
        `is_ending`: whether a running sequence ends with a step in flight. None need give way for the slot that it
        leaves; its pages may be too few."""
        if not (self._is_fair and self._shares.is_contended and len(self.queue)):
            self._favoured, self._looks = None, True
            return []
        if self._favoured is not None:
            if step < self._given_way_step + RETRY_STEPS:
                return []  # it may not have been tried: a step of decodes alone, or of a preemption, is closed to all
            self._refuse_favoured(step)
        # Never at a multiple of RETRY_STEPS, when no client is known to be blocked.
        if ((step + 1) % LOOK_EVERY_STEPS and not self._looks) or (is_ending and not self._running.has_room):
            return []
        self._looks = False
        table, now = self._table, self._occupancy()
        to_come = np.maximum(table.expected_tokens[now.rows] - table.num_tokens[now.rows], 0)
        self._shares.expect(now.clients, to_come)
        self._refresh(step)
        if step < self._given_way_step or (self._running.has_room and not self._blocked):
            return []
        overdue = self._overdue(step, now)
        for seq in self._behind():
            if not self._adapters.could_start(seq):
                continue
            needed, tenant = self._expected_pages(seq), seq.share.tenant
            is_impatient = self._is_impatient(seq, now, now_s)
            if overdue is None and not (is_impatient or self._shares.is_behind(seq.share)):
                continue
            found: list[Sequence] = []
            if overdue is not None and not now.of_tenants.is_above(tenant):
                since = table.start_step[now.rows] >= (seq.blocked_step or 0)
                found = self._making_room(seq, needed, now, overdue & since & (now.clients != seq.share.index))
            part = _part(tenant, now_s)
            if not found and now.of_tenants.has_claim(tenant, needed, part):
                may = self._are_ahead(tenant, now.tenants, now_s, is_impatient)
                found = self._making_room(seq, needed, now, may, now.of_tenants, 2 - part)
            if not found and len(tenant.users) > 1:
                of_users, part = now.of_users(tenant), _part(seq.share, now_s)
                if of_users.has_claim(seq.share, needed, part):
                    may = self._are_ahead(seq.share, now.clients, now_s, is_impatient)
                    found = self._making_room(seq, needed, now, may & (now.tenants == tenant.index), of_users, 2 - part)
            if found:
                self._favoured, self._given_way_step, self._made_way_step = seq, step + 1, step
                return found
        return []

    def _overdue(self, step: int, now: Occupancy) -> np.ndarray | None:
        """Which of the running sequences overtook others and are not over in time, bool [n]; None if none is, or pages
        are not short."""
        due = self._table.gives_way_from[now.rows]
        overdue: np.ndarray = (due > 0) & (due <= step)
        return overdue if self._running.has_room and overdue.any() else None

    def _is_impatient(self, seq: Sequence, now: Occupancy, now_s: float) -> bool:
        """Whether a sequence need not wait any longer for what becomes free by itself: it has waited for `PATIENCE_S`,
        or its tenant holds little. Without the latter, each of the few requests of a tenant would wait that long while
        another one fills all slots."""
        if now_s - seq.arrived_s >= PATIENCE_S:
            return True
        return now.of_tenants.has_claim(seq.share.tenant, self._expected_pages(seq), LITTLE_SHARE)

    def _are_ahead(self, member: Member, owners: np.ndarray, now_s: float, is_impatient: bool) -> np.ndarray:
        """Which of the running sequences, of `owners`, may have to give way to a sequence of `member`: those of others,
        if it has to wait only those of others that are ahead by more than a client saves up; bool [n]. None of them
        if the member has started one within `HURRY_S`, and is not quiet."""
        others: np.ndarray = owners != member.index
        if now_s - member.started_s < HURRY_S and not self._shares.is_quiet(member):
            return np.zeros_like(others)
        if not is_impatient:
            others &= self._shares.turns_at(owners) > self._shares.turn(member) + self._shares.credit
        return others

    def _behind(self) -> list[Sequence]:
        """The sequences for which others may give way, by the turns of their clients: those that found no room, or
        while no slot is free the next ones."""
        if not self._running.has_room:
            return [self.queue.first_of(share) for share in self._shares.next_clients(MAX_RESERVATIONS)]
        return [seq for seq in self._blocked.values() if seq is not None][:MAX_RESERVATIONS]

    def _making_room(
        self,
        seq: Sequence,
        needed: int,
        now: Occupancy,
        may: np.ndarray,
        holdings: Holdings | None = None,
        factor: float = 1.0,
    ) -> list[Sequence]:
        """The running sequences that `may` give way, bool [n], the latest first, until `seq` has room; only those of
        clients that hold more than their share times `factor`, by `holdings`. Empty if all are too few."""
        rows, table = now.rows, self._table
        may = may & ~now.is_ending
        if holdings is not None:
            holdings = holdings.copy()
            may &= holdings.above(factor)
        places = np.flatnonzero(may)[::-1].tolist()
        if not places:
            return []
        demand, gone = now.demand, np.zeros(len(rows), dtype=bool)
        for place, other in zip(places, table.sequences_at(rows[places]), strict=True):
            if other.priority > seq.priority or (holdings is not None and not holdings.above(factor)[place]):
                continue
            gone[place] = True
            if holdings is not None:
                holdings.take(place, float(demand.freed[place]))
            _, most = peaks(demand.without(gone), self._page_size)
            if needed + most[0] <= self._kv_cache.num_unreserved + float(demand.freed[gone].sum()):
                return table.sequences_at(rows[gone])
            if np.count_nonzero(gone) == MAX_GIVING_WAY or demand.freed[gone].sum() > MAX_WASTED_FACTOR * needed:
                break
        return []

    def _refuse_favoured(self, step: int) -> None:
        """Called when the sequence for which others have given way did not start: none give way for a while, which
        doubles each time, since what they had must be computed again."""
        self._favoured, self._given_way_step = None, step + (RETRY_STEPS << min(self._refusals, MAX_DOUBLINGS))
        self._refusals += 1

    def _expected_pages(self, seq: Sequence) -> int:
        """Pages that a waiting sequence is expected to need at its end, beyond those that are cached."""
        cached = pages_for(seq.cached_estimate, self._page_size)
        return pages_for(max(seq.expected_tokens, seq.num_tokens + 1) - 1, self._page_size) - cached

    def _expected_steps(self, seq: Sequence) -> int:
        """Steps in which a waiting sequence is expected to end."""
        prompt = (seq.num_tokens - seq.cached_estimate) // PROMPT_TOKENS_A_STEP
        return 1 + prompt + max(1, seq.expected_tokens - seq.num_tokens)

    def _occupancy(self) -> Occupancy:
        """The holdings and demands of the running sequences now."""
        return Occupancy(self._running, self._table, self._kv_cache, self._shares)

    # ------------------------------------------------------------ pages

    def _open(self, seq: Sequence) -> bool:
        """Acquires the cached prefix of a sequence if there are pages for its tokens and, by the forecast, for the
        future tokens of it and the running sequences. Returns whether it did.

        While sequences run, leased pages are kept from those that start: the prompt of the next call of that program
        would have to be computed again. Running sequences may take them, and a sequence that would run alone."""
        least = pages_for(seq.num_tokens, self._page_size) - pages_for(seq.cached_estimate, self._page_size)
        if len(self._running) and least > self._kv_cache.num_unreserved:
            return False  # without the cost of a lookup in the tree
        self._kv_cache.acquire_prefix(seq)
        available = self._kv_cache.num_unreserved if len(self._running) else self._kv_cache.num_available
        if self._forecast().has_room(seq, available) and self._kv_cache.has_room_for(seq, self._running.rows):
            return True
        self._kv_cache.free(seq, keep=False)
        return False

    def _forecast(self) -> PeakKVEstimator:
        """The forecast for the sequences that run now."""
        if not self._has_forecast:
            table, rows = self._table, self._running.rows
            growth = -(-(table.token_limit[rows] - 1) // self._page_size) - table.num_pages[rows]
            self.kv_demand.begin(self._running, int(np.maximum(growth, 0).sum()))
            self._has_forecast = True
        return self.kv_demand


def _part(member: Member, now_s: float) -> float:
    """The part of its share up to which others give way to a client: all if nothing has become free for it for long.
    Else others keep as much more than their shares. Clients that are served alike hold now more and now less, and what
    is given back has to be computed again."""
    return 1.0 if now_s - member.started_s >= PATIENCE_S else 0.5
