"""When a replica hangs, and which of its ranks does; and when a router does. Knows neither Ray nor torch."""

import asyncio
import faulthandler
from collections.abc import Sequence

from worker.progress import NewestSteps, WorkProgress

# After so long, an event loop that stands still is taken for stuck: far longer than a virtual machine's pause.
STUCK_S = 300.0


def end_if_stuck() -> asyncio.Task[None]:
    """Ends this process once its event loop, the one that calls this, has stood still for `STUCK_S`, whatever holds
    Python's lock; where it stands is in its log. Until the task is cancelled."""
    return asyncio.create_task(_end_if_stuck())


async def _end_if_stuck() -> None:
    try:
        while True:
            faulthandler.dump_traceback_later(STUCK_S, exit=True)
            await asyncio.sleep(STUCK_S / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()


class Stalled:
    """Notices work that does not get on. Looks are counted, not seconds: if the whole machine stood still, there were
    no looks either, and nothing counts as late."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: seconds between two looks."""
        self._every_s = every_s
        self._number: int | None = None
        self._looks = 0

    def look(self, progress: WorkProgress | None) -> float | None:
        """Takes the replica's progress, None while it has nothing to do. Returns the limit in seconds if the work has
        exceeded it, else None."""
        number = None if progress is None else progress.number
        self._looks = self._looks + 1 if number is not None and number == self._number else 0
        self._number = number
        if progress is not None and self._looks * self._every_s >= progress.limit_s:
            return progress.limit_s
        return None


def suspects(steps: Sequence[NewestSteps | None], tp: int, leading: int) -> list[int]:
    """The ranks that a replica without progress waits for, at least one.

    `steps`: how far each rank has come; None for one that does not answer, which is then the cause. `tp`: ranks of a
    stage, which are neighbours. `leading`: the leading rank.

    Of stages, the first that has not computed a step which all before it have is the one that hangs. Of the ranks of a
    stage, those hang that have not even begun what others have: the others wait for them in a collective. If all ranks
    have computed all that they have begun, the leading rank sends no plans.
    """
    silent = [rank for rank, at in enumerate(steps) if at is None]
    if silent:
        return silent
    known = [at for at in steps if at is not None]
    if all(at.ended >= at.begun for at in known) and len({at.ended for at in known}) == 1:
        return [leading]
    least = min(at.ended for at in known)
    first = next(rank for rank, at in enumerate(known) if at.ended == least) // tp * tp
    stage = [rank for rank in range(first, first + tp) if known[rank].ended == least]
    begun = min(known[rank].begun for rank in stage)
    return [rank for rank in stage if known[rank].begun == begun]
