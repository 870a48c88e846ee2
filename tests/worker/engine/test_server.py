"""The server on a real socket with fake parts, spoken to as a router does."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
import pytest
import zmq

from radix.events import Saved, Stored
from radix.index import PrefixIndex
from tests.plane import SECRET, called
from tests.radix.conftest import Listener
from worker.config import WorkerConfig
from worker.curve import REPLICA
from worker.engine import server as module
from worker.engine.server import Server
from worker.errors import DeviceLost
from worker.lengths.predictor import MIN_LEARNED_REQUESTS
from worker.messages import (
    PROTOCOL,
    Abort,
    CacheEvents,
    ClientUsage,
    Farewell,
    Flush,
    Generate,
    Grammar,
    Hello,
    Lease,
    Leaving,
    LengthSample,
    Output,
    Outputs,
    Release,
    ReplicaLoad,
    Routers,
    SamplingParams,
    Subscribe,
    UsageReport,
    decode_from_replica,
    encode,
)
from worker.progress import WorkProgress
from worker.scheduler.scheduled_step import SchedulerOutput

TIMEOUT_MS = 20_000


class Router:
    """A DEALER that keeps what it hears."""

    def __init__(self, context: zmq.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        called(self.socket, address, REPLICA)
        self.outputs: dict[str, list[Output]] = {}
        self.loads: list[ReplicaLoad] = []
        self.events: list[CacheEvents] = []
        self.reports: list[UsageReport] = []
        self.routers: list[dict[str, str]] = []
        self.farewells: list[Farewell] = []
        self.leaving: list[Leaving] = []
        self.hellos: list[Hello] = []
        self.beats = 0

    def send(self, message) -> None:
        self.socket.send(encode(message))

    def generate(self, request_id: str, prompt: list[int], max_tokens: int = 5, **fields) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, grammar=fields.pop("grammar", None))
        self.send(Generate(request_id=request_id, prompt_ids=prompt, sampling=sampling, **fields))

    def hear(self) -> None:
        """Takes the next message in."""
        assert self.socket.poll(TIMEOUT_MS), "the server is silent"
        message = decode_from_replica(self.socket.recv())
        if isinstance(message, Outputs):
            self.beats += not message.outputs
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)
        elif isinstance(message, ReplicaLoad):
            self.loads.append(message)
        elif isinstance(message, UsageReport):
            self.reports.append(message)
        elif isinstance(message, Farewell):
            self.farewells.append(message)
        elif isinstance(message, Leaving):
            self.leaving.append(message)
        elif isinstance(message, Hello):
            self.hellos.append(message)
        elif isinstance(message, Routers):
            self.routers.append(message.addresses)
        else:
            self.events.append(message)

    def until(self, condition) -> None:
        deadline_s = time.monotonic() + TIMEOUT_MS / 1000
        while not condition():
            assert time.monotonic() < deadline_s, "the server says other things"
            self.hear()

    def finished(self, *request_ids: str) -> bool:
        return all(i in self.outputs and self.outputs[i][-1].finish_reason for i in request_ids)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def close(self) -> None:
        self.socket.close()


class Running:
    """A server in a thread, its fake parts, and routers."""

    def __init__(self, parts, **config) -> None:
        self.parts = parts
        self.server = Server(
            Path("none"), WorkerConfig(page_size=parts.executor.page_size, **config), secret=SECRET, load=parts
        )
        self.context = zmq.Context()
        self.routers: list[Router] = []
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.error = error

    def router(self) -> Router:
        self.routers.append(Router(self.context, self.server.address))
        return self.routers[-1]

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(20)
        assert not self.thread.is_alive()
        for router in self.routers:
            router.close()
        self.context.term()


@pytest.fixture
def serve(fake_parts) -> Iterator:
    running: list[Running] = []

    def start(config: dict | None = None, **executor) -> Running:
        running.append(Running(fake_parts(**{"page_size": 4, **executor}), **(config or {})))
        return running[-1]

    yield start
    for one in running:
        one.stop()
        if one.error is None:
            one.server.engine.abort(list(one.server.engine.scheduler._sequences))
            one.server.engine.check_integrity()
            assert not one.parts.sampler.slots
            assert one.parts.grammars.closed


def gate(executor) -> threading.Semaphore:
    """Makes every step wait until it is let through, so that a test knows where the server is. Where a test waits with
    `condition or steps.release()`, whatever it hears lets another step through."""
    semaphore = threading.Semaphore(0)
    forward = executor.forward

    def gated(plan):
        assert semaphore.acquire(timeout=20)
        return forward(plan)

    executor.forward = gated
    return semaphore


def begun(executor) -> threading.Semaphore:
    """Released by every step that begins, before a gate that was made earlier lets it through."""
    semaphore = threading.Semaphore(0)
    forward = executor.forward

    def noted(plan):
        semaphore.release()
        return forward(plan)

    executor.forward = noted
    return semaphore


OPEN = 1 << 20  # steps: as many as there may be


def test_streams_tokens_to_the_router_that_asked(serve):
    s = serve()
    a, b = s.router(), s.router()
    a.generate("x", [1, 2, 3])
    b.generate("y", [4, 5], max_tokens=7)
    a.until(lambda: a.finished("x"))
    b.until(lambda: b.finished("y"))
    assert a.tokens("x") == s.parts.executor.generate([1, 2, 3], 5)
    assert b.tokens("y") == s.parts.executor.generate([4, 5], 7)
    assert set(a.outputs) == {"x"} and set(b.outputs) == {"y"}
    assert [len(o.token_ids) for o in a.outputs["x"]] == [1] * 5
    assert a.outputs["x"][0].cached_tokens == 0 and a.outputs["x"][0].queue_s >= 0


def test_many_at_once(serve):
    s = serve(num_pages=40)
    router = s.router()
    names = [str(i) for i in range(200)]
    for i, name in enumerate(names):
        router.generate(name, [i % 50, i % 7, 3], max_tokens=1 + i % 9)
    router.until(lambda: router.finished(*names))
    for i, name in enumerate(names):
        assert router.tokens(name) == s.parts.executor.generate([i % 50, i % 7, 3], 1 + i % 9)


def test_refusals_and_ids_in_use_are_answered(serve):
    s = serve()
    steps = gate(s.parts.executor)
    a, b = s.router(), s.router()
    a.generate("x", [1])
    a.generate("bad", [])
    a.generate("x", [2])
    a.until(lambda: a.finished("x"))
    assert "in use" in a.outputs["x"][-1].failure.message
    a.outputs.clear()
    b.generate("x", [1])
    steps.release(OPEN)
    b.until(lambda: b.finished("x"))
    a.until(lambda: a.finished("bad"))
    assert a.outputs["bad"][-1].failure.param == "prompt"


def test_rubbish_is_dropped(serve):
    s = serve()
    router = s.router()
    router.socket.send(b"")
    router.socket.send(b"\xff\x00 rubbish")
    router.socket.send(b"\x80" * 10_000)
    router.socket.send_multipart([b"two", b"frames"])
    router.socket.send(encode(Outputs([])))
    router.generate("x", [1, 2, 3])
    router.until(lambda: router.finished("x"))
    assert router.tokens("x") == s.parts.executor.generate([1, 2, 3], 5)


def test_a_release_ends_leases(serve):
    s = serve()
    router = s.router()
    router.send(Subscribe())
    router.generate("a", list(range(12)), lease=Lease("program", "branch", 600))
    router.until(lambda: router.loads and router.loads[-1].kv_tokens_leased > 0)
    router.send(Release(["program", "unknown"]))
    router.until(lambda: router.loads[-1].kv_tokens_leased == 0)


def test_a_flush_forgets_what_no_running_request_holds(serve):
    s = serve()
    steps = gate(s.parts.executor)
    router = s.router()
    router.send(Subscribe())
    steps.release(OPEN)
    router.generate("past", list(range(1, 40)), max_tokens=2)
    router.until(lambda: router.finished("past"))
    assert s.server.at_rest(lambda engine: engine.tree.num_cached) > 0
    router.send(Flush("one"))
    router.send(Flush("two"))
    router.until(lambda: [known for load in router.loads for known in load.flushed] == ["one", "two"])
    assert router.loads[-1].kv_tokens_cached == 0
    assert s.server.at_rest(lambda engine: engine.tree.num_cached) == 0
    assert all(load.flushed is not None for load in router.loads)


def test_lengths_are_told_and_learned(serve):
    """A load has a newest output; a router that joins brings those of other replicas."""
    s = serve()
    router = s.router()
    told = [
        LengthSample(np.array([n], dtype="<u2").tobytes(), 9, was_cut=False) for n in range(MIN_LEARNED_REQUESTS - 1)
    ]
    router.send(Subscribe(length_samples=told))
    router.until(lambda: router.loads)
    assert s.server.at_rest(lambda engine: engine.scheduler.lengths.num_learned) == MIN_LEARNED_REQUESTS - 1
    whole = s.parts.executor.generate([1, 2, 3], 5)
    other = next(token for token in range(len(whole) + 1) if token not in whole)  # it may end at another length
    sampling = SamplingParams(max_tokens=5, temperature=0, stop_token_ids=(other,))
    router.send(Generate(request_id="x", prompt_ids=[1, 2, 3], sampling=sampling))
    router.until(lambda: router.finished("x") and any(load.length_sample for load in router.loads))
    (sample,) = [load.length_sample for load in router.loads if load.length_sample]
    assert (sample.tokens, len(sample.features) % 2) == (5, 0) and sample.was_cut
    assert s.server.at_rest(lambda engine: engine.scheduler.lengths.num_learned) == MIN_LEARNED_REQUESTS
    router.send(Subscribe(length_samples=told))
    router.until(lambda: len(snapshots(router)) == 2)
    assert s.server.at_rest(lambda engine: engine.scheduler.lengths.num_learned) == MIN_LEARNED_REQUESTS


def test_a_usage_report_reaches_all_other_routers(serve):
    s = serve()
    routers = [s.router() for _ in range(3)]
    for router in routers:
        router.send(Subscribe())
        router.until(lambda router=router: router.events)
    report = UsageReport("first", {"client": ClientUsage(3, 500, 2, 60, 0)})
    routers[0].send(report)
    for router in routers[1:]:
        router.until(lambda router=router: router.reports)
        assert router.reports == [report]
    routers[0].send(Subscribe())
    routers[0].until(lambda: len(routers[0].events) == 2)
    assert not routers[0].reports


def test_abort_stops_and_nothing_follows(serve):
    s = serve()
    steps = gate(s.parts.executor)
    router = s.router()
    router.send(Subscribe())
    router.generate("long", [1, 2, 3], max_tokens=100)
    steps.release(3)
    router.until(lambda: len(router.outputs.get("long", [])) == 3)
    router.send(Abort(["long", "unknown"]))
    router.until(lambda: (router.loads and router.loads[-1].aborts == 1) or steps.release())
    assert router.loads[-1].kv_tokens_used == 0 and router.loads[-1].running == 0
    before = len(router.outputs["long"])
    router.generate("next", [9])
    steps.release(OPEN)
    router.until(lambda: router.finished("next"))
    assert len(router.outputs["long"]) == before < 100


def test_one_router_cannot_abort_for_another(serve):
    s = serve()
    steps = gate(s.parts.executor)
    a, b = s.router(), s.router()
    a.generate("x", [1, 2, 3])
    steps.release(1)
    a.until(lambda: "x" in a.outputs)
    b.send(Abort(["x"]))
    b.generate("y", [1])
    steps.release(OPEN)
    b.until(lambda: b.finished("y"))
    a.until(lambda: a.finished("x"))
    assert a.tokens("x") == s.parts.executor.generate([1, 2, 3], 5)


@pytest.mark.parametrize("waits_for", ["pages", "grammar"])
def test_a_router_that_goes_away_frees_its_pages(serve, monkeypatch, waits_for):
    """Also when nothing is being sent to it, because its request waits."""
    monkeypatch.setattr(module, "PROBE_EVERY_S", 0.02)
    s = serve({"max_running": 1}, num_pages=1000)
    gone, watcher = s.router(), s.router()
    watcher.send(Subscribe())
    watcher.until(lambda: watcher.loads)
    steps = gate(s.parts.executor)
    if waits_for == "pages":
        watcher.generate("mine", [1, 2, 3], max_tokens=3000)
        watcher.until(lambda: watcher.loads[-1].waiting + watcher.loads[-1].running == 1 or steps.release())
        gone.generate("theirs", [4, 5])
    else:
        gone.generate("theirs", [4, 5], grammar=Grammar("regex", "a"))
    watcher.until(lambda: watcher.loads[-1].waiting == 1 or steps.release())
    gone.close()
    watcher.until(lambda: watcher.loads[-1].aborts == 1 or steps.release())
    assert watcher.loads[-1].waiting == 0
    steps.release(OPEN)


@pytest.mark.parametrize("protocol", [1, PROTOCOL])
@pytest.mark.parametrize("name", ["", "named"])
def test_routers_that_left_before_they_were_heard_harm_nobody(serve, protocol, name):
    """As after a long step, during which a router connected again and again."""
    running = serve()
    here = running.router()
    here.send(Subscribe(router="here", address="tcp://127.0.0.1:1"))
    here.until(lambda: here.loads)

    def left(engine):
        for number in range(3):
            gone = Subscribe(protocol=protocol, router=name and f"{name} {number}", address="tcp://127.0.0.1:2")
            running.server._handle(b"gone %d" % number, gone)

    for _ in range(2):
        running.server.at_rest(left)
        told = len(here.loads)
        here.until(lambda told=told: len(here.loads) > told)
    here.generate("a", [1, 2, 3])
    here.until(lambda: here.finished("a"))
    known = running.server.at_rest(lambda engine: [*running.server._bookings, *running.server._listeners()])
    assert not [router for router in known if router.startswith(b"gone")]
    if name:
        assert here.routers[-1].keys() == {"here"}


def test_wakes_when_a_grammar_is_there(serve):
    s = serve()
    router = s.router()
    router.send(Subscribe())
    router.generate("x", [1, 2, 3], grammar=Grammar("regex", "a"))
    router.until(lambda: router.loads and router.loads[-1].waiting == 1)
    s.parts.grammars.futures[0].set_result(None)
    router.until(lambda: router.finished("x"))
    assert router.tokens("x") == s.parts.executor.generate([1, 2, 3], 5)


@pytest.mark.parametrize("num_checkpoints", [None, 6], ids=["", "checkpoints"])
def test_events_keep_an_index_exact(serve, monkeypatch, num_checkpoints):
    """Routers that join early and late, and again, while the tree changes between the pieces of their snapshots."""
    monkeypatch.setattr(module, "PIECE_NODES", 2)
    monkeypatch.setattr(module, "EVENTS_A_MESSAGE", 3)
    s = serve(num_pages=30, num_checkpoints=num_checkpoints)
    early, late = s.router(), s.router()
    early.send(Subscribe())
    for i in range(20):
        early.generate(str(i), [i % 3] * 6 + [i], max_tokens=9)
    early.until(lambda: early.finished("0"))
    late.send(Subscribe())
    early.until(lambda: early.finished(*map(str, range(20))))
    for token in (7, 8, 9):  # one after the other, so that numbers go on from message to message
        early.generate(f"last {token}", [token] * 20, max_tokens=40)
        early.until(lambda token=token: early.finished(f"last {token}"))
    expected = listener = None
    for router in (early, late):
        router.send(Subscribe())  # whatever is on its way comes before the snapshot that this asks for
        router.until(lambda r=router: len(snapshots(r)) == 2)
        first, second = snapshots(router)
        assert len(first) >= 1 and len(second) > 1
        at = router.events.index(second[0])
        changes = router.events[:at]
        assert {message.incarnation for message in changes} == {s.server.incarnation}
        for message in router.events:
            if message.piece == 0:
                before, listener, indexed = listener, Listener(4), PrefixIndex(4).add()
            if message.piece is None:
                assert message.first_seq == expected and len(message.events) <= 3
            for event in message.changes():
                listener.apply(event)
                indexed.apply(event)
            expected = message.first_seq + (len(message.events) if message.piece is None else 0)
        assert before.prefixes() == listener.prefixes()
        assert num_checkpoints is None or sorted(before.saved()) == sorted(listener.saved())
        assert all(indexed.index.match(path)[0] == listener.continued(path) for path in listener.prefixes())


@pytest.mark.parametrize("kinds", ["", "NN", "CC", "NC", "CN", "NCNNCC", "CNNCNC"])
def test_changes_of_nodes_and_of_checkpoints_keep_their_order(kinds):
    """Those of nodes (N) are counted, and those of checkpoints (C) not."""
    make = {"N": lambda number: Stored(number, 0, b"page"), "C": Saved}
    changes = [make[kind](number) for number, kind in enumerate(kinds)]
    message = CacheEvents.of("one", 1, changes, 1)
    assert len(message.events) == kinds.count("N")
    assert list(decode_from_replica(encode(message)).changes()) == changes


def snapshots(router: Router) -> list[list[CacheEvents]]:
    """The pieces of each whole snapshot that the router has heard."""
    whole: list[list[CacheEvents]] = []
    pieces: list[CacheEvents] = []
    for message in router.events:
        if message.piece is not None:
            assert message.piece == len(pieces) or message.piece == 0
            pieces = [*pieces, message] if message.piece else [message]
            if message.complete:
                whole.append(pieces)
                pieces = []
    return whole


def test_routers_hear_of_each_other_and_of_what_was_seen_from_each(serve):
    s = serve()
    a, b, nameless = s.router(), s.router(), s.router()
    nameless.send(Subscribe())
    a.send(Subscribe("a", "tcp://a"))
    a.until(lambda: a.routers)
    assert a.routers == [{"a": "tcp://a"}]
    b.send(Subscribe("b", "tcp://b"))
    for router in (a, b):
        router.until(lambda r=router: r.routers and len(r.routers[-1]) == 2)
        assert router.routers[-1] == {"a": "tcp://a", "b": "tcp://b"}
    a.generate("x", [1, 2, 3], booking=5)
    nameless.generate("y", [1, 2, 3], booking=9)
    for router in (a, b):
        router.until(lambda r=router: r.loads and r.loads[-1].finished == 2)
        assert router.loads[-1].peers_seen == {"a": 5, "b": 0}
    b.send(Subscribe("b", "tcp://b"))  # after a gap: no news for the others
    b.until(lambda: len(snapshots(b)) == 2)
    b.close()
    a.until(lambda: a.routers[-1] == {"a": "tcp://a"} or a.send(Release([])))
    assert len(a.routers) == 3 and nameless.routers == []


def test_reports_reach_routers_whose_snapshot_is_on_its_way(serve, monkeypatch):
    monkeypatch.setattr(Server, "_send_piece", lambda self: None)
    s = serve()
    a, b = s.router(), s.router()
    b.send(Subscribe("b", "tcp://b"))
    b.until(lambda: b.routers)
    a.send(UsageReport("a", {}))
    b.until(lambda: b.reports)
    assert [report.router for report in b.reports] == ["a"]


def test_load_counts_the_bookings_of_each_router(serve):
    s = serve()
    a, b = s.router(), s.router()
    for router in (a, b):
        router.send(Subscribe())
        router.until(lambda r=router: r.loads)
    for booking in (1, 2, 3):
        a.generate(f"a{booking}", [1, 2], booking=booking)
    b.generate("b1", [3, 4], booking=1)
    a.until(lambda: a.loads[-1].finished == 4)
    b.until(lambda: b.loads[-1].finished == 4)
    assert (a.loads[-1].bookings_seen, b.loads[-1].bookings_seen) == (3, 1)
    last = a.loads[-1]
    assert (last.running, last.waiting, last.kv_tokens_used, last.kv_tokens_total) == (0, 0, 0, 256)
    assert (last.prompt_tokens, last.output_tokens) == (8, 20)
    assert last.incarnation == s.server.incarnation


def test_load_is_not_told_after_every_step(serve, monkeypatch):
    monkeypatch.setattr(module, "LOAD_EVERY_S", 1e9)
    s = serve()
    router = s.router()
    router.send(Subscribe())
    router.generate("x", [1, 2, 3], max_tokens=50)
    router.until(lambda: router.loads and router.loads[-1].finished == 1)
    assert len(router.outputs["x"]) == 50
    assert len(router.loads) <= 4  # subscribed, arrived, the first in a while, idle


def test_does_not_spin_when_idle(serve, monkeypatch):
    waits = []
    wait = Server._wait
    monkeypatch.setattr(Server, "_wait", lambda self, ms: (waits.append(1), wait(self, ms))[1])
    s = serve()
    router = s.router()
    for name in "abc":
        router.generate(name, [1])
        router.until(lambda n=name: router.finished(n))
    assert len(waits) <= 3 + 3 + 1


def test_what_arrives_while_the_device_is_busy_is_in_the_next_step(serve, monkeypatch):
    s = serve({"overlap": True, "token_budget": 64})
    router, other = s.router(), s.router()  # sockets are for one thread each; the server's thread sends b
    wait = Server._wait

    def spare_s(engine):
        return 0.05 if engine.executor.plans and "b" not in engine.scheduler else 0.0

    def wait_for_b(self, timeout_ms):
        if s.parts.executor.plans and timeout_ms <= 50 and "b" not in self._owners:
            other.generate("b", [2, 3])
            timeout_ms = TIMEOUT_MS
        wait(self, timeout_ms)

    monkeypatch.setattr("worker.engine.engine.Engine.spare_s", spare_s)
    monkeypatch.setattr(Server, "_wait", wait_for_b)
    router.generate("a", [1, 2, 3])
    router.until(lambda: router.finished("a"))
    other.until(lambda: other.finished("b"))
    plans = s.parts.executor.plans
    assert [len(plan) for plan in plans[:2]] == [1, 2]


def test_work_gets_on_with_each_step_that_ends(serve, monkeypatch):
    s = serve({"step_timeout_s": 7})
    steps = gate(s.parts.executor)
    begins = begun(s.parts.executor)
    router = s.router()
    router.generate("x", [1, 2, 3], max_tokens=2)
    seen = []
    for _ in range(2):
        assert begins.acquire(timeout=20)
        seen += [s.server.progress, s.server.progress]
        steps.release()
    assert seen[0] == seen[1] < seen[2] == seen[3]
    assert {at.limit_s for at in seen} == {7}
    router.until(lambda: router.finished("x"))
    polled: SimpleQueue[WorkProgress | None] = SimpleQueue()
    poll = zmq.Poller.poll
    monkeypatch.setattr(
        "worker.engine.server.zmq.Poller.poll", lambda poller, ms: (polled.put(s.server.progress), poll(poller, ms))[1]
    )
    assert s.server.at_rest(lambda engine: engine.has_work) is False  # so it waits once more
    assert polled.get(timeout=20) is None


def test_a_loop_that_goes_round_without_a_step_does_not_get_on(serve):
    s = serve()
    router = s.router()
    router.send(Subscribe())
    router.until(lambda: router.loads)
    rounds, there = threading.Semaphore(0), s.server.engine.scheduler.schedule
    nothing = SchedulerOutput(None, [], [], None)
    s.server.engine.scheduler.schedule = lambda: rounds.release() or nothing
    router.generate("x", [1, 2, 3])
    seen = set()
    for _ in range(20):
        assert rounds.acquire(timeout=20)
        seen.add(s.server.progress)
    assert len(seen) == 1
    s.server.engine.scheduler.schedule = there
    router.until(lambda: router.finished("x"))


def test_a_replica_that_hangs_in_a_step_says_goodbye(serve):
    s = serve()
    steps = gate(s.parts.executor)
    begins = begun(s.parts.executor)
    router = s.router()
    router.send(Subscribe())
    router.until(lambda: router.loads)
    router.generate("x", [1, 2, 3])
    assert begins.acquire(timeout=20)
    assert s.server.farewell("hung", "rank 0 hangs")
    router.until(lambda: router.farewells == [Farewell("hung", "rank 0 hangs")])
    steps.release(OPEN)


def test_a_replica_that_is_taken_away_ends_with_its_requests(serve):
    s = serve()
    steps = gate(s.parts.executor)
    begins = begun(s.parts.executor)
    router, late = s.router(), s.router()
    for each in (router, late):
        each.send(Subscribe(protocol=PROTOCOL))
        each.until(lambda each=each: each.loads)
    router.generate("x", [1, 2, 3], max_tokens=300)
    assert begins.acquire(timeout=20)
    s.server.drain(3600)
    late.generate("y", [4, 5])  # was on its way

    def late_has_begun() -> bool:
        while late.socket.poll(0):
            late.hear()
        return bool(late.outputs)

    router.until(lambda: late_has_begun() or steps.release())  # each token of x lets another step through
    for each in (router, late):
        each.until(lambda each=each: each.leaving)
    assert not router.farewells and 0 < late.leaving[0].within_s <= router.leaving[0].within_s <= 3600
    steps.release(OPEN)
    for each in (router, late):
        each.until(lambda each=each: each.farewells)
        assert each.farewells[0].reason == "drained" and len(each.leaving) == 1
    assert router.tokens("x") == s.parts.executor.generate([1, 2, 3], 300)
    assert late.tokens("y") == s.parts.executor.generate([4, 5], 5)
    s.thread.join(20)
    assert not s.thread.is_alive() and s.error is None


def test_requests_that_take_too_long_are_left_to_the_routers(serve):
    s = serve()
    steps = gate(s.parts.executor)
    begins = begun(s.parts.executor)
    router, old = s.router(), s.router()
    router.send(Subscribe(protocol=PROTOCOL))
    old.send(Subscribe())  # of the number before `Leaving`
    for each in (router, old):
        each.until(lambda each=each: each.loads)
    router.generate("x", [1, 2, 3], max_tokens=1000)
    assert begins.acquire(timeout=20)
    s.server.drain(0)
    s.server.drain(3600)  # the first counts
    steps.release(OPEN)
    router.until(lambda: router.farewells)
    assert router.leaving and not router.finished("x") and "1 of its requests" in router.farewells[0].message
    s.thread.join(20)
    assert not s.thread.is_alive()
    while old.socket.poll(100):
        old.hear()
    assert not old.leaving and not old.farewells


def test_a_router_of_a_far_version_is_refused_by_name(serve, caplog):
    s = serve()
    router, far = s.router(), s.router()
    far.send(Subscribe("far", "tcp://192.0.2.7:1", PROTOCOL + 2))
    far.until(lambda: far.hellos)
    router.send(Subscribe("near", "tcp://192.0.2.8:1", PROTOCOL + 1))
    router.until(lambda: router.loads)
    assert far.hellos == router.hellos == [Hello(PROTOCOL)]
    assert router.loads[-1].refused_routers == 1
    assert re.search(rf"\bfar\b.*192\.0\.2\.7:1\b.*\b{PROTOCOL + 2}\b", caplog.text)
    s.server.drain(0)
    router.until(lambda: router.farewells)
    assert router.routers == [{"near": "tcp://192.0.2.8:1"}]
    while far.socket.poll(100):
        far.hear()
    assert not far.loads and not far.events and not far.farewells


def test_a_router_of_the_first_version_hears_what_it_knows(serve, monkeypatch):
    s = serve()
    router = s.router()
    router.socket.send(msgspec.msgpack.encode({"type": "Subscribe", "router": "old", "address": "tcp://192.0.2.7:1"}))
    router.until(lambda: router.loads and router.events and router.routers)
    assert not router.hellos
    monkeypatch.setattr(module, "PROTOCOL", 3)
    ancient = s.router()
    ancient.send(Subscribe())
    router.until(lambda: router.loads[-1].refused_routers == 1)
    assert not ancient.socket.poll(0) or isinstance(decode_from_replica(ancient.socket.recv()), Outputs)


def test_who_holds_the_socket_in_a_loop_that_hangs_says_nothing(serve, monkeypatch):
    monkeypatch.setattr(module, "FAREWELL_S", 0.01)
    s = serve()
    assert s.server.at_rest(lambda engine: s.server.farewell("hung", "rank 0 hangs")) is False


def test_an_idle_replica_tells_its_load_again_and_again(serve, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    router = serve().router()
    router.send(Subscribe())
    router.until(lambda: len(router.loads) >= 5)
    assert {load.steps for load in router.loads} == {0}


def test_a_replica_in_a_long_step_is_heard(serve, monkeypatch):
    monkeypatch.setattr(module, "BEAT_S", 0.01)
    monkeypatch.setattr(module, "PROBE_EVERY_S", 1000.0)
    s = serve()
    steps = gate(s.parts.executor)
    begins = begun(s.parts.executor)
    router, stranger = s.router(), s.router()
    router.send(Subscribe())
    router.until(lambda: router.loads)
    stranger.generate("x", [1, 2, 3])
    assert begins.acquire(timeout=20)
    router.until(lambda: router.beats >= 3)
    told = len(router.loads)
    router.until(lambda: router.beats >= 6)
    assert len(router.loads) == told  # beats alone, while no step ends
    stranger.socket.close()  # a beat to a router that is gone does no harm
    router.until(lambda: router.beats >= 9)
    steps.release(OPEN)
    router.until(lambda: router.loads[-1].finished + router.loads[-1].aborts == 1)


def test_only_a_step_is_spoken_for(serve):
    """A loop that hangs elsewhere must be silent."""
    assert serve().server.at_rest(lambda engine: True) is True
    s = serve()
    assert s.server.at_rest(lambda engine: s.server._say_alive()) is False


def test_a_lost_device_ends_the_loop_with_its_name(serve, monkeypatch):
    monkeypatch.setattr("worker.engine.steps._is_lost", lambda device: True)
    s = serve(poison=49)
    router = s.router()
    router.generate("x", [49])
    s.thread.join(20)
    assert isinstance(s.error, DeviceLost)


def test_what_is_asked_of_the_engine_is_answered_by_its_thread_at_rest(serve):
    running = serve()
    steps = gate(running.parts.executor)
    begins = begun(running.parts.executor)
    router = running.router()
    router.generate("a", [1, 2, 3], max_tokens=4)
    with ThreadPoolExecutor(1) as other:
        assert begins.acquire(timeout=20)
        asked = other.submit(running.server.at_rest, lambda engine: (threading.current_thread(), engine.has_work))
        steps.release(OPEN)
        router.until(lambda: router.finished("a"))
        assert asked.result(20) == (running.thread, False)
        with pytest.raises(ZeroDivisionError):
            running.server.at_rest(lambda engine: 1 / 0)
        running.server.stop()
        running.thread.join(20)
        with pytest.raises(RuntimeError, match="ended"):
            running.server.at_rest(lambda engine: None)


def test_stops_though_nobody_ever_spoke(serve):
    serve()


def test_a_request_that_cannot_be_taken_is_answered(serve, monkeypatch):
    def submit(grammar):
        raise ValueError("no compiler today")

    s = serve()
    s.parts.grammars.submit = submit
    router = s.router()
    router.generate("x", [1], grammar=Grammar("regex", "a"))
    router.until(lambda: router.finished("x"))
    assert router.outputs["x"][0].failure.kind == "internal"
    router.generate("x", [1, 2, 3])
    router.until(lambda: len(router.outputs["x"]) == 6)


def test_a_host_that_is_not_here_is_an_error(fake_parts):
    parts = fake_parts()
    with pytest.raises(ValueError, match="cannot listen"):
        Server(Path("none"), WorkerConfig(), host="192.0.2.1", secret=SECRET, load=parts)
    assert parts.grammars.closed
