"""When a router hears that it must let no stream go on."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from ray.serve.schema import ApplicationStatus

from cluster import deployed
from cluster.deployed import GOODBYE_S, STREAMS_S, watch


@pytest.mark.parametrize(
    ("status", "node_s", "ends_after_s"),
    [
        ("DELETING", None, 7.0),  # the whole server ends
        ("RUNNING", None, None),
        ("RUNNING", 2 * STREAMS_S, None),  # a drain that only asks for others in its place
        ("RUNNING", GOODBYE_S + 3, 3.0),
        ("RUNNING", 1.0, 0.0),
        ("DELETING", GOODBYE_S + 3, 3.0),
    ],
)
def test_streams_end_with_the_server_or_with_the_machine(
    status: str, node_s: float | None, ends_after_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looks() -> Iterator[dict[str, Any]]:
        yield {"status": "DEPLOYING", "deployments": {"Replica": {"target_num_replicas": 3}}}
        yield {"status": "DEPLOYING", "deployments": {}}  # Serve starts again
        yield {"status": "RUNNING", "deployments": {"Replica": {"target_num_replicas": 4}}}
        for _ in range(4):
            # Serve knows no numbers any more when it deletes.
            known = {} if status == "DELETING" else {"Replica": {"target_num_replicas": 4}}
            yield {"status": ApplicationStatus(status), "deployments": known}

    async def run() -> None:
        enough = asyncio.Event()
        loop = asyncio.get_running_loop()
        told: list[int] = []
        ends: list[float] = []
        asked = looks()

        def look() -> dict[str, Any]:
            found = next(asked, None)
            if found is None:
                loop.call_soon_threadsafe(enough.set)
                raise KeyError("the application")
            return found

        monkeypatch.setattr(deployed, "details", look)
        monkeypatch.setattr(deployed, "node_s", lambda: node_s)
        monkeypatch.setattr(deployed, "WATCH_S", 0)
        monkeypatch.setattr(loop, "call_later", lambda delay_s, work: ends.append(delay_s) or ends)
        watching = watch({"Replica": told.append}, 7.0, lambda: None)
        await enough.wait()
        watching.cancel()
        assert told == [3, 4] + [4] * (4 if status == "RUNNING" else 0)
        assert ends == ([] if ends_after_s is None else [ends_after_s])

    asyncio.run(run())
