"""Rotary position embedding (https://arxiv.org/abs/2104.09864), and its scaling for long contexts."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclass(frozen=True)
class Rope:
    """The parameters of a rotary embedding. `kind` is one of KINDS, `theta` the base, `scaling` the other parameters of
    that kind, with the names that Hugging Face configurations give them.

    Dimension i of a head is paired with `i + head_dim // 2`. A model with other pairs, or one that rotates only the
    first `rotated` dimensions (None: all), has its heads in `order`: the weights of queries and keys are rearranged as
    they load, which changes no product of the two. Pairs that are not rotated turn by an angle of zero.

    The dynamic kind has no effect up to the model's own context length, and longer contexts are not served: beyond it,
    a token's keys would depend on the lengths of other sequences in the batch. For the same reason longrope has one
    list of factors for all sequences: that for long contexts if `up_to` was told of any.
    """

    head_dim: int
    theta: float
    kind: str = "default"
    scaling: dict[str, Any] = field(default_factory=dict, hash=False)
    rotated: int | None = None
    is_interleaved: bool = False  # whether the model's own pairs are neighbours

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"rope type {self.kind!r} is not supported; these are: {', '.join(KINDS)}")
        if self.rotated is not None and self.rotated % 2:
            raise ValueError(f"an odd number of dimensions, {self.rotated}, cannot be rotated in pairs")

    def up_to(self, length: int) -> "Rope":
        """The same for contexts of at most `length` tokens."""
        if self.kind != "longrope":
            return self
        is_long = length > self.scaling["original_max_position_embeddings"]
        return replace(self, scaling=self.scaling | {"is_long": is_long})

    @property
    def order(self) -> tuple[int, ...] | None:
        """The model's own dimension at each place of a head; None if all are in their places."""
        size, rest = self._size, range(self._size, self.head_dim)
        step, half = (2, 1) if self.is_interleaved else (1, size // 2)
        firsts = [*range(0, size if self.is_interleaved else half, step), *rest[: len(rest) // 2]]
        order = (*firsts, *(place + half for place in firsts[: size // 2]), *rest[len(rest) // 2 :])
        return None if order == tuple(range(self.head_dim)) else order

    @property
    def _size(self) -> int:
        """Number of rotated dimensions of a head."""
        return self.head_dim if self.rotated is None else self.rotated

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines of the dimensions that are rotated: 1 except for yarn and longrope, where it
        takes the place of a softmax temperature."""
        if self.kind == "longrope":
            return self._longrope_amplitude()
        if self.kind != "yarn":
            return 1.0
        if (given := self.scaling.get("attention_factor")) is not None:
            return float(given)
        factor, mscale = self.scaling["factor"], self.scaling.get("mscale")
        over = self.scaling.get("mscale_all_dim")
        if mscale and over:
            return yarn_temperature(factor, mscale) / yarn_temperature(factor, over)
        return yarn_temperature(factor, 1.0)

    def frequencies(self) -> torch.Tensor:
        """Radians per position of each pair of dimensions: float32 `[head_dim // 2]`."""
        turning = self._turning() if self._size else torch.empty(0)
        return torch.cat((turning, torch.zeros((self.head_dim - self._size) // 2)))

    def _turning(self) -> torch.Tensor:
        """Radians per position of each pair that is rotated."""
        exponents = torch.arange(0, self._size, 2, dtype=torch.float32) / self._size
        plain = 1.0 / (self.theta**exponents)
        if self.kind == "proportional":  # pairs beyond a part of the head do not turn, and the others as in a whole one
            turning = int(self.scaling.get("partial_rotary_factor", 1.0) * self.head_dim // 2)
            plain[turning:] = 0.0
            return plain / self.scaling.get("factor", 1.0)
        if self.kind == "linear":
            return plain / self.scaling["factor"]
        if self.kind == "llama3":
            return _llama3(plain, self.scaling)
        if self.kind == "yarn":
            return self._yarn(plain)
        if self.kind == "longrope":
            factors = self.scaling["long_factor" if self.scaling.get("is_long") else "short_factor"]
            return plain / torch.tensor(factors, dtype=torch.float32)
        return plain

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines for `rotate`, `[n, 1, head_dim]` each, of int64 positions `[n]`. The sines of the first
        half are negated. Angles are computed in float32 for any dtype."""
        turns = (positions[:, None].float() * self.frequencies().to(positions.device))[:, None]
        factors = self._amplitudes(positions.device)
        cos, sin = turns.cos() * factors, turns.sin() * factors
        return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)

    def table(self, length: int, device: torch.device) -> torch.Tensor:
        """The cosines, then the sines, of every position below `length`: float32 `[length, head_dim]`."""
        turns = torch.arange(length, dtype=torch.float32, device=device)[:, None] * self.frequencies().to(device)
        factors = self._amplitudes(device)
        return torch.cat((turns.cos() * factors, turns.sin() * factors), dim=-1)

    def _amplitudes(self, device: torch.device) -> torch.Tensor:
        """`amplitude` of each pair of dimensions, 1 for those that are not rotated: float32 `[head_dim // 2]`."""
        factors = torch.ones(self.head_dim // 2, device=device)
        factors[: self._size // 2] = self.amplitude
        return factors

    def _longrope_amplitude(self) -> float:
        """As https://arxiv.org/abs/2402.13753 has it, or the model's own."""
        scaling = self.scaling
        for name in ("long_mscale" if scaling.get("is_long") else "short_mscale", "attention_factor"):
            if (given := scaling.get(name)) is not None:
                return float(given)
        factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0

    def _yarn(self, plain: torch.Tensor) -> torch.Tensor:
        """Interpolates slow dimensions and leaves fast ones as they are, with a ramp between the two
        (https://arxiv.org/abs/2309.00071)."""
        original = self.scaling["original_max_position_embeddings"]

        def dimension(rotations: float) -> float:
            """The dimension that makes `rotations` full turns within the original context."""
            return self._size * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low = dimension(self.scaling.get("beta_fast") or 32)
        high = dimension(self.scaling.get("beta_slow") or 1)
        if self.scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self._size - 1)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(self._size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        return plain / self.scaling["factor"] * ramp + plain * (1 - ramp)


def yarn_temperature(factor: float, scale: float) -> float:
    """The square root of the factor by which YaRN multiplies scores (https://arxiv.org/abs/2309.00071, section 3.4),
    for contexts that are `factor` times as long. `scale` is the model's own weight of it."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _llama3(plain: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Stretches wavelengths beyond the original context, leaves short ones, and interpolates between the two."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi / plain)
    smooth = (turns - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    return torch.where(turns < low, plain / factor, torch.where(turns > high, plain, between))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn `[n, heads, head_dim]` by the angles of `Rope.angles`; dimension i is paired with `i + head_dim // 2`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
