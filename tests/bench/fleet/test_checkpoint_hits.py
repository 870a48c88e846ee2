"""The hit rate of checkpoints next to that of a full cache, where both can be counted by hand."""

import numpy as np
import pytest

from bench.fleet.checkpoint_hits import CheckpointCache, hit_rates


def test_a_cache_finds_what_its_checkpoints_leave() -> None:
    """Of 5,000 tokens, then others from 3,000 on: the interval, the place where they part, the last page."""
    cache = CheckpointCache(kv_tokens=40_000, rows=8, interval=2048)
    one = np.arange(5000, dtype=np.int32)
    others = [np.concatenate((one[:3000], one[3000:] + 10_000 * n)) for n in (1, 2)]
    assert [cache.use(tokens) for tokens in (one, *others, one)] == [0, 2048, 2992, 4992]
    cache.tree.check_integrity()


@pytest.mark.parametrize("load", ["zipf", "agents"])
def test_nearly_as_much_is_found_as_by_a_full_cache(load: str) -> None:
    full, found, _ = hit_rates(load, 60, 400_000, 2048)
    assert 0.9 * full <= found <= full
