"""The wait that a new request would have, predicted for each replica from what placement knows of it."""

from dataclasses import dataclass

import numpy as np

from router.fleet.placement import MIN_PROMPT_SHARE, Candidates, Floats


@dataclass(frozen=True, slots=True)
class ShortestQueue:
    """The least of all replicas' queues: `wait_s`, seconds until a prompt that comes now would begin, and `tokens`,
    prompt tokens that wait ahead of it. Not necessarily the same replica's."""

    wait_s: float
    tokens: int


def wait_s(candidates: Candidates) -> Floats:
    """Seconds until a prompt that comes now would begin on each candidate, float64 [replicas]: the step that runs, the
    prompts that wait, and the time until enough outputs have ended where the KV is full. As in `placement.cost_s`, for
    a prompt of no tokens."""
    c = candidates
    decoding_s = c["step_s"] + c["decode_s"] * c["running"] + c["context_s"] * c["context_tokens"]
    waiting_s = c["waiting_tokens"] * c["token_s"] + c["waiting_products"] * c["product_s"]
    ahead_s = waiting_s / np.maximum(MIN_PROMPT_SHARE, 1 - decoding_s / c["full_s"])
    running_s = np.where(c["running"] + c["waiting"] > 0, np.minimum(c["full_s"], decoding_s + waiting_s), 0.0)
    held = c["context_tokens"] + c["waiting_tokens"] + c["waiting"] * c["output_tokens"] / 2
    over = np.where(c["kv_tokens"] > 0, np.maximum(0.0, held - c["kv_tokens"]), 0.0)
    return running_s / 2 + ahead_s + over / np.maximum(1.0, c["context_tokens"]) * c["output_tokens"] * decoding_s
