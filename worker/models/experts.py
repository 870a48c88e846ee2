"""Experts in place of a layer's MLP (https://arxiv.org/abs/1701.06538): a router chooses a few for each token."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.experts.choice import Routing
from kernels.experts.experts import Experts
from kernels.experts.mxfp4_weight import BYTES as MXFP4_BYTES
from kernels.experts.routing import route
from kernels.experts.tiles import EACH_PAIR
from kernels.experts.weights import ExpertWeight
from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.ops.activation import ClampedSwiGLU
from kernels.ops.norm import rms_norm
from worker.models.residual_stream import EMBEDDING_BUFFER, Activation, OneTokenStream, Part, ResidualStream


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes of the experts, in elements.

    | field | meaning |
    | --- | --- |
    | `count` | experts of a layer |
    | `intermediate_size` | of one expert |
    | `layers` | for each layer whether it has experts; the others have an MLP |
    | `shared_size` | intermediate size of the shared experts together, which all tokens use; 0 for none |
    | `has_shared_gate` | the output of the shared experts is multiplied by a gate of each token |
    | `has_bias` | the router has a bias that counts for the choice of experts alone |
    | `has_product_biases` | the products of the router and of the experts have biases |
    | `activation` | the experts' own; None for that of the MLPs |
    | `is_beside_mlp` | the layer has an MLP too, of `shared_size`, with norms of its own (`ExpertsBesideMLP`) |
    | `scales_inputs` | with one expert a token: its weight multiplies the expert's input, in place of its output |
    | `unit` | a rank's part of `intermediate_size` is a multiple of it, with padding |
    | `in_mxfp4` | the checkpoint has the experts' matrices in MXFP4, 4.25 bits a weight |
    | `latent_size` | of latents between two products, which the experts read and write; None: the hidden states |
    | `held` | with expert parallelism, the numbers of the experts that the rank holds, each whole; None: all experts |

    With several ranks the sizes are those of one rank.
    """

    count: int
    intermediate_size: int
    routing: Routing
    layers: tuple[bool, ...]
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    has_product_biases: bool = False
    activation: ClampedSwiGLU | None = None
    is_beside_mlp: bool = False
    scales_inputs: bool = False
    unit: int = 1
    in_mxfp4: bool = False
    latent_size: int | None = None
    held: range | None = None

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight."""
        return MXFP4_BYTES if self.in_mxfp4 else 2.0

    @property
    def own(self) -> range:
        """Numbers of the experts that the rank holds, or of those of which it holds a part."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True)
