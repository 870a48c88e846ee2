"""The rate of requests that a fleet can just serve, from the cost model alone: the same for every placement rule."""

from collections.abc import Sequence

import numpy as np

from bench.fleet.hardware import MAX_RUNNING, ReplicaHardware
from bench.fleet.one_cache import OneCache
from bench.fleet.workloads import FleetRequest, chain, token_ids
from pipeline.shape import BatchShape

FULL = 0.92  # of the objective's step: without its margin


def ideal_hits(requests: Sequence[FleetRequest], num_pages: int, page_size: int) -> list[tuple[FleetRequest, int]]:
    """All requests, each with the prompt tokens that one cache of `num_pages` pages has. First requests come in their
    order; a follow-up comes before the first request that arrives a second later for each turn before it."""
    order: list[tuple[float, FleetRequest]] = []
    for first in requests:
        order += [(first.at_s + turn, request) for turn, request in enumerate(chain([first]))]
    order.sort(key=lambda entry: entry[0])
    cache, found = OneCache(num_pages, page_size), []
    for _, request in order:
        found.append((request, cache.use(token_ids(request.spans))))
        cache.use(token_ids((*request.spans, request.answer)))
    return found


def capacity(requests: Sequence[FleetRequest], hardware: ReplicaHardware, num_replicas: int) -> float:
    """First requests a second that `num_replicas` replicas can just serve, with follow-ups, if each prompt has as much
    cached as one cache of all their pages would have.

    In a full step, d decodes make d tokens, and so d / output requests end. As many begin: their
    uncached tokens are in the step too. d is the most for which such a step is not too long, and that slots and pages
    allow.
    """
    hits = ideal_hits(requests, num_replicas * hardware.num_pages, hardware.page_size)
    cold = len(hits) // 3  # while the cache fills
    rows = np.array(
        [(request.prompt_tokens, cached, request.output_tokens) for request, cached in hits[cold:]], dtype=float
    )
    prompt, cached, output = rows.T
    uncached = prompt - cached
    before = ((uncached * cached).sum() + (uncached**2).sum() / 2) / uncached.sum()
    context = ((prompt + output / 2) * output).sum() / output.sum()

    def step_s(decodes: float) -> float:
        shape = BatchShape.decoding(round(decodes), round(decodes * context))
        tokens = decodes * uncached.mean() / output.mean()
        shape.tokens += round(tokens)
        shape.chunks, shape.prefix_products = 1, round(tokens * before)
        shape.prefixes = round(tokens * cached.mean() / max(1.0, uncached.mean()))
        return hardware.costs.predict(shape)

    full_s = FULL * hardware.objective.tbt_s
    least, most = 0.01, min(MAX_RUNNING, hardware.num_pages * hardware.page_size / context)
    if step_s(most) > full_s:
        for _ in range(40):
            middle = (least + most) / 2
            least, most = (middle, most) if step_s(middle) <= full_s else (least, middle)
    rate_s = most / output.mean() / max(step_s(most), 1e-9)
    return num_replicas * rate_s * len(requests) / len(hits)
