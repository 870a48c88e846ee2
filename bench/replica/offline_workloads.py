"""Offline workloads: prompts as token ids, and an output length for each prompt.

The first four workloads are those by which engines are commonly compared. Token ids come from Python's own random
numbers alone, so any engine can be given the same prompts. `scale` changes the number of prompts, not their lengths.
For `bs1`, it changes the output length.
"""

import random
from collections.abc import Callable

Job = tuple[list[list[int]], list[int]]
"""Prompts, and the output length of each prompt."""

MAX_TOKEN_ID = 10_000  # highest token id in prompts


def mini(scale: float = 1.0) -> Job:
    """256 prompts. Lengths of prompts and outputs are uniform from 100 to 1,024."""
    rng, count = random.Random(0), scaled(256, scale)
    prompts = [_tokens(rng, rng.randint(100, 1024)) for _ in range(count)]
    return prompts, [rng.randint(100, 1024) for _ in range(count)]


def bs1(scale: float = 1.0) -> Job:
    """A single prompt of 1,024 tokens, 512 output tokens."""
    return [_tokens(random.Random(1), 1024)], [max(2, int(512 * scale))]


def prefill(scale: float = 1.0) -> Job:
    """64 prompts of 4,096 tokens, one output token each."""
    rng, count = random.Random(2), scaled(64, scale)
    return [_tokens(rng, 4096) for _ in range(count)], [1] * count


def sharedprefix(scale: float = 1.0) -> Job:
    """64 groups of 8 prompts, 64 output tokens each. A prompt has a prefix of 2,048 tokens, shared by its group, and
    128 tokens of its own. The prompts of a group follow one another."""
    rng, prompts = random.Random(3), []
    for _ in range(scaled(64, scale)):
        shared = _tokens(rng, 2048)
        prompts += [shared + _tokens(rng, 128) for _ in range(8)]
    return prompts, [64] * len(prompts)


def sharedprefix_interleaved(scale: float = 1.0) -> Job:
    """The prompts of `sharedprefix` in another order: the first one of every group, then the second, and so on."""
    prompts, lengths = sharedprefix(scale)
    return [prompt for member in range(8) for prompt in prompts[member::8]], lengths


def pressure(scale: float = 1.0) -> Job:
    """256 prompts of 1,024 tokens, 1,024 output tokens each, for a KV cache that holds only a few of them."""
    rng, count = random.Random(4), scaled(256, scale)
    return [_tokens(rng, 1024) for _ in range(count)], [1024] * count


JOBS: dict[str, Callable[[float], Job]] = {
    job.__name__: job for job in (mini, bs1, prefill, sharedprefix, sharedprefix_interleaved, pressure)
}


def scaled(count: int, scale: float) -> int:
    """`count` times `scale`, rounded down, at least 1."""
    return max(1, int(count * scale))


def fresh(length: int, seed: int) -> list[int]:
    """A prompt that is in no workload."""
    return _tokens(random.Random(1_000_000 + seed), length)


def _tokens(rng: random.Random, length: int) -> list[int]:
    return [rng.randint(0, MAX_TOKEN_ID) for _ in range(length)]
