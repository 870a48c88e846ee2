"""Requests that their own clients end by name: `/abort_request`."""

from collections.abc import Callable, Iterable

from router.streaming.shutdown import EarlyEnd
from router.wire.errors import ApiError

ALL = ""  # in place of a name: all requests of the client


class Aborted(EarlyEnd):
    """The end of one request, which its client may ask for."""

    def error(self) -> ApiError:
        return ApiError(409, "The request was ended by /abort_request.", code="aborted")


class Aborts:
    """The running requests of a router, by client and by name. `on_abort` is told of what other routers must hear: a
    tenant, and the names."""

    def __init__(self) -> None:
        self.on_abort: Callable[[str, list[str]], None] = lambda tenant, names: None
        self._running: dict[str, dict[str, set[Aborted]]] = {}  # by tenant, then by name

    def begin(self, tenant: str) -> tuple[Aborted, Callable[[str], None], Callable[[], None]]:
        """A request of a client: its end, what gives it a further name, and what forgets it."""
        request = Aborted()
        names: set[str] = set()

        def also(name: str) -> None:
            names.add(name)
            self._running.setdefault(tenant, {}).setdefault(name, set()).add(request)

        def forget() -> None:
            mine = self._running.get(tenant, {})
            for name in names:
                mine[name].discard(request)
                if not mine[name]:
                    del mine[name]
            if not mine:
                self._running.pop(tenant, None)

        return request, also, forget

    def abort(self, tenant: str, names: Iterable[str]) -> int:
        """Ends the client's requests of these names, here and at other routers. Returns how many it ended here."""
        asked = list(names)
        self.on_abort(tenant, asked)
        return self.heard(tenant, asked)

    def heard(self, tenant: str, names: Iterable[str]) -> int:
        """As `abort`, at this router alone."""
        mine = self._running.get(tenant, {})
        found = {request for name in names for request in self._of(mine, name) if not request.has_come}
        for request in found:
            request.come()
        return len(found)

    @staticmethod
    def _of(mine: dict[str, set[Aborted]], name: str) -> set[Aborted]:
        return set().union(*mine.values()) if name == ALL else mine.get(name, set())
