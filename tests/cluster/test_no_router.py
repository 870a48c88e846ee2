"""The answer where there is no router."""

from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster import no_router
from cluster.no_router import middlewares


@pytest.mark.parametrize(
    ("deployments", "status"),
    [
        ({"Router": {"replicas": []}}, 503),
        ({"Router": {"replicas": [{"state": "STARTING"}, {"state": "STOPPING"}]}}, 503),
        ({"Router": {"replicas": [{"state": "STARTING"}, {"state": "RUNNING"}]}}, 200),
        ({"Router": {"replicas": [{"state": "PENDING_MIGRATION"}]}}, 200),
        ({}, 200),  # Serve says itself that there is no application
    ],
)
def test_clients_are_told_to_come_again(
    deployments: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_router, "details", lambda: {"deployments": deployments})
    app = FastAPI(middleware=middlewares())
    app.get("/-/healthz")(lambda: "success")
    app.post("/v1/chat/completions")(lambda: "answer")
    client = TestClient(app)
    answer = client.post("/v1/chat/completions", json={})
    assert answer.status_code == status
    if status == 503:
        assert answer.json()["error"]["code"] == "no_router" and int(answer.headers["Retry-After"]) > 0
    assert client.get("/-/healthz").status_code == 200
