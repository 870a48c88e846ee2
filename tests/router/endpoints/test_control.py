"""Routes by which operators and clients steer a server: caches, requests that are to end, a probe that generates."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from router.access.auth import Keys
from router.access.key_file import ANYBODY, ApiClient
from router.access.rate_limits import RateLimits, UsageExchange
from router.config import RouterConfig
from router.endpoints import control_routes
from router.endpoints.control_routes import check_admin
from router.metrics.metrics import Metrics
from router.streaming.aborts import Aborts
from router.wire.errors import ApiError
from worker.messages import Failure, UsageReport

Make = Callable[..., Any]
KEYS = """keys:
  - {key: sk-admin, name: boss, admin: true}
  - {key: sk-one, name: one}
  - {key: sk-two, name: two}
"""
LONG = {"prompt": "Hello", "max_tokens": 50}


@pytest.fixture
def keys(tmp_path: Path) -> RouterConfig:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return RouterConfig(api_key_file=path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/flush_cache"), ("GET", "/flush_cache"), ("POST", "/reset_prefix_cache")]
)
def test_the_caches_of_all_replicas_are_emptied(make_stack: Make, make_replica: Make, method: str, path: str) -> None:
    first, second = make_replica(), make_replica()
    second.kv_tokens_used = 48
    stack = make_stack(first, second)
    answer = httpx.request(method, stack.url + path)
    assert (answer.status_code, answer.json()) == (200, {"replicas": 2, "tokens_in_use": 48})
    assert first.flushes == second.flushes and len(first.flushes) == 1


def test_a_replica_that_does_not_do_so_is_told_of(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_routes, "FLUSH_S", 0.05)
    silent, old = make_replica(), make_replica()
    silent.confirms_flushes = False
    old.load.flushed = None  # as one that does not know the message
    stack = make_stack(silent, old)
    answer = httpx.post(f"{stack.url}/flush_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_flushed")
    assert "r0, r1" in answer.json()["error"]["message"]
    assert len(silent.flushes) == 1 and not old.flushes


def test_only_a_key_that_administers_empties_caches(make_stack: Make, make_replica: Make, keys: RouterConfig) -> None:
    stack = make_stack(make_replica(), config=keys)
    url = f"{stack.url}/flush_cache"
    statuses = [httpx.post(url, headers=headers).status_code for headers in ({}, bearer("sk-one"), bearer("sk-admin"))]
    assert statuses == [401, 403, 200]
    assert len(stack.fakes["r0"].flushes) == 1


@pytest.mark.parametrize(
    ("host", "headers", "allowed"),
    [
        ("127.0.0.1", {}, True),
        ("127.9.9.9", {}, True),
        ("::1", {}, True),
        ("::ffff:127.0.0.1", {}, True),
        (None, {}, True),
        ("10.0.0.7", {}, False),
        ("::ffff:10.0.0.7", {}, False),
        ("example.com", {}, False),
        ("127.0.0.1", {"x-forwarded-for": "10.0.0.7"}, False),  # a proxy on this machine
        ("127.0.0.1", {"forwarded": "for=10.0.0.7"}, False),
    ],
)
def test_without_keys_a_client_on_this_machine_may(host: str | None, headers: dict[str, str], allowed: bool) -> None:
    client = None if host is None else SimpleNamespace(host=host)
    request: Any = SimpleNamespace(client=client, headers=headers, state=SimpleNamespace(client=ANYBODY))
    keyed: Any = SimpleNamespace(client=client, headers=headers, state=SimpleNamespace(client=ApiClient("x")))
    own = Keys(RouterConfig(api_key=SecretStr("sk-own")))
    for asked, known, may in ((request, Keys(RouterConfig()), allowed), (keyed, own, False)):
        if may:
            check_admin(asked, known)
            continue
        with pytest.raises(ApiError) as error:
            check_admin(asked, known)
        assert error.value.status == 403


# ---------------------------------------------------------------- requests that are to end


def begun(stack: Any, number: int = 1) -> None:
    """Waits until the replica has so many requests."""
    stack.until(lambda: len(stack.fakes["r0"].requests()) == number)


@pytest.mark.parametrize(
    ("path", "by"),
    [
        ("/v1/completions", "rid"),
        ("/v1/completions", "request_id"),
        ("/v1/chat/completions", "rid"),
        ("/v1/chat/completions", "header"),
        ("/v1/embeddings", "header"),
    ],
)
def test_a_request_is_ended_by_its_name(make_stack: Make, make_replica: Make, path: str, by: str) -> None:
    stack = make_stack(make_replica().hold())
    body: dict[str, Any] = {
        "/v1/completions": LONG,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
        "/v1/embeddings": {"input": "Hello"},
    }[path]
    headers = {"X-Request-Id": "mine"} if by == "header" else {}
    body = body | ({} if by == "header" else {by: "mine"})
    with httpx.Client(base_url=stack.url) as client, stack.pool() as pool:
        running = pool.submit(client.post, path, json=body, headers=headers)
        begun(stack)
        assert httpx.post(f"{stack.url}/abort_request", json={"rid": "other"}).json() == {"aborted": 0}
        assert httpx.post(f"{stack.url}/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        answer = running.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "aborted")
    stack.idle()
    assert httpx.post(f"{stack.url}/abort_request", json={"rid": "mine"}).json() == {"aborted": 0}


def test_a_stream_is_ended_by_the_id_of_its_answer(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    fake.allow(3)
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = (line[6:] for line in answer.iter_lines() if line.startswith("data: "))
        name = json.loads(next(lines))["id"]
        ended = httpx.post(f"{stack.url}/abort_requests", json={"request_ids": ["?", name]})
        assert ended.json() == {"aborted": 1}
        *_, last = lines
    assert json.loads(last)["error"]["code"] == "aborted"
    stack.idle()


def test_a_client_ends_its_own_requests_only(make_stack: Make, make_replica: Make, keys: RouterConfig) -> None:
    stack = make_stack(make_replica().hold(), config=keys)

    def abort(key: str, **body: Any) -> Any:
        return httpx.post(f"{stack.url}/abort_request", json=body, headers=bearer(key)).json()["aborted"]

    with httpx.Client(base_url=stack.url, headers=bearer("sk-one")) as client, stack.pool() as pool:
        running = [pool.submit(client.post, "/v1/completions", json=LONG | {"rid": f"r{i}"}) for i in range(2)]
        begun(stack, 2)
        assert abort("sk-two", rid="r0") == abort("sk-two", abort_all=True) == abort("sk-admin", rid="r0") == 0
        assert abort("sk-one", abort_all=True) == 2
        assert [one.result().status_code for one in running] == [409, 409]
    assert httpx.post(f"{stack.url}/abort_request", json={"rid": "r0"}).status_code == 401


@pytest.mark.parametrize(
    ("body", "param"),
    [({}, "rid"), ({"rid": ""}, "rid"), ({"rid": 1}, "rid"), ({"request_ids": [""]}, "request_ids[0]")],
)
def test_what_names_no_request(stack: Any, body: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{stack.url}/abort_request", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_other_routers_hear_of_it() -> None:
    sent: list[UsageReport] = []
    links: Any = SimpleNamespace(ready={"r0"}, tell_one=lambda report, turn: sent.append(report))
    here, there = Aborts(), Aborts()
    for aborts in (here, there):
        UsageExchange(RateLimits(Metrics()), [links], aborts)
    request, also, forget = there.begin("one")
    also("x")
    heard = links.on_usage  # of the router that was made last
    here.abort("two", ["x"])
    here.abort("one", ["y"])
    assert [report.aborts for report in sent] == [{"two": ["x"]}, {"one": ["y"]}]
    for report in sent:
        heard(report)
    assert not request.has_come
    here.abort("one", ["x", "y"])
    heard(sent[-1])
    assert request.has_come
    forget()
    assert there._running == {}


# ---------------------------------------------------------------- probes


def test_a_probe_generates_a_token(stack: Any) -> None:
    answers = [httpx.get(f"{stack.url}/health_generate") for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert answers[0].json() == {"status": "ok", "replicas": 1, "models": {"tiny": 1}}
    (asked,) = stack.fakes["r0"].requests()  # of three, one
    assert asked.sampling.max_tokens == 1
    assert httpx.head(f"{stack.url}/health_generate").status_code == 200
    assert httpx.head(f"{stack.url}/metrics").status_code == 200


def test_a_probe_finds_a_model_that_does_not_generate(
    make_stack: Make, make_replica: Make, monkeypatch: pytest.MonkeyPatch, keys: RouterConfig
) -> None:
    monkeypatch.setattr(control_routes, "PROBE_S", 0.05)
    monkeypatch.setattr(control_routes, "PROBED_FOR_S", 0.0)
    fake = make_replica().hold()
    stack = make_stack(fake, config=keys)

    def status() -> int:
        return httpx.get(f"{stack.url}/health_generate").status_code

    assert status() == 503
    fake.fail(Failure("overloaded", "full", retry_after_s=1))
    assert status() == 200  # it has answered
    fake.fail(Failure("internal", "broken"))
    assert status() == 503
    fake.die()
    stack.ready()
    assert status() == 503
