"""The live page in a real browser."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from router.config import RouterConfig
from worker.messages import ReplicaLoad

# Tests are no package.
_spec = util.spec_from_file_location("page_browser", Path(__file__).with_name("browser.py"))
assert _spec is not None and _spec.loader is not None
page_browser = sys.modules["page_browser"] = util.module_from_spec(_spec)
_spec.loader.exec_module(page_browser)

Make = Callable[..., Any]
PROGRAM = page_browser.find()
EVIL = '<img src=x onerror="document.title=1">'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PROGRAM is None, reason=f"no browser here: none of {', '.join(page_browser.NAMES)} is installed"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with page_browser.Browser(PROGRAM) as made:
        yield made


def opened(browser: Any, url: str, tiles: int = 8, **options: Any) -> None:
    browser.open("about:blank")  # the page of the test before goes on asking its router, which has ended
    browser.until("location.href === 'about:blank'")
    browser.logged.clear()
    browser.open(url, **options)
    browser.until(f"document.querySelectorAll('.tile').length === {tiles}")


def text(browser: Any, selector: str) -> str:
    found: str = browser.run(f"document.querySelector({selector!r}).innerText")
    return found


def ask(browser: Any, question: str) -> None:
    browser.run(f"byId('text').value = {question!r}, byId('send').click()")


def test_the_page_shows_the_replicas_and_follows_them(browser: Any, make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    for number, stages in ((0, [{"compute": 3.0, "host": 1.0}] * 2), (1, [])):
        load = ReplicaLoad(incarnation="one", running=3 + number, kv_tokens_total=100, kv_tokens_used=40)
        load.stage_seconds = stages
        stack.fakes[f"r{number}"].tell(load)
    stack.until(lambda: sum(load.running for load in stack.service.metrics.loads.values()) == 7)
    opened(browser, stack.url)
    assert text(browser, "#status") == "2 of 2 replicas ready"
    running = "[...document.querySelectorAll('#rows tr')].map((row) => row.children[2].innerText)"
    assert browser.run(running) == ["3", "4"]
    assert "40%" in text(browser, "#tiles")
    load = ReplicaLoad(incarnation="one", running=9, output_tokens=500)
    load.stage_seconds = [{"compute": 6.0, "host": 2.0}] * 2
    stack.fakes["r0"].tell(load)
    browser.until(f"{running}[0] === '9'")
    assert browser.run("rate('output_tokens')") > 0
    assert "compute 75%" in text(browser, "#bubbles") and "host 25%" in text(browser, "#bubbles")
    assert browser.logged == [], "errors, or what the policy forbids"


def test_it_rests_while_it_is_hidden_and_says_when_the_router_is_gone(browser: Any, stack: Any) -> None:
    opened(browser, stack.url)
    browser.run("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("!asking")
    before = browser.run("performance.getEntriesByType('resource').length")
    browser.run("look()")
    assert browser.run("performance.getEntriesByType('resource').length") == before
    stack.server.should_exit = True
    stack.server.thread.join(20)
    browser.run("Object.defineProperty(document, 'hidden', { value: false, configurable: true })")
    browser.run("document.dispatchEvent(new Event('visibilitychange'))")
    browser.until("byId('status').textContent === 'the router does not answer'")


def test_the_chat_streams_and_text_is_no_markup(browser: Any, make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(f"An {EVIL} answer"))
    opened(browser, stack.url)
    ask(browser, f"A {EVIL} question")
    browser.until("document.querySelector('#log .note')")
    said = browser.run("[...document.querySelectorAll('#log p')].map((p) => p.textContent)")
    assert said[:2] == [f"A {EVIL} question", f"An {EVIL} answer"] and "tokens" in said[2]
    assert browser.run("document.querySelectorAll('img').length + document.title") == "0Shoal"
    ask(browser, "And then?")
    browser.until("document.querySelectorAll('#log .note').length === 2")
    assert len(stack.fakes["r0"].requests()) == 2
    assert browser.run("messages.map((message) => message.role)") == ["user", "assistant"] * 2
    assert browser.logged == []


def test_a_stream_can_be_stopped(browser: Any, make_stack: Make, make_replica: Make) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake)
    opened(browser, stack.url)
    ask(browser, "Hello")
    fake.allow(3)
    browser.until("document.querySelector('#log .assistant').textContent.length > 2")
    browser.run("byId('stop').click()")
    browser.until("document.querySelector('#log .note').textContent === 'stopped'")
    fake.wait_for(lambda: fake.aborted())
    assert browser.run("byId('send').disabled") is False


def test_a_page_whose_state_needs_a_key_asks_for_it(browser: Any, make_stack: Make, make_replica: Make) -> None:
    config = RouterConfig(api_key="sesame", require_auth_for_metrics_endpoint=True)
    opened(browser, make_stack(make_replica(), config=config).url, tiles=0)
    browser.until("byId('key').hidden === false")
    browser.run("byId('key').value = 'sesame'")
    browser.until("document.querySelectorAll('.tile').length === 8")


def test_errors_are_shown_and_a_key_can_be_given(browser: Any, make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(api_key="sesame"))
    opened(browser, stack.url)
    assert browser.run("byId('key').hidden") is False
    ask(browser, "Hello")
    error = browser.until("document.querySelector('#log .error').textContent")
    assert error.startswith("401: ") and "API key" in error
    browser.run("byId('key').value = 'sesame'")
    ask(browser, "Hello again")
    browser.until("document.querySelector('#log .assistant') && document.querySelector('#log .note')")
    assert stack.fakes["r0"].requests()
    with contextlib.suppress(ValueError):  # the 401, which the browser logs by itself
        browser.logged.remove("Failed to load resource: the server responded with a status of 401 (Unauthorized)")
    assert browser.logged == []


def test_it_shows_what_autoscaling_wants(browser: Any, make_stack: Make, make_replica: Make) -> None:
    stack = make_stack(make_replica(), make_replica())
    stack.service.told_wanted(3, "queue")
    opened(browser, stack.url, tiles=9)
    assert text(browser, "#status") == "2 of 3 replicas ready"
    assert browser.run("tiles.get('Replicas').innerText").split("\n")[1:] == [
        "2 of 3",
        "1 starting",
        "requests waited too long",
    ]
    stack.service.metrics.leaving.add("r1")
    stack.service.told_wanted(1, "idle")
    browser.until("byId('status').textContent === '1 of 1 replicas ready'")
    assert browser.run("tiles.get('Replicas').innerText").split("\n")[2:] == ["1 leaving", "the load fits on these"]
    stack.service.metrics.leaving.clear()
    stack.service.told_wanted(0, "idle")
    stack.replicas.set_replicas({})
    browser.until("byId('status').textContent === 'asleep'")
    assert text(browser, "#none") == "Asleep: the next request starts a replica."
    assert browser.logged == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_its_window(browser: Any, make_stack: Make, make_replica: Make, width: int) -> None:
    stack = make_stack(make_replica())
    stack.replicas.set_replicas({f"shoal#a-long-name#{n:08x}": stack.fakes["r0"].address for n in range(3)})
    stack.until(lambda: len(stack.replicas.ready) == 3)
    opened(browser, stack.url, width=width)
    assert browser.run("document.documentElement.scrollWidth") == width
    assert browser.run("byId('replicas').scrollWidth <= byId('replicas').clientWidth")
