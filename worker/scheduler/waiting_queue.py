"""The queue of sequences that wait for a slot and pages, and its order."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from enum import Enum, auto

import numpy as np

from worker.scheduler.fair_share import OUTPUT_TOKENS, ClientShare, FairShare
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable

WINDOW_SEQUENCES = 128  # number of sequences at the front of the queue that compete for being next
MIN_SEQUENCES_OF_CLIENT = 4  # of each client, where there are many
# Prompt tokens that a second of waiting is worth: a sequence that arrives a second later goes first if it has more than
# this many fewer remaining tokens. Tuned in the simulator on Azure's conversations, with the costs of an 8B model on an
# H200: 1,000 to 12,000 differ by 15% in the median time to the first token, and by 20%, the other way, in the 99th
# percentile.
AGEING_TOKENS_S = 2500.0
# While sequences wait for slots or pages, all start as if they had waited as much longer as the longest wait is, and at
# least this long. So a short one that has just arrived may overtake a long one, however long the overload lasts. In the
# simulator (8B on an H200, Azure's conversations, 1.2 of the capacity, tau 0.375), the mean latency per token is 1%
# lower than with this time alone for 3,000 requests, and 16% for 9,000; the 99th percentile of the wait over the own
# output is 4% and 16% higher, and 0.47 and 0.69 of that in order of arrival. 20 s alone instead of 1 s gave 8%.
MIN_HEAD_START_S = 20.0
# Seconds for each token of its work, beyond `starvation_s`, after which a sequence goes first though slots are short.
PATIENCE_S = 1.0
PROMPT_TOKENS_A_STEP = 512  # prompt tokens that take about as long as one more output token: a usual chunk
# Work of a prompt token in a job, in output tokens. In the simulator, of 4,096 of Azure's conversations at once on an
# 8B model on an H200, the first quarter then ends 3.1 times sooner than in order of arrival; on 70B in four stages, 2.4
# times.
JOB_PROMPT_WORK = 2.0
LOOKUPS_A_STEP = 8  # limit of the cached prefixes that are looked up in a step
LOOKUP_EVERY_STEPS = 16  # age at which a looked-up prefix is out of date


class QueueOrder(Enum):
    """Which of two waiting sequences of the same priority, neither preempted nor starved, goes first.

    - `ARRIVAL`: the one that came first.
    - `SHORTEST_PREFILL`: the one with fewer remaining uncached prompt tokens, less `AGEING_TOKENS_S` per second of
      waiting and of its head start. Running prefills compete, too, so that short prompts overtake a long one. While
      slots or pages are short, the one with the most response ratio per work (`WaitingQueue.most_due`).
    - `LONGEST_PREFIX`: the one with the longer cached prefix. Pipelines use it, as their figures were measured so.
    - `LONGEST_OUTPUT`: the one with more tokens to come, for jobs of which the end counts.
    - `LEAST_WORK`: the one with the least expected work, for jobs of which the first requests to end count.
    """

    ARRIVAL = auto()
    SHORTEST_PREFILL = auto()
    LONGEST_PREFIX = auto()
    LONGEST_OUTPUT = auto()
    LEAST_WORK = auto()


class WaitingQueue:
    """Waiting sequences, in the order in which they should start.

    1. Higher priority first.
    2. Preempted sequences before new ones.
    3. Sequences that have waited longer than `starvation_s`, first come, first served.
    4. By the `QueueOrder`.

    With `SHORTEST_PREFILL` and `LONGEST_PREFIX`, rules 3 and 4 are for the sequences of one client. Between clients,
    their counters decide (`FairShare`).

    While slots or pages are short, other sequences wait because of a sequence's whole output and not of its prompt
    alone, and all may have waited for long. Then the response ratio replaces rules 3 and 4 (`most_due`). With
    `ARRIVAL`, the order is that of arrival throughout.

    With `LONGEST_OUTPUT` and `LEAST_WORK`, rules 3 and 4 are replaced. Sequences that arrive within `starvation_s` of
    the first one form a job, and jobs run one after the other. Within a job, the longest cached prefix goes first, then
    the most tokens to come; with `LEAST_WORK` the least work (`most_due`).

    The tree changes with every step, and thousands of sequences may wait. So the length of a sequence's cached prefix
    is an estimate. It is looked up on arrival, and for sequences in the window again every few steps or when it is
    known to be out of date.
    """

    def __init__(
        self,
        starvation_s: float,
        look_up: Callable[[Sequence], int],
        order: QueueOrder,
        table: SequenceTable[Sequence],
        shares: FairShare,
    ) -> None:
        """`look_up` returns how many of a sequence's tokens the tree has now. `table` has the sequences' rows. `shares`
        has the clients' counters."""
        self.order = order
        self.shares = shares
        self.is_fair = order in (QueueOrder.SHORTEST_PREFILL, QueueOrder.LONGEST_PREFIX)
        self._by_client: dict[ClientShare, list[Sequence]] = {}  # each sorted by `_place`
        self._table = table
        self._starvation_s = starvation_s
        self._job, self._job_began_s = 0, -math.inf  # the newest job
        self._predicted = 0  # index in the queue up to which `to_predict` has come
        self._look_up = look_up
        self._queue: list[Sequence] = []  # sorted by `_place`
        self._rows: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def rows(self) -> np.ndarray:
        """Rows of the waiting sequences in the `SequenceTable`, int64, by `_place`."""
        if self._rows is None:
            self._rows = np.array([seq.row for seq in self._queue], dtype=np.int64)
        return self._rows

    def add(self, seq: Sequence, step: int) -> None:
        """Adds a sequence, before step number `step` is planned."""
        self._estimate(seq, step)
        self._rows = None
        if self.order in (QueueOrder.LONGEST_OUTPUT, QueueOrder.LEAST_WORK) and not seq.is_preempted:
            if seq.arrived_s - self._job_began_s > self._starvation_s:
                self._job, self._job_began_s = self._job + 1, seq.arrived_s
            seq.job = self._job
        self._table.counts_from_s[seq.row] = seq.arrived_s - seq.head_start_s
        self._table.queue_class[seq.row] = -2 * seq.priority - seq.is_preempted
        insort(self._queue, seq, key=self._place)
        self.shares.enqueue(seq.share)
        insort(self._by_client.setdefault(seq.share, []), seq, key=self._place)

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence."""
        self._rows = None
        self.shares.dequeue(seq.share)
        of_client = self._by_client[seq.share]
        for queue in (self._queue, of_client):
            del queue[bisect_left(queue, self._place(seq), key=self._place)]
        if not of_client:
            del self._by_client[seq.share]

    def window(self, step: int) -> list[Sequence]:
        """The sequences that compete for being next. Looks up cached prefixes that are out of date."""
        window = self._queue[:WINDOW_SEQUENCES]
        if self.is_fair and len(self._by_client) > 1:
            clients = self._competing()
            each = max(MIN_SEQUENCES_OF_CLIENT, WINDOW_SEQUENCES // len(clients))
            window = [seq for share in clients for seq in self._by_client[share][:each]]
        old = [seq for seq in window if seq.estimated_at_step + LOOKUP_EVERY_STEPS < step]
        for seq in sorted(old, key=lambda seq: seq.estimated_at_step)[:LOOKUPS_A_STEP]:
            self._estimate(seq, step)
        return window

    def to_predict(self, count: int) -> list[Sequence]:
        """The next `count` waiting sequences, in turn, whose expected lengths may change while they wait."""
        if self.order is QueueOrder.LONGEST_OUTPUT or not self._queue:
            return []
        self._predicted %= len(self._queue)
        found = self._queue[self._predicted : self._predicted + count]
        self._predicted += len(found)
        return found

    def most_due(self, count: int, step: int, now_s: float) -> list[Sequence]:
        """The `count` sequences of each client that should start first while slots or pages are short: by rules 1 and
        2, then by the most response ratio per work. With `LEAST_WORK` the `count` sequences of all clients that should
        start first: by rules 1 and 2, by their jobs, then by the least work.

        - Work is counted in steps: the expected output, and the uncached prompt in chunks.
        - A sequence that has waited for `starvation_s` and `PATIENCE_S` for each step goes first, by arrival.
        - The response ratio is the time since the arrival over the work. Highest response ratio next (Brinch Hansen,
          "Short-term scheduling in multiprogramming systems", 1971) keeps waits in proportion to the work.
        - A sequence that starts makes all others wait for its work. So the ratio is divided by the work once more, as
          in the c-mu rule. In the simulator (8B on an H200, Azure's conversations, 1.2 of the capacity, tau 0.4), the
          mean latency per token is 14% shorter for it, and the 99th percentile of the wait over the own output 22%.
        """
        table, rows = self._table, self.rows
        prompts = np.maximum(table.num_tokens[rows] - table.cached_estimate[rows], 0)
        outputs = np.maximum(table.expected_tokens[rows] - table.num_tokens[rows], 1)
        if self.order is QueueOrder.LEAST_WORK:
            work = outputs + JOB_PROMPT_WORK * prompts
            best = np.lexsort((work, table.job[rows], table.queue_class[rows]))
        else:
            steps = outputs + prompts / PROMPT_TOKENS_A_STEP
            waited_s = now_s - table.counts_from_s[rows]
            head_start_s = max(MIN_HEAD_START_S, float(waited_s.max(initial=0.0)))
            due = (waited_s + head_start_s) / steps**2
            starved = waited_s > self._starvation_s + PATIENCE_S * steps
            due[starved] = waited_s[starved]
            best = np.lexsort((-due, ~starved, table.queue_class[rows]))
        if self.is_fair and len(self._by_client) > 1:
            best = self._first_of_each(best, count)
        else:
            best = best[:count]
        found = table.sequences_at(rows[best])
        for seq in found[:LOOKUPS_A_STEP]:
            if seq.estimated_at_step + LOOKUP_EVERY_STEPS < step:
                self._estimate(seq, step)
        return found

    def by_urgency(self, sequences: list[Sequence], now_s: float) -> list[Sequence]:
        """Waiting sequences and running prefills, most urgent first."""
        return sorted(sequences, key=lambda seq: self._urgency(seq, now_s))

    def is_before(self, prefill: Sequence, waiting: Sequence, now_s: float) -> bool:
        """Whether a running prefill is more urgent than a waiting sequence."""
        return self._urgency(prefill, now_s) < self._urgency(waiting, now_s)

    def in_turn(
        self,
        prefills: list[Sequence],
        waiting: list[Sequence],
        merged: Callable[[list[Sequence], list[Sequence]], Iterator[Sequence]],
        is_served: Callable[[Sequence], bool],
    ) -> Iterator[Sequence]:
        """Running `prefills` and `waiting` sequences by rules 1 and 2, then by the turns of their clients. `merged`
        gives those of one client in their order. `is_served`: whether the step that is built has a sequence's chunk."""
        of_client: dict[ClientShare, tuple[list[Sequence], list[Sequence]]] = {}
        for number, sequences in enumerate((prefills, waiting)):
            for seq in sequences:
                of_client.setdefault(seq.share, ([], []))[number].append(seq)
        if len(of_client) < 2:
            return merged(prefills, waiting)
        queues = [(share, merged(*both)) for share, both in of_client.items()]
        charges = dict(zip(waiting, self._charges(waiting), strict=True))
        return self.shares.order(
            queues, _rank, lambda seq: charges.get(seq, 0.0), is_served, lambda seq: seq.num_missing
        )

    def outdate(self, seq: Sequence, step: int) -> None:
        """Marks a sequence's cached prefix as out of date: from the next step on, the tree will have more of it."""
        seq.estimated_at_step = step - LOOKUP_EVERY_STEPS

    def first_of(self, share: ClientShare) -> Sequence:
        """The sequence of a client that has waited for the longest, after rules 1 and 2."""
        return self._by_client[share][0]

    @property
    def clients(self) -> Collection[ClientShare]:
        """The clients that have sequences here."""
        return self._by_client.keys()

    def _competing(self) -> Collection[ClientShare]:
        """The clients whose sequences compete for being next: all, or of tenants with many users those that are next
        by rule 1 and 2 and by their counters. So a step costs no more however many users a tenant names."""
        if len(self._by_client) * MIN_SEQUENCES_OF_CLIENT <= WINDOW_SEQUENCES:
            return self._by_client
        of_tenant: dict[int, list[ClientShare]] = {}
        for share in self._by_client:
            of_tenant.setdefault(share.tenant.index, []).append(share)
        most = max(MIN_SEQUENCES_OF_CLIENT, WINDOW_SEQUENCES // MIN_SEQUENCES_OF_CLIENT // len(of_tenant))
        found: list[ClientShare] = []
        for users in of_tenant.values():
            if len(users) > most:
                first = [self._by_client[user][0].row for user in users]
                turns = self.shares.turns_at(np.array([user.index for user in users]))
                order = np.lexsort((turns, self._table.queue_class[first]))
                users = [users[place] for place in order[:most].tolist()]
            found += users
        return found

    def _first_of_each(self, best: np.ndarray, count: int) -> np.ndarray:
        """The first `count` of each client that competes. `best`: int64, indices into `rows`."""
        clients = self._table.client[self.rows[best]]
        competing = self._competing()
        if len(competing) < len(self._by_client):
            chosen = np.isin(clients, [share.index for share in competing])
            best, clients = best[chosen], clients[chosen]
        order = np.argsort(clients, kind="stable")
        clients = clients[order]
        begins = np.flatnonzero(np.diff(clients, prepend=-1))
        place = np.arange(len(clients)) - np.repeat(begins, np.diff(begins, append=len(clients)))
        kept: np.ndarray = best[np.sort(order[place < count])]
        return kept

    def _charges(self, waiting: list[Sequence]) -> list[float]:
        """For each waiting sequence the prompt tokens for which its client is charged when it starts, and the outputs
        that are expected to follow. Of running ones, the client's counter has both."""
        table, rows = self._table, np.array([seq.row for seq in waiting], dtype=np.int64)
        tokens = table.num_tokens[rows]
        prompts = tokens - table.cached_estimate[rows]
        prompts[[seq.started_s is not None for seq in waiting]] = 0
        charges: list[float] = (prompts + OUTPUT_TOKENS * np.maximum(table.expected_tokens[rows] - tokens, 0)).tolist()
        return charges

    def _place(self, seq: Sequence) -> tuple[int, bool, int, int, int]:
        """Sort key of the queue, ascending; constant while a sequence waits."""
        to_come = seq.expected_tokens - seq.num_tokens if self.order is QueueOrder.LONGEST_OUTPUT else 0
        return (-seq.priority, not seq.is_preempted, seq.job, -to_come, seq.arrival)

    def _urgency(self, seq: Sequence, now_s: float) -> tuple[int, bool, bool, int, float, int, int]:
        """Sort key, ascending, of waiting sequences and running prefills."""
        may_starve = self.order is not QueueOrder.LONGEST_OUTPUT
        starved = seq.is_preempted or (may_starve and now_s - seq.arrived_s > self._starvation_s)
        starved |= self.order is QueueOrder.ARRIVAL
        priority, is_new, job, to_come, arrival = self._place(seq)
        if self.order is QueueOrder.SHORTEST_PREFILL:
            num_uncached = seq.num_missing if seq.is_running else seq.num_tokens - seq.cached_estimate
            work = num_uncached + AGEING_TOKENS_S * (seq.arrived_s - seq.head_start_s)
        else:
            work = -seq.cached_estimate
        return (priority, is_new, not starved, job, 0 if starved else work, to_come, arrival)

    def _estimate(self, seq: Sequence, step: int) -> None:
        seq.cached_estimate = self._look_up(seq)
        seq.estimated_at_step = step


def _rank(seq: Sequence) -> tuple[int, ...]:
    return -seq.priority, not seq.is_preempted or seq.gave_way
