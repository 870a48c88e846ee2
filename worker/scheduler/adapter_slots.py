"""The device's slots for adapters (LoRA): which adapter is where, and which running sequences use it."""

from worker.scheduler.sequence import Sequence


class AdapterSlots:
    """A sequence with an adapter holds its adapter's slot while it runs, so a step has at most as many adapters as
    there are slots. An adapter that no running sequence uses stays in its slot until another one needs it: the one that
    was used least recently goes. The ranks copy an adapter to its slot with the first plan that has it there.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[int, int] = {}  # by adapter, the one that was used least recently first
        self._users: dict[int, int] = {}  # adapters in use: number of running sequences
        self._is_saved = False  # whether slots that become free are for a sequence that has waited for long
        self.num_loads = 0  # since the start

    @property
    def resident(self) -> list[int]:
        """The adapters that have a slot, by number."""
        return list(self._slots)

    @property
    def in_use(self) -> list[int]:
        """The adapters of running sequences, by number."""
        return list(self._users)

    def begin(self) -> None:
        """Begins a new step."""
        self._is_saved = False

    def has_room(self, seq: Sequence, starved: bool) -> bool:
        """Whether a waiting sequence could have its adapter's slot now. Candidates are to be tried in the order of
        their urgency: behind a `starved` one that waits for a slot, no sequence with another adapter starts, so that
        a slot becomes free in time."""
        adapter = seq.adapter
        if not adapter or self._is_saved:
            return not adapter
        if adapter in self._slots or len(self._slots) < self._num_slots or len(self._users) < self._num_slots:
            return True
        self._is_saved = starved
        return False

    def could_start(self, seq: Sequence) -> bool:
        """Whether a sequence's adapter has a slot, or could have an unused one; without any effect."""
        return not seq.adapter or seq.adapter in self._slots or len(self._users) < self._num_slots

    def acquire(self, seq: Sequence) -> None:
        """Gives a sequence that starts its adapter's slot, for which there must be room."""
        adapter = seq.adapter
        if not adapter:
            return
        slot = self._slots.pop(adapter, None)
        if slot is None:
            slot = self._free_slot()
            self.num_loads += 1
        self._slots[adapter] = slot
        self._users[adapter] = self._users.get(adapter, 0) + 1
        seq.adapter_slot = slot

    def release(self, seq: Sequence) -> None:
        """Takes the slot from a sequence that runs no longer."""
        if not seq.adapter:
            return
        self._users[seq.adapter] -= 1
        if not self._users[seq.adapter]:
            del self._users[seq.adapter]

    def check_integrity(self, running: list[Sequence]) -> None:
        """Raises AssertionError unless each running sequence's adapter is in its slot, and no other adapter counts."""
        users: dict[int, int] = {}
        for seq in running:
            if seq.adapter:
                users[seq.adapter] = users.get(seq.adapter, 0) + 1
                assert self._slots[seq.adapter] == seq.adapter_slot, "an adapter left the slot of a running sequence"
        assert users == self._users, "the users of adapters are counted wrongly"
        assert len(set(self._slots.values())) == len(self._slots) <= self._num_slots

    def _free_slot(self) -> int:
        if len(self._slots) < self._num_slots:
            return next(slot for slot in range(self._num_slots) if slot not in self._slots.values())
        return self._slots.pop(next(adapter for adapter in self._slots if adapter not in self._users))
