"""Costs of a router that knows its fleet: events, snapshots, memory, and the page of metrics.

All are CPU seconds of one thread, so that other work on the machine counts little.
"""

import gc
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.fleet.decision import MOST_TOKEN, PAGE_SIZE
from radix.events import NodeEvent, Removed, Stored
from radix.pages import PagePool
from radix.snapshot import SnapshotWalk
from radix.tree import Tree
from router.fleet import Fleet
from router.metrics import Metrics
from worker.engine.engine import frozen_heap
from worker.engine.server import PIECE_BYTES, PIECE_NODES
from worker.messages import CacheEvents, ReplicaLoad, decode_from_replica, encode

EVENTS_A_FRAME = 16


def events_blocks_s(num_replicas: int, node_tokens: int, count: int, seed: int = 0) -> float:
    """Blocks (pages of 16 tokens) that a router hears of in a CPU second, decoding included. Each replica tells of
    `count` nodes of `node_tokens` tokens below a chain of two, and that as many old ones were evicted: its cache is
    full."""
    rng = np.random.default_rng(seed)
    fleet = Fleet(turn=seed)
    frames: list[tuple[int, bytes]] = []
    for index in range(num_replicas):
        tokens = iter(rng.integers(0, MOST_TOKEN, (count + 2, node_tokens)).astype(np.int32))
        begin: list[NodeEvent] = [Stored(1, 0, next(tokens).tobytes()), Stored(2, 1, next(tokens).tobytes())]
        fleet.join(str(index))
        fleet.apply_events(str(index), CacheEvents("", 0, begin, PAGE_SIZE, piece=0))
        events: list[NodeEvent] = []
        for number in range(3, count + 3):
            events.append(Stored(number, 2, next(tokens).tobytes()))
            if number >= 3 + count // 2:
                events.append(Removed(number - count // 2))
        for at in range(0, len(events), EVENTS_A_FRAME):
            frames.append((index, encode(CacheEvents("", at, events[at : at + EVENTS_A_FRAME], PAGE_SIZE))))
    heard = num_replicas * (count + count - count // 2) * (node_tokens // PAGE_SIZE)
    begin_s = time.thread_time()
    for index, frame in frames:
        message = decode_from_replica(frame)
        assert isinstance(message, CacheEvents)
        if not fleet.apply_events(str(index), message):
            raise AssertionError("no events are lost here")
    return heard / (time.thread_time() - begin_s)


def index_bytes(num_copies: int, node_tokens: int, cached_tokens: int, seed: int = 0) -> int:
    """Bytes that the router's index takes for `cached_tokens` tokens in nodes of `node_tokens`, that `num_copies`
    replicas have alike."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, MOST_TOKEN, (cached_tokens // node_tokens, node_tokens)).astype(np.int32)
    fleet = Fleet(turn=seed)
    for index in range(num_copies):
        fleet.join(str(index))
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(num_copies):
            # Each copy with bytes of its own, as from the wire; the index keeps those of the first.
            events: list[NodeEvent] = [Stored(number + 1, 0, row.tobytes()) for number, row in enumerate(rows)]
            fleet.apply_events(str(index), CacheEvents("", 0, events, PAGE_SIZE, piece=0))
            del events
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def snapshot_stall_s(cached_tokens: int, node_tokens: int, seed: int = 0) -> dict[str, float]:
    """The longest CPU seconds for which a snapshot of a tree stops a thread: the `scheduler`'s, which makes a piece in
    each turn, and the `router`'s, which reads a piece; and, as the replica leaves, the router's again (`leave`)."""
    tree = _tree(cached_tokens, node_tokens, seed)
    fleet, spent = Fleet(turn=seed), {"scheduler": 0.0, "router": 0.0, "leave": 0.0}
    fleet.join("r")

    def timed(where: str, work: Callable[[], Any]) -> Any:
        begin_s = time.thread_time()
        done = work()
        spent[where] = max(spent[where], time.thread_time() - begin_s)
        return done

    walk, frames = timed("scheduler", lambda: SnapshotWalk(tree.root)), list[bytes]()

    def piece() -> bytes:
        events = walk.piece(PIECE_NODES, PIECE_BYTES)
        return encode(CacheEvents("", 0, events, PAGE_SIZE, piece=len(frames), complete=walk.is_done))

    def read(frame: bytes) -> None:
        message = decode_from_replica(frame)
        assert isinstance(message, CacheEvents)
        fleet.apply_events("r", message)

    with frozen_heap():  # as a replica's server has it
        while not walk.is_done:
            frames.append(timed("scheduler", piece))
    num_tokens = tree.num_cached * PAGE_SIZE
    with frozen_heap():  # the tree is no part of a router's process
        for frame in frames:
            timed("router", partial(read, frame))
        (view,) = fleet.snapshot()
        assert view.indexed_tokens == num_tokens
        timed("leave", lambda: fleet.leave("r"))
    return spent


def metrics_stall_s(num_replicas: int) -> tuple[float, float]:
    """CPU seconds of a page of metrics: of its longest piece, for which it stops the event loop, and in all."""
    metrics = Metrics(router="a")
    model = metrics.model("model")
    causes = dict.fromkeys(("compute", "communication", "host", "nothing_to_do", "warm_up"), 1.0)
    for index in range(num_replicas):
        times = model.replica(str(index))
        for histogram in (times.first_token, times.inter_token, times.request, times.queue):
            histogram.observe(0.1)
        model.loads[str(index)] = ReplicaLoad(incarnation="", proposals={"suffix": 1}, stage_seconds=[causes] * 2)
    spent, pieces = [], metrics.pieces()
    while True:
        begin_s = time.thread_time()
        piece = next(pieces, None)
        spent.append(time.thread_time() - begin_s)
        if piece is None:
            return max(spent), sum(spent)


def _tree(cached_tokens: int, node_tokens: int, seed: int) -> Tree:
    """A tree with nodes of `node_tokens`, one below the other up to 8 deep."""
    rng = np.random.default_rng(seed)
    pool = PagePool(cached_tokens // PAGE_SIZE, PAGE_SIZE)
    tree = Tree(PAGE_SIZE, pool)
    deep = min(8, cached_tokens // node_tokens)
    for _ in range(cached_tokens // node_tokens // deep):
        tokens = rng.integers(0, MOST_TOKEN, deep * node_tokens).astype(np.int32)
        for end in range(node_tokens, len(tokens) + 1, node_tokens):
            match = tree.match(tokens[: end - node_tokens])
            pages = pool.allocate(node_tokens // PAGE_SIZE)
            assert pages is not None
            tree.insert(tokens[:end], np.concatenate([match.pages, pages]))
    return tree
