"""When a router hears that it must let no stream go on."""

import asyncio
from collections.abc import Iterator

import pytest

from cluster import deployed
from cluster.deployed import GOODBYE_S, STREAMS_S, watch


@pytest.mark.parametrize(
    ("routers", "node_s", "ends_after_s"),
    [
        (0, None, 7.0),  # the whole server ends
        (2, None, None),
        (2, 2 * STREAMS_S, None),  # a drain that only asks for others in its place
        (2, GOODBYE_S + 3, 3.0),
        (2, 1.0, 0.0),
        (0, GOODBYE_S + 3, 3.0),
    ],
)
def test_streams_end_with_the_server_or_with_the_machine(
    routers: int, node_s: float | None, ends_after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def numbers() -> Iterator[dict[str, int]]:
        yield {"Router": 2, "Replica": 3}
        yield {}  # Serve starts again
        while True:
            yield {"Router": routers, "Replica": 4}

    async def run() -> None:
        loop, told, enough = asyncio.get_running_loop(), [], asyncio.Event()
        ends: list[float] = []
        asked = numbers()
        monkeypatch.setattr(deployed, "targets", lambda: next(asked))
        monkeypatch.setattr(deployed, "node_s", lambda: node_s)
        monkeypatch.setattr(deployed, "WATCH_S", 0)
        monkeypatch.setattr(loop, "call_later", lambda delay_s, work: ends.append(delay_s) or ends)

        def tell(number: int) -> None:
            told.append(number)
            if len(told) == 4:
                enough.set()

        watching = watch({"Replica": tell}, "Router", 7.0, lambda: None)
        await enough.wait()
        watching.cancel()
        assert told == [3, 4, 4, 4]
        assert ends == ([] if ends_after_s is None else [ends_after_s])

    asyncio.run(run())
