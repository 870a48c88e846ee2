"""Experts in place of a layer's MLP (https://arxiv.org/abs/1701.06538): a router chooses a few for each token."""

from dataclasses import dataclass

import torch

from kernels.experts.choice import Routing
from kernels.experts.experts import Experts
from kernels.experts.routing import route
from kernels.linear.any_linear import AnyLinear
from kernels.linear.linear import Linear
from kernels.ops.activation import ClampedSwiGLU
from worker.models.residual_stream import Activation, ResidualStream


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
    | `scales_inputs` | with one expert a token: its weight multiplies the expert's input, in place of its output |
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
    scales_inputs: bool = False
    held: range | None = None

    @property
    def own(self) -> range:
        """Numbers of the experts that the rank holds, or of those of which it holds a part."""
        return range(self.count) if self.held is None else self.held


@dataclass(frozen=True)
class SharedExperts:
    """Gated MLP that all tokens use, next to the experts. `gate`: `[1, hidden_size]`, or None."""

    gate_up: AnyLinear
    down: AnyLinear
    activation: Activation
    gate: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Output for x, `[n, hidden_size]` both."""
        out = self.down(self.activation(self.gate_up(x)))
        return out if self.gate is None else out.mul_((x @ self.gate.t()).sigmoid_())


@dataclass(frozen=True)
class ExpertMLP:
    """Experts of a layer, with their router. Parameters are named as in `parameter_shapes`.

    All ranks route all tokens, by the same numbers, and each computes its part of the experts: a part of each, or some
    experts whole. Either way the ranks' outputs are summed up. `load` counts the tokens of each expert, if given.
    """

    norm: torch.Tensor | None
    router: Linear
    experts: Experts
    routing: Routing
    choice_bias: torch.Tensor | None = None
    shared: SharedExperts | None = None
    out_norm: torch.Tensor | None = None
    load: torch.Tensor | None = None
    scales_inputs: bool = False

    def forward(self, x: ResidualStream) -> None:
        """Adds the output of the experts."""
        x.add_product(self.product, x.normalised(self.norm), self.out_norm)

    def product(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Output of this rank's part of the experts, `[n, hidden_size]`, in `out` if given. x: `[n, hidden_size]`."""
        chosen, weights = route(self.router.in_float32(x), self.routing, self.choice_bias, self.load)
        own = x
        if self.scales_inputs:
            own, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        total = self.experts(own, chosen, weights, out)
        return total if self.shared is None else total.add_(self.shared(x))