class SharedExperts:
    """MLP that all tokens use, next to the experts, gated or not as they are: without a gate, `gate_up` has ups alone.
    `gate`, of the output: `[1, hidden_size]`, or None."""

    gate_up: AnyLinear
    down: AnyLinear
    activation: Activation
    gate: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Output for x, `[n, hidden_size]` both, in `out` if given."""
        out = self.down(self.activation(self.gate_up(x)), out)
        return out if self.gate is None else out.mul_((x @ self.gate.t()).sigmoid_())


@dataclass(frozen=True)
class ExpertMLP:
    """Experts of a layer, with their router. Parameters are named as in `parameter_shapes`.

    All ranks route all tokens, by the same numbers, and each computes its part of the experts: a part of each, or some
    experts whole. Either way the ranks' outputs are summed up. `load` counts the tokens of each expert, if given.

    With `latent`, experts read the first of its products, and the second one reads the sum of their outputs. The ranks
    have both products whole, and sum up what the second one gives.

    On a GPU, shared experts may be the last `always` of `experts`, which every token has (`with_shared`). If
    `is_always_gated`, the last row of `router` is their gate.
    """

    norm: torch.Tensor | None
    router: Linear
    experts: Experts
    routing: Routing
    choice_bias: torch.Tensor | None = None
    shared: SharedExperts | None = None
    out_norm: torch.Tensor | None = None
    always: int = 0
    is_always_gated: bool = False
    load: torch.Tensor | None = None
    scales_inputs: bool = False
    latent: tuple[AnyLinear, AnyLinear] | None = None

    @property
    def experts_of_token(self) -> int:
        """Experts that compute for a token."""
        return self.routing.top_k + self.always

    def last(self, x: ResidualStream) -> tuple[Part, torch.Tensor]:
        """The operator that gives what `forward` adds, and what that reads, made of the hidden states as they are."""
        return self.product, x.normalised(self.norm)

    def forward(self, x: ResidualStream) -> None:
        """Adds the output of the experts."""
        if isinstance(x, OneTokenStream) and self._is_fused_for_one:
            x.add_fused(self._product_of_one)
        else:
            x.add_product(self.product, x.normalised(self.norm), self.out_norm)

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Output of this rank's part of the experts, `[n, hidden_size]`, in `out` if given. x: `[n, hidden_size]`."""
        chosen, weights = self._route(self.router.in_float32(x))
        own = x
        if self.scales_inputs:
            own, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        if self.latent is None:
            total = self.experts(own, chosen, weights, out)
        else:
            total = self.latent[1](self.experts(self.latent[0](own), chosen, weights), out)
        return total if self.shared is None else total.add_(self.shared(x))

    def _route(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, self.routing, self.choice_bias, self.always, self.is_always_gated, self.load)

    @property
    def _is_fused_for_one(self) -> bool:
        """Whether norm and residual of a single token are part of the experts' kernels."""
        return (
            not (self.shared or self.scales_inputs or self.latent)
            and self.experts.tiles(1, self.experts_of_token).rows == EACH_PAIR
        )

    def _product_of_one(
        self, x: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """`product` of the normalised x, `[1, hidden_size]`, and `residual` if given."""
        from kernels.experts import few_tokens
        from kernels.linear.gemv import gemv

        logits = x.new_empty(1, len(self.router.weight), dtype=torch.float32)
        gemv(x, self.router.weight, self.router.bias, norm=self.norm, eps=eps, out=logits)
        chosen, shares = self._route(logits)
        tiles = self.experts.tiles(1, self.experts_of_token)
        own = self.experts.weights
        return few_tokens.experts(own, x, chosen, shares, tiles, out, norm=self.norm, eps=eps, residual=residual)


@dataclass(frozen=True, kw_only=True)
class ExpertsBesideMLP(ExpertMLP):
    """Experts next to the layer's MLP, which is `shared`. Both read the same hidden states, each through its norm, and
    their outputs have norms before they are added up. The router reads through a norm too.

    `scales`: float32 `[experts]`, factors of the experts' weights. Other fields: norms, `[hidden_size]`.
    """

    scales: torch.Tensor
    router_norm: torch.Tensor
    experts_norm: torch.Tensor
    shared_out_norm: torch.Tensor
    experts_out_norm: torch.Tensor

    def forward(self, x: ResidualStream) -> None:
        """Adds the output of MLP and experts."""
        assert self.shared is not None and self.out_norm is not None
        normalised, hidden, eps = x.normalised(self.norm), x.complete(), x.eps
        chosen, weights = self._route(self.router.in_float32(rms_norm(hidden, self.router_norm, eps)))
        weights = weights * self.scales[chosen]

        def product(y: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
            return self.experts(y, chosen, weights, out)

        of_experts = x.summed(product, rms_norm(hidden, self.experts_norm, eps), EMBEDDING_BUFFER)
        of_mlp = x.summed(self.shared, normalised)
        both = rms_norm(of_mlp, self.shared_out_norm, eps) + rms_norm(of_experts, self.experts_out_norm, eps)
        x.add_sum(rms_norm(both, self.out_norm, eps))


class WithShared(NamedTuple):
    """Weights of experts that are followed by the shared ones, and the router with their gate, if they have one."""

    gate_up: torch.Tensor
    down: torch.Tensor
    router: Linear


def with_shared(gate_up: ExpertWeight, down: ExpertWeight, shared: SharedExperts, router: Linear) -> WithShared | None:
    """The weights of the experts, `[experts, 2 * size, hidden_size]`, or `[experts, size, hidden_size]` without a gate,
    and `[experts, hidden_size, size]`, followed by those of the shared experts, cut into experts of the same size. None
    where a rank has a part of the experts, or dtypes or sizes differ.

    With them no step has products of the shared experts alone: five kernels less for each layer.
    """
    first, last = shared.gate_up, shared.down
    if not (isinstance(gate_up, torch.Tensor) and isinstance(down, torch.Tensor)):
        return None
    if not (isinstance(first, Linear) and isinstance(last, Linear) and first.bias is None and last.bias is None):
        return None
    size, dtypes = down.shape[2], {gate_up.dtype, down.dtype, first.weight.dtype, last.weight.dtype}
    if last.weight.shape[1] % size or len(dtypes) > 1 or len(router.weight) != len(gate_up):
        return None
    own = first.weight.unflatten(0, (gate_up.shape[1] // size, -1, size)).transpose(0, 1).flatten(1, 2)
    ends = last.weight.unflatten(1, (-1, size)).transpose(0, 1)
    if shared.gate is not None:
        router = Linear(torch.cat((router.weight, shared.gate.to(router.weight.dtype))), router.bias)
    return WithShared(torch.cat((gate_up, own)), torch.cat((down, ends)), router)
