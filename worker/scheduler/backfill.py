"""Backfilling: when a waiting sequence that has no room will have some, and who may start before it meanwhile.

As in EASY backfilling (Lifka 1995, "The ANL/IBM SP Scheduling System"): the first sequence without room has a
reservation, and a later one may start if it ends before, or fits alongside. Lengths of outputs are expected ones. A
sequence that overtook and is not over in time gives its pages back (`Admission.to_give_way`), so the one that it
overtook does not wait for wrong expectations.
"""

from typing import NamedTuple

import numpy as np


class RunningDemand(NamedTuple):
    """Running sequences as a forecast sees them, all [n]: `steps` until they end, `tokens` and `pages` that they have
    now, `freed` pages when they end (float64)."""

    steps: np.ndarray
    tokens: np.ndarray
    pages: np.ndarray
    freed: np.ndarray

    def without(self, chosen: np.ndarray) -> "RunningDemand":
        """The sequences that are not `chosen`, bool [n]."""
        return RunningDemand(*(column[~chosen] for column in self))


class Opening(NamedTuple):
    """When a sequence has room: after `steps`. `spare`: pages that are left then."""

    steps: int
    spare: float


def peaks(running: RunningDemand, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the running sequences, ascending, and the most pages that they need together after each of them
    beyond those that they hold now. Returns `steps` int64 [n] and `pages` float64 [n + 1], of which the first is the
    most from now on."""
    order = np.argsort(running.steps, kind="stable")
    steps, tokens, pages, freed = (column[order].astype(np.float64) for column in running)
    count = np.arange(len(order), 0, -1)
    tokens_there, pages_there = tokens[::-1].cumsum()[::-1], pages[::-1].cumsum()[::-1]
    given_back = np.concatenate(([0.0], freed.cumsum()))
    # Each grows by one token a step up to the end of sequence i, and has filled half of its last page then.
    grown = (tokens_there + count * steps) / page_size + count / 2 - pages_there
    needed = np.append(grown - given_back[:-1], -given_back[-1])
    return steps.astype(np.int64), np.maximum.accumulate(needed[::-1])[::-1]


def opening(running: RunningDemand, needed: int, available: int, page_size: int) -> Opening:
    """When a sequence that needs `needed` pages, and that has no room now, will have room as the running ones end."""
    steps, most = peaks(running, page_size)
    if not len(steps):
        return Opening(0, 0.0)
    fits = most[1:] + needed <= available
    first = int(fits.argmax()) if fits.any() else len(steps) - 1
    return Opening(int(steps[first]), max(0.0, available - float(most[first + 1]) - needed))
