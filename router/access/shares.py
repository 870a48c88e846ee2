"""Shares of clients in a resource: each may have a part of it at most, so that something is left for the others."""

from collections import Counter


class Shares:
    """A resource of `limit` units, by client.

    A client may take as much as would be left for all others then: one client alone gets about half of the resource,
    two that take all they can a third each, and so on (the dynamic threshold of Choudhury and Hahne, as switches have
    it for their buffers). So a client that comes later finds room, and nothing has to be taken back. The client without
    a name stands for all, where clients cannot be told apart, and may take the whole.
    """

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._by_client: Counter[str] = Counter()

    def has_room(self, client: str, units: int, counted: int = 0) -> bool:
        """Whether the client may take this number: `counted` of them it has already, for the same purpose. Where the
        rest of the resource is unused, any number may be taken."""
        rest = self.taken - counted
        own = self._by_client[client] - counted if client else 0
        return not rest or own + units <= self._limit - rest

    def take(self, client: str, units: int) -> None:
        """Counts units, whether or not there is room."""
        self.taken += units
        self._by_client[client] += units

    def give(self, client: str, units: int) -> None:
        """Counts units that are free again."""
        self.taken -= units
        self._by_client[client] -= units
        if not self._by_client[client]:
            del self._by_client[client]
