"""The products of a layer's experts: MLPs, gated (https://arxiv.org/abs/2002.05202) or not, of which each token uses a
few."""

from collections.abc import Callable

import torch

from kernels.experts.tiles import ExpertTiles, TunedTiles, default_tiles
from kernels.experts.weights import ExpertWeight, ExpertWeights, in_memory
from kernels.linear.linear import Linear
from kernels.ops.activation import ClampedSwiGLU, gelu_tanh, gelu_tanh_and_mul, relu2, silu_and_mul

Activation = Callable[[torch.Tensor], torch.Tensor]
"""Gated activation, `[n, 2 * size]` to `[n, size]`; without a gate, `[n, size]` to the same."""

_PLAIN = relu2, gelu_tanh


class Experts:
    """A layer's experts, or the part of them that a rank holds: for a token x, the sum of `weight * down(gate * up)`
    over its experts, with `gate` activated; without a gate of `weight * down(up)`, with `up` activated.

    | where | how |
    | --- | --- |
    | CPU | tokens are grouped by expert, and only experts with tokens are computed, each with a `Linear` |
    | GPU | grouped products in Triton (`kernels.experts.grouped`), which need no number from the device |

    `first` is the number of the first expert here. A token's experts that are elsewhere add nothing.
    """

    def __init__(
        self,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        activation: Activation,
        first: int = 0,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        total: int | None = None,
    ) -> None:
        """gate_up: `[experts, 2 * size, hidden_size]`, the gates first. down: `[experts, hidden_size, size]`. The
        activation is `silu_and_mul`, `gelu_tanh_and_mul` or a `ClampedSwiGLU`. With `relu2` or `gelu_tanh` there is no
        gate: gate_up is `[experts, size, hidden_size]`. biases: of gate_up, `[experts, 2 * size]`, and of down,
        `[experts, hidden_size]`. On a GPU weights may be in 8 bits, or both in 4 bits, with gates and ups in turns
        (`Mxfp4Weight`): activations are not. total: number of the layer's experts, of which the router chooses; by
        default those here."""
        clamped = activation if isinstance(activation, ClampedSwiGLU) else None
        if clamped is None and activation not in (silu_and_mul, gelu_tanh_and_mul, *_PLAIN):
            known = "silu, the tanh form of gelu, or a clamped SwiGLU; without a gate by the square of relu, or gelu"
            raise ValueError(f"experts are activated by {known}")
        self.first, self.count = first, len(gate_up if isinstance(gate_up, torch.Tensor) else gate_up[0])
        self.total = self.count if total is None else total
        self.activation = activation
        self.tuned: TunedTiles | None = None  # set by `kernels.experts.autotune.autotune`
        self._each: list[tuple[Linear, Linear]] = []
        if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor) or gate_up.is_cuda:
            is_gelu, is_gated = activation in (gelu_tanh_and_mul, gelu_tanh), activation not in _PLAIN
            first_bias, last_bias = (None, None) if biases is None else (each.contiguous() for each in biases)
            (first_weight, first_scales), (last_weight, last_scales) = in_memory(gate_up), in_memory(down)
            biases_and_scales = first_bias, last_bias, first_scales, last_scales
            self.weights = ExpertWeights(
                first_weight, last_weight, first, is_gelu, clamped, *biases_and_scales, is_gated
            )
        else:
            first_biases, last_biases = ([None] * len(gate_up),) * 2 if biases is None else biases
            self._each = [
                (Linear(*one), Linear(*other))
                for one, other in zip(
                    zip(gate_up, first_biases, strict=True), zip(down, last_biases, strict=True), strict=True
                )
            ]

    def __call__(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns `[n, hidden_size]` in x's dtype, in `out` if that is given. x: `[n, hidden_size]`, contiguous.
        chosen, weights: as `kernels.experts.routing.route` returns them."""
        if x.is_cuda:
            from kernels.experts import grouped

            return grouped.experts(self.weights, x, chosen, weights, self.tiles(len(x), chosen.shape[1]), out)
        return self._by_expert(x, chosen, weights, out)

    def tiles(self, tokens: int, top_k: int) -> ExpertTiles:
        """Tiles of the grouped products for a step of `tokens` tokens."""
        return self.default_tiles(tokens, top_k) if self.tuned is None else self.tuned.find(tokens)

    def default_tiles(self, tokens: int, top_k: int) -> ExpertTiles:
        """The tiles before any were timed."""
        return default_tiles(tokens, top_k, self.total, self.weights.is_mxfp4)

    def _by_expert(
        self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Runs each expert once, on all its tokens. A token's experts are summed up in the order of their numbers, so
        that the sum does not depend on the other tokens."""
        total = torch.zeros_like(x) if out is None else out.zero_()
        pairs = chosen.flatten().argsort(stable=True)
        tokens = pairs // chosen.shape[1]
        weight = weights.flatten()[pairs, None].to(x.dtype)
        counts = torch.bincount(chosen.flatten(), minlength=self.first + self.count).tolist()
        begin = sum(counts[: self.first])
        for (gate_up, down), count in zip(self._each, counts[self.first : self.first + self.count], strict=True):
            if count:
                own = tokens[begin : begin + count]
                product = down(self.activation(gate_up(x[own])))
                total.index_add_(0, own, product.mul_(weight[begin : begin + count]))
            begin += count
        return total
