"""Checks that every sequence of a scheduler is in one place, and that its counters agree with its pages."""

from collections import Counter
from collections.abc import Collection, Iterable

from worker.scheduler.admission import Admission
from worker.scheduler.kv_cache_manager import KVCacheManager
from worker.scheduler.running import RunningSequences
from worker.scheduler.scheduled_step import ScheduledStep
from worker.scheduler.sequence import Sequence
from worker.scheduler.sequence_table import SequenceTable


def check_sequences(
    sequences: dict[str, Sequence],
    running: RunningSequences,
    waiting: Admission,
    kv_cache: KVCacheManager,
    table: SequenceTable[Sequence],
    in_flight: Iterable[ScheduledStep],
) -> None:
    """Raises AssertionError unless every page has one owner and every sequence is in one place. Walks all pages and
    sequences.

    `sequences`: all that live, by request id. `in_flight`: the steps in flight.
    """
    most_pending = Counter[int]()
    for step in in_flight:
        most_pending.update(step.rows[step.samples].tolist())
        most_pending.update({int(step.rows[chunk]): len(drafts) for chunk, drafts in step.drafts.items()})
    running.check_integrity()
    kv_cache.check_integrity(running)
    found: Collection[Sequence] = [*running, *waiting]
    assert len(found) == len(sequences), "a sequence is nowhere, or in two places"
    assert all(sequences[seq.request_id] is seq for seq in found)
    table.check_integrity(found)
    for seq in running:
        assert seq.num_computed <= seq.num_pages * kv_cache.page_size, "tokens without a page"
        assert seq.num_confirmed <= min(seq.num_computed, seq.num_known)
        assert seq.num_pending <= most_pending[seq.row]
    for seq in waiting:
        assert seq.slot == -1 and seq.num_pages == 0 and seq.node is None, "a waiting sequence holds pages"
