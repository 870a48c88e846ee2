"""The JSON behind the live page, and what keeps the page safe."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import httpx

from router.config import RouterConfig
from router.metrics.metrics import Metrics
from router.models import Models
from router.page.routes import PAGE, security_policy
from router.page.state import server_state
from worker.messages import Failure, ReplicaLoad

Make = Callable[..., Any]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}


def state(stack: Any) -> Any:
    answer = httpx.get(f"{stack.url}/state")
    assert answer.status_code == 200 and answer.headers["cache-control"] == "no-store"
    return answer.json()


def test_replicas_are_told_as_the_metrics_tell_them(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    stack.fakes["r1"].tell(ReplicaLoad(incarnation="one", running=3, kv_tokens_total=1000, output_tokens=90))
    stack.until(lambda: stack.service.metrics.loads["r1"].running == 3)
    stack.service.metrics.attention["r1"] = ("triton", "no FlashInfer")
    stack.client.chat.completions.create(model="tiny", messages=CHAT["messages"])
    stack.idle()
    told = state(stack)
    assert (told["names"], told["needs_key"], told["refused"]) == (["tiny"], False, [])
    (model,) = told["models"]
    assert model["ended"] == {"failed": 0, "stop": 1} and model["resumed"] == model["taken_out"] == {}
    first, second = model["replicas"]
    assert [first["name"], first["state"]] == ["r0", "ready"]
    assert sum(replica["first_token"]["count"] for replica in model["replicas"]) == 1
    assert second["load"]["running"] == 3 and second["load"]["output_tokens"] == 90
    assert second["load_age_s"] < 20 and second["queue_s"] >= 0
    assert (second["attention"], second["attention_problem"]) == ("triton", "no FlashInfer")
    assert stack.metric('shoal_output_tokens_total{model="tiny",replica="r1"}') == 90


def test_a_replica_that_is_silent_or_not_there_yet_is_told_as_such(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica())
    stack.service.metrics.silent.add("r0")
    stack.replicas.set_replicas({"r0": stack.fakes["r0"].address, "r9": "tcp://127.0.0.1:1"})
    stack.until(lambda: len(stack.replicas.known) == 2)
    silent, absent = state(stack)["models"][0]["replicas"]
    assert (silent["state"], absent["state"], absent["load"]) == ("silent", "connecting", None)
    stack.service.metrics.silent.clear()
    stack.service.metrics.leaving.add("r0")
    assert state(stack)["models"][0]["replicas"][0]["state"] == "leaving"
    stack.service.metrics.leaving.clear()


def test_what_autoscaling_wants_is_told_with_its_reason(stack: Any) -> None:
    (model,) = state(stack)["models"]
    assert (model["wanted"], model["scaled_for"]) == (0, None)
    stack.service.told_wanted(2, "queue")
    (model,) = state(stack)["models"]
    assert (model["wanted"], model["scaled_for"]) == (2, "queue")


def test_refusals_are_counted_by_reason(make_stack: Make, make_replica: Make) -> None:
    fake = make_replica()
    fake.fail(Failure("overloaded", "the queue is full", retry_after_s=3.0))
    stack = make_stack(fake)
    for stream in (True, False):
        assert httpx.post(f"{stack.url}/v1/chat/completions", json=CHAT | {"stream": stream}).status_code == 429
    assert httpx.post(f"{stack.url}/v1/chat/completions", json={}).status_code == 400
    assert state(stack)["refused"] == [{"model": "tiny", "status": 429, "reason": "overloaded", "count": 2}]
    assert stack.metric('shoal_refused_requests_total{model="tiny",reason="overloaded",status="429"}') == 2


def test_the_hit_rate_is_of_all_replicas(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    for name, prompt_tokens, cached_tokens in (("r0", 0, 0), ("r1", 0, 0), ("r0", 30, 16), ("r1", 10, 4)):
        load = ReplicaLoad(incarnation="one", prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        stack.fakes[name].tell(load)
        stack.until(lambda name=name, load=load: stack.service.metrics.loads[name].cached_tokens == load.cached_tokens)
    assert state(stack)["models"][0]["hit_rate"] == stack.metric("shoal_prefix_hit_rate") == 20 / 40


def test_the_page_needs_no_key_and_has_none(make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(api_key="sesame"))
    page = httpx.get(stack.url)
    assert page.status_code == 200 and "sesame" not in page.text
    told = httpx.get(f"{stack.url}/state")
    assert told.json()["needs_key"] and "sesame" not in told.text
    assert httpx.get(f"{stack.url}/metrics").status_code == 200, "the page's data are as open as these"
    assert httpx.head(stack.url).status_code == 200


def test_64_replicas_do_not_stop_the_loop(make_service: Make) -> None:
    """CPU time of the loop's longest step, so that other processes of this machine do not count."""
    metrics = Metrics()
    service = make_service(metrics)
    names = [f"shoal#Replica#{number:08x}" for number in range(64)]
    service.replicas.set_replicas(dict.fromkeys(names, "tcp://127.0.0.1:1"))
    stages = [dict.fromkeys(("compute", "host", "communication", "warm_up"), 1.0)] * 4
    peers = {f"{number:016x}": number for number in range(32)}
    for name in names:
        load = ReplicaLoad(incarnation="one", peers_seen=peers, stage_seconds=stages)
        service._fleet.join(name)
        service._fleet.apply_load(name, load)
        service.metrics.told(name, load)
        service.metrics.replica(name).first_token.observe(0.1)
    models = Models([service], metrics, RouterConfig())
    longest_s = []

    async def main() -> None:
        longest_s.append(0.0)
        looking = asyncio.create_task(server_state(models, "1", False))
        while not looking.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s[-1] = max(longest_s[-1], time.thread_time() - began_s)
        assert len(looking.result().models[0].replicas) == 64

    for _ in range(5):
        asyncio.run(main())
    assert min(longest_s) < 0.005


# ---------------------------------------------------------------- the page


class Markup(HTMLParser):
    """Addresses and event handlers in a page, and the attributes that hold styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset", "data"):
                self.addresses.append(value or "")
            if name.startswith("on") or name == "style":
                self.inline.append(f"{tag} {name}")


def test_the_page_comes_from_here_alone() -> None:
    page = PAGE.read_text()
    markup = Markup(page)
    assert all(address.startswith("data:") for address in markup.addresses)
    assert markup.inline == [], "the policy forbids them"
    hosts = set(re.findall(r"https?://[^\s'\"]+", page))
    assert hosts == {"http://www.w3.org/2000/svg"}, "a name of XML, which is not fetched"


def test_text_never_becomes_markup() -> None:
    page = PAGE.read_text()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert way not in page
    assert "localStorage" not in page and "document.cookie" not in page, "the key stays in its field"


def test_the_policy_allows_the_page_its_own_script_and_style(stack: Any) -> None:
    answer = httpx.get(stack.url)
    policy = answer.headers["content-security-policy"]
    assert policy == security_policy(answer.text)
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'" and rules["frame-ancestors"] == "'none'"
    assert "unsafe" not in policy and "*" not in policy
    for tag in ("script", "style"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[f"{tag}-src"] == f"'sha256-{digest}'"
    assert answer.headers["x-content-type-options"] == "nosniff" and answer.headers["x-frame-options"] == "DENY"
