"""How often the drafts of a drafter are right, learned from what was verified."""

from worker.drafts.drafter import Drafter

# Weight of the initial value, and how fast what was learned fades, in verified drafts.
PRIOR_DRAFTS, MEMORY_DRAFTS = 8.0, 2048.0
# A sequence's own rate counts as much as the replica's after this many of its drafts.
OWN_DRAFTS, OWN_MEMORY_DRAFTS = 16.0, 64.0


class Acceptance:
    """Probabilities that one more draft is right, for one drafter: by its evidence, and by sequence."""

    def __init__(self, priors: list[float]) -> None:
        """`priors`: initial probability by evidence."""
        self._right = [PRIOR_DRAFTS * prior for prior in priors]
        self._tried = [PRIOR_DRAFTS] * len(priors)
        self._own: dict[int, tuple[float, float]] = {}  # by key: drafts that were right, and that were expected to be

    @classmethod
    def of(cls, drafter: Drafter) -> "Acceptance":
        """Starts with the drafter's own expectations."""
        return cls(drafter.priors)

    def add(self, key: int) -> None:
        """Begins with a sequence."""
        self._own[key] = (0.0, 0.0)

    def remove(self, key: int) -> None:
        """Forgets a sequence. What it has taught stays."""
        self._own.pop(key, None)

    def expected(self, key: int, evidence: int) -> float:
        """The probability that the next draft is right if those before it are."""
        rate = self._right[evidence] / self._tried[evidence]
        right, expected = self._own.get(key, (0.0, 0.0))
        factor = (OWN_DRAFTS * rate + right) / (OWN_DRAFTS * rate + expected)
        return min(0.99, max(0.01, rate * factor))

    def observe(self, key: int, evidence: int, proposed: int, accepted: int) -> None:
        """Learns that of `proposed` drafts the first `accepted` were right. Of the others, only the first was tried."""
        tried = accepted + (accepted < proposed)
        rate = self._right[evidence] / self._tried[evidence]
        if key in self._own:
            right, expected = self._own[key]
            fade = 1.0 - tried / OWN_MEMORY_DRAFTS if tried < OWN_MEMORY_DRAFTS else 0.0
            self._own[key] = right * fade + accepted, expected * fade + tried * rate
        fade = 1.0 - min(tried, MEMORY_DRAFTS / 2) / MEMORY_DRAFTS
        self._right[evidence] = self._right[evidence] * fade + accepted
        self._tried[evidence] = self._tried[evidence] * fade + tried
