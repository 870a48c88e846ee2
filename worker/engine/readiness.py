"""The conditions for which a request waits before it may run, by name: its grammar, its adapter.

Each condition has a source, which tells when it holds for a request or cannot. KV that comes from elsewhere, or images
that are encoded, are further sources: nothing else of the engine asks which conditions there are.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

from worker.messages import Failure


class ReadinessSource(Protocol):
    """A condition's source. One thread at a time uses it."""

    def __len__(self) -> int:
        """Number of requests for which it keeps anything, ready or not."""

    @property
    def has_ready(self) -> bool:
        """Whether `poll` has something new."""

    @property
    def futures(self) -> Sequence[Future[Any]]:
        """Work that has not ended. When some of it has, `poll` may have something new."""

    def poll(self) -> Iterator[tuple[str, Failure | None]]:
        """(request, None or failure) for each request for which the condition holds (None), or never will, since the
        last call."""

    def forget(self, request_id: str) -> None:
        """Drops what it keeps for a request that has ended. Unknown ids are ignored."""


class Readiness:
    """The conditions of all requests, by their sources. A request without any is ready."""

    def __init__(self, sources: Mapping[str, ReadinessSource]) -> None:
        """`sources`: by name of the condition."""
        self._sources = sources
        self._missing: dict[str, set[str]] = {}  # by request: the conditions that do not hold yet

    def __len__(self) -> int:
        """Number of requests that wait, or for which a source keeps something."""
        return len(self._missing) + sum(map(len, self._sources.values()))

    @property
    def has_ready(self) -> bool:
        """Whether `poll` may have something new."""
        return any(source.has_ready for source in self._sources.values())

    def wait_for(self, request_id: str, conditions: Collection[str]) -> None:
        """Lets a request wait until all these conditions hold. Raises ValueError for a condition without a source."""
        if unknown := set(conditions) - self._sources.keys():
            raise ValueError(f"nothing tells of {sorted(unknown)}")
        if conditions:
            self._missing[request_id] = set(conditions)

    def missing(self, request_id: str) -> frozenset[str]:
        """The conditions for which a request waits."""
        return frozenset(self._missing.get(request_id, ()))

    def poll(self) -> Iterator[tuple[str, Failure | None]]:
        """(request, None or failure) for each request that has become ready (None), or never will, since the last call.
        One that has failed, or was forgotten, is told no more."""
        for condition, source in self._sources.items():
            for request_id, failure in source.poll():
                if (missing := self._missing.get(request_id)) is None:
                    continue
                missing.discard(condition)
                if failure is not None or not missing:
                    del self._missing[request_id]
                    yield request_id, failure

    def wait(self, others: Iterable[Future[Any]] = ()) -> None:
        """Waits until some work of a source has ended, or one of `others`."""
        own = [future for source in self._sources.values() for future in source.futures]
        wait([*own, *others], return_when=FIRST_COMPLETED)

    def forget(self, request_id: str) -> None:
        """Drops everything about a request that has ended. Unknown ids are ignored."""
        self._missing.pop(request_id, None)
        for source in self._sources.values():
            source.forget(request_id)
