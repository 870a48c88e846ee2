"""The CPU time of a placement: the real `Fleet`, with caches and prompts of a given size."""

import time

import numpy as np

from radix.events import NodeEvent, Stored
from router.fleet.fleet import Fleet
from worker.messages import CacheEvents, ReplicaLoad

PAGE_SIZE = 16
NODE_TOKENS = 2048  # of each of the two nodes of a cached prompt: what many share, and what follows
SHARED = 64  # different first nodes; every replica has all of them
MAX_TOKEN_ID = 1 << 17


def decision_cpu_s(num_replicas: int, cached_tokens: int, count: int, seed: int = 0) -> np.ndarray:
    """CPU seconds of `count` placements of prompts of 4,096 tokens, float64 [count]. `cached_tokens`: of all replicas
    together. A load comes from a replica for each placement, and requests end in their order, 8 a replica at once."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, MAX_TOKEN_ID, (SHARED, NODE_TOKENS)).astype(np.int32)
    fleet = Fleet(turn=seed)
    names = [f"{index:03d}" for index in range(num_replicas)]
    for name in names:
        fleet.join(name)
        fleet.apply_events(
            name, CacheEvents("", 0, _cache(rng, shared, cached_tokens // num_replicas), PAGE_SIZE, piece=0)
        )
        fleet.apply_load(name, ReplicaLoad(incarnation="", kv_tokens_total=800_000))
    spent_s, most = np.empty(count), 8 * num_replicas
    for number in range(count):
        own = rng.integers(0, MAX_TOKEN_ID, NODE_TOKENS).astype(np.int32)
        prompt = np.concatenate([shared[rng.integers(SHARED)], own]).tolist()
        begin_s = time.thread_time()
        booking = fleet.place(str(number), prompt, names)
        spent_s[number] = time.thread_time() - begin_s
        fleet.first_token(str(number - most // 2))
        fleet.release(str(number - most))
        seen = booking.number if number % 2 else booking.number - 1
        fleet.apply_load(booking.replica_id, ReplicaLoad(incarnation="", bookings_seen=seen, kv_tokens_total=800_000))
    return spent_s


def _cache(rng: np.random.Generator, shared: np.ndarray, tokens: int) -> list[NodeEvent]:
    """A tree with all shared nodes, and others below them, with `tokens` tokens in all."""
    events: list[NodeEvent] = [Stored(1 + index, 0, node.tobytes()) for index, node in enumerate(shared)]
    for number in range(max(0, tokens // NODE_TOKENS - SHARED)):
        node = rng.integers(0, MAX_TOKEN_ID, NODE_TOKENS).astype(np.int32).tobytes()
        events.append(Stored(1 + SHARED + number, 1 + number % SHARED, node))
    return events
