"""The part of the prompts' tokens that was cached, and the part that any placement could have found cached.

No placement beats one cache that never evicts and that all requests share: of N pages of prompts, U of which have
different prefixes, it computes U. So (N - U) / N is a ceiling for the hit rate. U is estimated in bounded memory.

Routers tell each other what they counted (`router.replicas.peers`), so that each knows the sums over all.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from radix.node import pack
from radix.salt import salted
from router.fleet.optimistic_prefixes import multipliers

PAGE = 16  # tokens: the page size of replicas, unless it is set
MOST_TOKENS = 1 << 17  # of one prompt that are counted: these take 2 ms, and an event loop waits for them
INDEX_BITS = 12
RANK_BITS = 64 - INDEX_BITS


class DistinctCount:
    """The number of different 64-bit hashes, estimated in 4 KiB with a standard error of 1.6%.

    HyperLogLog (Flajolet, Fusy, Gandouet, Meunier 2007), with the improved raw estimator of Ertl (arXiv 1702.01284),
    which is as exact for small numbers as for large ones. `registers`: uint8 [4096].
    """

    def __init__(self) -> None:
        self.registers = np.zeros(1 << INDEX_BITS, dtype=np.uint8)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Counts hashes, uint64 [n]. Their bits need not be independent."""
        mixed = _mixed(hashes)
        # A float64 holds 52 bits exactly, and its exponent is their length. The longer the row of zeros before them,
        # the more hashes there were.
        lengths = np.frexp((mixed & np.uint64((1 << RANK_BITS) - 1)).astype(np.float64))[1]
        ranks = (RANK_BITS + 1 - lengths).astype(np.uint8)
        np.maximum.at(self.registers, mixed >> np.uint64(RANK_BITS), ranks)

    def merge(self, registers: NDArray[np.uint8]) -> None:
        """Counts what another one has counted, too. What both have counts once."""
        np.maximum(self.registers, registers, out=self.registers)

    def estimate(self) -> float:
        """The number of different hashes that were added."""
        num_registers = len(self.registers)
        counts = np.bincount(self.registers, minlength=RANK_BITS + 2).tolist()
        z = num_registers * _tau(1 - counts[RANK_BITS + 1] / num_registers)
        for count in reversed(counts[1 : RANK_BITS + 1]):
            z = (z + count) / 2
        z += num_registers * _sigma(counts[0] / num_registers)
        return num_registers**2 / (2 * math.log(2) * z)


class Reuse(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one router since its start: tokens of prompts, those of them that were cached, and whole pages of
    prompts. `registers`: of the `DistinctCount` of the pages."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    pages: int = 0
    registers: bytes = b""


class PrefixReuse:
    """The hit rate of a model's requests and its ceiling, since this router's start. Of routers that were there before,
    all that they have counted is included."""

    def __init__(self) -> None:
        self._distinct = DistinctCount()
        self._own = [0, 0, 0]  # prompt tokens, cached tokens, pages
        self._others: dict[str, tuple[int, int, int]] = {}  # by router, the newest

    def add(self, token_ids: list[int], cached_tokens: int, cache_salt: str = "") -> None:
        """Counts a request whose first output has come: the tokens that it had by its start, and those of them that its
        replica had cached."""
        token_ids = token_ids[:MOST_TOKENS]
        tokens = np.frombuffer(pack(token_ids), dtype=np.int32)
        if cache_salt:
            tokens = salted(tokens, cache_salt)
        hashes = page_hashes(tokens)
        self._distinct.add(hashes)
        for index, more in enumerate((len(token_ids), min(cached_tokens, len(token_ids)), len(hashes))):
            self._own[index] += more

    def report(self) -> Reuse:
        """The own counts, for other routers. The pages of others are among its registers, which does no harm:
        they count once."""
        prompt_tokens, cached_tokens, pages = self._own
        return Reuse(prompt_tokens, cached_tokens, pages, self._distinct.registers.tobytes())

    def hear(self, router: str, reuse: Reuse) -> None:
        """Counts what another router tells. Raises ValueError for registers that are none."""
        registers = np.frombuffer(reuse.registers, dtype=np.uint8)
        if registers.shape != self._distinct.registers.shape or registers.max() > RANK_BITS + 1:
            raise ValueError(f"{len(registers)} registers of distinct pages, which are none of Shoal's")
        self._distinct.merge(registers)
        self._others[router] = (reuse.prompt_tokens, reuse.cached_tokens, reuse.pages)

    @property
    def hit_rate(self) -> float | None:
        """The part of the prompts' tokens that was cached; None before the first request."""
        prompt_tokens, cached_tokens, _ = self._sums()
        return cached_tokens / prompt_tokens if prompt_tokens else None

    @property
    def ceiling(self) -> float | None:
        """The part of the prompts' tokens that any placement could have found cached; None before the first request.
        The standard error is 0.016 times the part that it could not."""
        prompt_tokens, _, pages = self._sums()
        if not prompt_tokens:
            return None
        return max(0.0, pages - self._distinct.estimate()) * PAGE / prompt_tokens

    def _sums(self) -> tuple[int, int, int]:
        prompt_tokens, cached_tokens, pages = map(sum, zip(self._own, *self._others.values(), strict=True))
        return prompt_tokens, cached_tokens, pages


def page_hashes(tokens: NDArray[np.int32]) -> NDArray[np.uint64]:
    """A hash of the prefix of `tokens` [n] that ends with each of its whole pages, uint64 [n // PAGE]: as
    `router.fleet.optimistic_prefixes.prefix_hashes`, at every page."""
    values = tokens[: len(tokens) // PAGE * PAGE].astype(np.uint64)
    values += np.uint64(1)
    values *= multipliers(len(values).bit_length())[: len(values)]
    return np.cumsum(values.reshape(-1, PAGE).sum(axis=1, dtype=np.uint64), dtype=np.uint64)


def _mixed(hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _sigma(x: float) -> float:
    """Ertl's sigma: the sum over k of x^(2^k) 2^(k-1), and x."""
    if x == 1:
        return math.inf
    y, z, before = 1.0, x, math.nan
    while z != before:
        x, before = x * x, z
        z += x * y
        y *= 2
    return z


def _tau(x: float) -> float:
    """Ertl's tau: a third of (1 - x) less the sum over k of (1 - x^(2^-k))^2 2^-k."""
    if x in (0, 1):
        return 0.0
    y, z, before = 1.0, 1 - x, math.nan
    while z != before:
        x, before, y = math.sqrt(x), z, y / 2
        z -= (1 - x) ** 2 * y
    return z / 3
