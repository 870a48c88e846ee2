"""The hit rate of checkpoints next to that of a full cache, where both can be counted by hand."""

import numpy as np
import pytest

from bench.fleet.checkpoint_hits import WindowSizes, hit_rates, with_checkpoints


def test_a_cache_finds_what_its_checkpoints_leave() -> None:
    """Of 5,000 tokens, then others from 3,000 on: the interval, the place where they part, the last page."""
    cache = with_checkpoints(kv_tokens=40_000, rows=8, interval=2048)
    one = np.arange(5000, dtype=np.int32)
    others = [np.concatenate((one[:3000], one[3000:] + 10_000 * n)) for n in (1, 2)]
    assert [cache.use(tokens) for tokens in (one, *others, one)] == [0, 2048, 2992, 4992]
    cache.tree.check_integrity()


@pytest.mark.parametrize("load", ["zipf", "agents"])
def test_nearly_as_much_is_found_as_by_a_full_cache(load: str) -> None:
    full, found = hit_rates(load, 60, [400_000], with_checkpoints(400_000, 133, 2048))
    assert 0.9 * full <= found <= full


@pytest.mark.bench
def test_windows_leave_room_for_more_tokens() -> None:
    """Gemma 3 12B has 8 layers that see all, and 40 that see 1,024 tokens."""
    sizes = WindowSizes.of("gemma3-12b", 400_000, 8192)
    assert (sizes.kv_tokens + 5 * sizes.window_tokens) / 6 == pytest.approx(400_000, rel=0.05)
    assert sizes.tokens_of(32768) > 2.5 * 400_000 > 3 * sizes.tokens_of(512)
    assert 5 * 400_000 < sizes.fitted_tokens_of(65536) < 6 * 400_000
    full, found = hit_rates("agents", 60, [sizes.kv_tokens], sizes.cache(8192, 2048))
    assert 0.9 * full <= found
