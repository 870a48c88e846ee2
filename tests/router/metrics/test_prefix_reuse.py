"""The hit rate of the caches, and its ceiling."""

import numpy as np
import pytest

from router.metrics.prefix_reuse import MOST_TOKENS, PAGE, DistinctCount, PrefixReuse, Reuse


@pytest.mark.parametrize("number", [0, 1, 10, 1_000, 4_096, 12_000, 300_000])
def test_different_hashes_are_counted_within_four_standard_errors(number: int) -> None:
    count = DistinctCount()
    hashes = np.arange(number, dtype=np.uint64)  # mixed within
    for _ in range(2):  # what comes again counts once
        count.add(hashes)
    assert count.estimate() == pytest.approx(number, rel=4 * 0.016, abs=0.5)


def test_what_two_have_counted_counts_once() -> None:
    one, other, both = DistinctCount(), DistinctCount(), DistinctCount()
    one.add(np.arange(0, 3000, dtype=np.uint64))
    other.add(np.arange(2000, 5000, dtype=np.uint64))
    both.add(np.arange(0, 5000, dtype=np.uint64))
    one.merge(other.registers)
    assert one.estimate() == both.estimate()


def prompts(groups: int, each: int, shared: int = 64, own: int = 32) -> list[list[int]]:
    """`groups` prefixes of `shared` pages, each with `each` endings of `own` pages."""
    random = np.random.default_rng(1)
    made = []
    for _ in range(groups):
        prefix = random.integers(0, 1 << 17, shared * PAGE).tolist()
        made += [prefix + random.integers(0, 1 << 17, own * PAGE).tolist() for _ in range(each)]
    return made


def test_the_ceiling_is_what_one_endless_cache_would_have() -> None:
    reuse = PrefixReuse()
    assert (reuse.hit_rate, reuse.ceiling) == (None, None)
    for prompt in prompts(groups=10, each=8):
        reuse.add(prompt, cached_tokens=512)
    assert reuse.hit_rate == pytest.approx(512 / (96 * PAGE))
    known = 10 * 7 * 64 / (80 * 96)
    assert reuse.ceiling == pytest.approx(known, abs=4 * 0.016 * (1 - known))


def test_an_incomplete_page_is_never_cached() -> None:
    reuse = PrefixReuse()
    for _ in range(100):
        reuse.add([7] * (PAGE + 4), cached_tokens=0)
    assert reuse.ceiling == pytest.approx(0.99 * 0.8, abs=0.01)
    reuse.add([], cached_tokens=0)


def test_prefixes_of_two_salts_are_different() -> None:
    reuse = PrefixReuse()
    for number in range(50):
        reuse.add([7] * 1600, cached_tokens=0, cache_salt=str(number))
    assert reuse.ceiling == pytest.approx(0, abs=4 * 0.016)


def test_a_long_prompt_is_counted_up_to_a_length() -> None:
    reuse = PrefixReuse()
    reuse.add([1] * (MOST_TOKENS + 1000), cached_tokens=MOST_TOKENS + 500)
    assert reuse.hit_rate == 1
    assert reuse.report().pages == MOST_TOKENS // PAGE


def test_routers_that_tell_each_other_know_the_sum() -> None:
    routers = {name: PrefixReuse() for name in "abc"}
    alone = PrefixReuse()
    for number, prompt in enumerate(prompts(groups=6, each=10)):
        list(routers.values())[number % 3].add(prompt, cached_tokens=number * 10)
        alone.add(prompt, cached_tokens=number * 10)
    for _ in range(2):  # they tell all again and again
        for name, reuse in routers.items():
            for other, its in routers.items():
                if other != name:
                    reuse.hear(other, its.report())
    for reuse in routers.values():
        assert (reuse.hit_rate, reuse.ceiling) == (alone.hit_rate, alone.ceiling)


@pytest.mark.parametrize("registers", [b"", b"\0" * 100, b"\xff" * 4096])
def test_registers_that_are_none_are_refused(registers: bytes) -> None:
    reuse = PrefixReuse()
    with pytest.raises(ValueError, match="registers"):
        reuse.hear("other", Reuse(registers=registers))
    assert reuse.ceiling is None
