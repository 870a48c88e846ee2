"""The answer where there is no router."""

from fastapi import FastAPI
from fastapi.testclient import TestClient

from cluster.no_router import middlewares


def test_all_are_told_to_come_again_but_haproxy() -> None:
    app = FastAPI(middleware=middlewares())
    app.get("/-/healthz")(lambda: "success")
    client = TestClient(app)
    answer = client.post("/v1/chat/completions", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_router")
    assert int(answer.headers["Retry-After"]) > 0
    assert client.get("/-/healthz").status_code == 200
