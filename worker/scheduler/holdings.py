"""Holdings of clients, in slots and pages of a replica, against their shares of it."""

import copy
from collections.abc import Sequence

import numpy as np

from worker.scheduler.fair_share import Member


class Holdings:
    """Slots and pages of the running sequences of those that divide a share: all tenants, or the users of one.

    A share is by weight among those that have sequences, and one slot at least. Who holds more keeps no other back, and
    gives way to those that hold less than theirs, but for its last sequence.
    """

    def __init__(
        self, members: Sequence[Member], owners: np.ndarray, pages: np.ndarray, num_slots: int, num_pages: float
    ) -> None:
        """`members`: those that have sequences. Of the running sequences: `owners` int64 [n], `Member.index`; `pages`
        float64 [n]. `num_slots`, `num_pages`: what they divide."""
        size = max(member.index for member in members) + 1
        self.owners = owners
        self._slots = np.bincount(owners, minlength=size)
        self._pages = np.bincount(owners, pages, minlength=size)
        weights = np.zeros(len(self._slots))
        weights[[member.index for member in members]] = [member.weight for member in members]
        self._most_slots = np.maximum(1.0, num_slots * weights / weights.sum())
        self._most_pages = num_pages * weights / weights.sum()

    def copy(self) -> "Holdings":
        """Holdings from which may be taken without a change of these."""
        made = copy.copy(self)
        made._slots, made._pages = self._slots.copy(), self._pages.copy()
        return made

    def above(self, factor: float) -> np.ndarray:
        """Whether the owner of each running sequence has more than its share times `factor`, and another sequence; bool
        [n]."""
        above: np.ndarray = (self._slots > 1) & self._is_above(factor)
        return above[self.owners]

    def has_claim(self, member: Member, pages: int, part: float) -> bool:
        """Whether a member with one more slot and this many pages is within its share, and was within this `part` of
        it."""
        slots, most_slots = self._slots[member.index] + 1, self._most_slots[member.index]
        held, most_pages = self._pages[member.index], self._most_pages[member.index]
        is_within = slots == 1 or slots <= most_slots * part
        return bool(is_within and held <= most_pages * part and held + pages <= most_pages)

    def is_above(self, member: Member) -> bool:
        """Whether a member has more than its share of slots or pages."""
        return bool(self._is_above(1.0)[member.index])

    def take(self, place: int, pages: float) -> None:
        """Takes the slot and the pages of a running sequence from its owner. `place`: its index in `owners`."""
        self._slots[self.owners[place]] -= 1
        self._pages[self.owners[place]] -= pages

    def _is_above(self, factor: float) -> np.ndarray:
        above: np.ndarray = (self._slots > factor * self._most_slots) | (self._pages > factor * self._most_pages)
        return above
