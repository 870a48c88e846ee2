"""The layer of the decoder, stated once for all architectures. `DecoderLayer.forward` is the model.

What differs between steps (their size, whether attention is inside a CUDA graph, the number of ranks) is not here:
`worker.models.residual_stream` says which kernels a sublayer becomes, and `worker.models.decoder` runs the parts of the
layers in several orders.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from kernels.attention.interface import KVSlots
from kernels.experts.experts import Experts
from kernels.linear.any_linear import AnyLinear
from kernels.ops.activation import gelu, gelu_tanh, gelu_tanh_and_mul, relu2, silu_and_mul
from kernels.ops.norm import rms_norm
from kernels.ops.rotary import Rope, rotate
from worker.models.config import DecoderConfig
from worker.models.experts import ExpertMLP, ExpertsBesideMLP, ExpertsConfig, SharedExperts, with_shared
from worker.models.forward_context import ForwardContext
from worker.models.latent_attention import LatentAttention
from worker.models.layer_inputs import LayerInput
from worker.models.query_temperature import QueryTemperature
from worker.models.recurrent_layer import RecurrentLayer
from worker.models.residual_stream import Activation, ResidualStream

_GATED: dict[str, Activation] = {"silu": silu_and_mul, "gelu_tanh": gelu_tanh_and_mul}
_PLAIN: dict[str, Activation] = {"relu2": relu2, "gelu": gelu, "gelu_tanh": gelu_tanh}


@dataclass
class SelfAttention:
    """Attention of layer `index`, over the KV cache. Parameters are named as in `parameter_shapes`. `config`: with the
    layer's own sizes (`DecoderConfig.of_layer`).

    `kv_layer` is the number of the layer whose keys and values it reads, among those that have any. `rope_table` is the
    `Rope.table` of this layer, on a GPU. `sinks` are for the attention backend. `q_norm`, `k_norm` and `v_norm` are for
    each head by itself, `norms_of_all` for all heads together. `query_scale`, float32 `[head_dim]`, multiplies rotated
    queries.
    """

    config: DecoderConfig
    index: int
    kv_layer: int
    input_norm: torch.Tensor | None
    qkv: AnyLinear
    out: AnyLinear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    v_norm: torch.Tensor | None = None
    out_norm: torch.Tensor | None = None
    rope_table: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    norms_of_all: tuple[torch.Tensor, torch.Tensor] | None = None
    query_scale: torch.Tensor | None = None

    @property
    def projected_size(self) -> int:
        """Columns of the result of `project`."""
        return self.config.qkv_size

    @property
    def attended_size(self) -> int:
        """Columns of the result of `forward`."""
        return self.config.attended_size

    @property
    def rope(self) -> Rope:
        return self.config.ropes[self.index]

    @property
    def temperature(self) -> QueryTemperature | None:
        """`DecoderConfig.query_temperature`; None in a layer without."""
        own = self.config.query_temperature
        return own if own is not None and (own.in_rotated or self.rope.rotated == 0) else None

    def project(self, x: ResidualStream, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queries, keys and values before rotation, then gates if the model has any, `[n, projected_size]`, in `out` if
        given."""
        qkv = x.project(self.input_norm, self.qkv, out)
        return qkv if self.norms_of_all is None else self._normalise_all(qkv, x, *self.norms_of_all)

    def forward(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Concatenated outputs of the heads, `[n, num_heads * head_dim]`. Keys and values, if the layer has any of its
        own, are in the KV cache afterwards."""
        if context.angles is None:
            queries = self.rotate_and_store(qkv, context.positions, context.attention)
            out = context.attention.attend(self.kv_layer, queries)
        else:
            queries, *kv = self._rotate(qkv, *context.angles[self.rope])
            queries = self._tempered(queries, context.positions)
            if kv:
                out = context.attention.run(self.kv_layer, queries, *kv)
            else:
                out = context.attention.attend(self.kv_layer, queries)
        if (gate := self.config.output_gate) is not None and (gates := self.gates(qkv)) is not None:
            out = gate.apply(out, gates)
        return out.flatten(1)

    def gates(self, qkv: torch.Tensor) -> torch.Tensor | None:
        """The gates of `forward`'s result, `[n, gates]`, of the result of `project`; None if the model has none."""
        gate = self.config.output_gate
        return None if gate is None else qkv[:, -gate.size(self.config.num_heads, self.config.head_dim) :]

    def add_output(self, x: ResidualStream, attended: torch.Tensor) -> None:
        """Adds the output product of `forward`'s result."""
        x.add(self.out, attended, self.out_norm)

    def rotate_and_store(
        self, qkv: torch.Tensor, positions: torch.Tensor, kv_slots: KVSlots, queries: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The part of `forward` before attention, in one kernel on a GPU. Writes keys and values to `kv_slots`. Returns
        the rotated queries, `[n, num_heads, head_dim]`, in `queries` if given."""
        from kernels.ops.fused import rotate_and_store

        assert self.rope_table is not None, "Decoder.build_rope_tables makes it"
        rotated = rotate_and_store(
            qkv,
            self.config.num_heads,
            self.rope_table,
            positions,
            *kv_slots.place(self.kv_layer),
            self.q_norm,
            self.k_norm,
            self.config.norm_eps,
            queries,
            normalises_values=self.v_norm is not None,
            has_kv=not self.config.kv_before,
        )
        return self._tempered(rotated, positions)

    def _tempered(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The rotated queries `[n, num_heads, head_dim]` times `query_scale` and `temperature`, in place."""
        if self.query_scale is not None:
            queries.mul_(self.query_scale)
        return queries if self.temperature is None else self.temperature.apply(queries, positions)

    def _normalise_all(
        self, qkv: torch.Tensor, x: ResidualStream, q_norm: torch.Tensor, k_norm: torch.Tensor
    ) -> torch.Tensor:
        """Normalises queries and keys in place, each over all heads of all ranks. Returns `qkv`."""
        q, k = qkv.narrow(1, 0, len(q_norm)), qkv.narrow(1, len(q_norm), len(k_norm))
        squares = torch.stack([part.float().square().sum(1) for part in (q, k)])
        for part, norm, sums, size in zip(
            (q, k), (q_norm, k_norm), x.sum_of_ranks(squares), self.config.qk_norm_sizes, strict=True
        ):
            part.copy_(part * (sums / size + self.config.norm_eps).rsqrt()[:, None] * norm)
        return qkv

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries; keys and values too, if the layer has any of its own. Queries and keys are rotated, and normalised
        before if the model does that."""
        heads, kv_heads, eps = self.config.num_heads, self.config.num_kv_heads, self.config.norm_eps
        if self.config.kv_before:
            q = qkv.unflatten(-1, (heads, self.config.head_dim))
            return (rotate(q if self.q_norm is None else rms_norm(q, self.q_norm, eps), cos, sin),)
        size = (heads + 2 * kv_heads) * self.config.head_dim  # gates may follow
        qk, v = qkv[:, :size].unflatten(-1, (-1, self.config.head_dim)).split((heads + kv_heads, kv_heads), 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((rms_norm(q, self.q_norm, eps), rms_norm(k, self.k_norm, eps)), dim=1)
        q, k = rotate(qk, cos, sin).split((heads, kv_heads), dim=1)
        return q, k, v if self.v_norm is None else rms_norm(v, self.v_norm, eps)


@dataclass
class AttentionAlongsideStates(SelfAttention):
    """Attention, and recurrent states alongside. Both read the hidden states through one norm and one product, and one
    product adds the outputs of both. In `qkv` and `out`, what is attention's comes first."""

    states: RecurrentLayer = field(kw_only=True)

    @property
    def projected_size(self) -> int:
        return super().projected_size + self.states.projected_size

    @property
    def attended_size(self) -> int:
        return super().attended_size + self.states.attended_size

    def forward(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Outputs of attention's heads, then those of the states, `[n, attended_size]`."""
        own = super().projected_size
        attended = super().forward(qkv[:, :own], context)
        return torch.cat((attended, self.states.forward(qkv[:, own:], context)), dim=1)


@dataclass(frozen=True)
class MLP:
    """MLP of a layer, gated (https://arxiv.org/abs/2002.05202) or not: the activation of one product, and another
    product. Parameters are named as in `parameter_shapes`; without a gate, `gate_up` has ups alone."""

    norm: torch.Tensor | None
    gate_up: AnyLinear
    down: AnyLinear
    activation: Activation
    out_norm: torch.Tensor | None = None

    def last(self, x: ResidualStream) -> tuple[AnyLinear, torch.Tensor]:
        """The product that gives what `forward` adds, and what it reads, made of the hidden states as they are."""
        return self.down, x.project_activated(self.norm, self.gate_up, self.activation)

    def forward(self, x: ResidualStream) -> None:
        """Adds the MLP's output."""
        x.add(*self.last(x), self.out_norm)


@dataclass(frozen=True)
class DecoderLayer:
    """A layer: attention, then an MLP, or one of the two. Each reads the residual stream through a norm, and adds its
    output to it; if the layer `is_parallel`, both read the same, and the sum of both is added. Some models add an input
    of the layer then, or multiply the stream by `scale`, `[1]`.

    The parts are members, so that a layer of another kind has another member, such as attention with a state of its own
    in place of `attention`.
    """

    attention: SelfAttention | LatentAttention | RecurrentLayer | None
    mlp: MLP | ExpertMLP | None
    input: LayerInput | None = None
    scale: torch.Tensor | None = None
    is_parallel: bool = False

    @classmethod
    def from_parameters(cls, config: DecoderConfig, index: int, parameters: dict[str, Any]) -> "DecoderLayer":
        """Layer `index` of the layers in `config`, from its parameters by the names of `parameter_shapes`. Those of
        `qkv`, `out`, `gate_up` and `down` are linear layers."""
        attention = _attention(config, index, parameters) if config.has_attention(index) else None
        activation = (_GATED if config.gated_mlps else _PLAIN)[config.activation]
        mlp = _mlp(config, index, activation, parameters) if config.has_mlp(index) else None
        own_input = None
        if config.layer_inputs is not None:
            gate, out = parameters["layer_input_gate"], parameters["layer_input_out"]
            own_input = LayerInput(index, gate, out, parameters["layer_input_norm"], activation)
        return cls(attention, mlp, own_input, parameters.get("scale"), config.parallel is not None)

    @property
    def sums(self) -> int:
        """Sums over ranks that the layer makes."""
        return 1 if self.is_parallel else (self.attention is not None) + (self.mlp is not None)

    @property
    def linears(self) -> list[tuple[AnyLinear, bool]]:
        """All linear layers, each with whether its product is what a sublayer adds to the hidden states."""
        mlp = self.mlp.shared if isinstance(self.mlp, ExpertMLP) else self.mlp
        own: list[tuple[AnyLinear, bool]] = []
        if self.attention is not None:
            own += [(self.attention.qkv, False), (self.attention.out, not self.is_parallel)]
        if isinstance(self.attention, LatentAttention) and self.attention.q_b is not None:
            own.append((self.attention.q_b, False))
        if mlp is not None:
            own += [(mlp.gate_up, False), (mlp.down, not (self.is_parallel or isinstance(mlp, SharedExperts)))]
        if isinstance(self.mlp, ExpertMLP) and self.mlp.latent is not None:
            own += [(each, False) for each in self.mlp.latent]
        return own

    def forward(self, x: ResidualStream, context: ForwardContext) -> None:
        """Runs the layer: the part before attention, attention, and the part after it."""
        attended = None
        if self.attention is not None:
            qkv = self.attention.project(x)
            attended = self.attention.forward(qkv, context)
        self.post_attention(x, attended)

    def post_attention(self, x: ResidualStream, attended: torch.Tensor | None) -> None:
        """The part after attention, `attended` being the output of `SelfAttention.forward`; None in a layer without.
        Needs no other token's hidden states."""
        if self.is_parallel:
            self._add_both(x, attended)
            return
        if self.attention is not None:
            assert attended is not None, "the layer has attention"
            self.attention.add_output(x, attended)
        if self.mlp is not None:
            self.mlp.forward(x)
        if self.input is not None:
            self.input.forward(x)
        if self.scale is not None:
            x.scale(self.scale)

    def _add_both(self, x: ResidualStream, attended: torch.Tensor | None) -> None:
        """`post_attention` of a parallel layer."""
        assert self.mlp is not None and attended is not None, "the layer has both"
        assert isinstance(self.attention, SelfAttention), "the attention has one product at its end"
        out, (last, inner) = self.attention.out, self.mlp.last(x)
        x.add_product(lambda y, into: out(y, into).add_(last(inner, None)), attended)


def _attention(
    config: DecoderConfig, index: int, parameters: dict[str, Any]
) -> SelfAttention | LatentAttention | RecurrentLayer:
    recurrent = config.recurrent
    states = None
    if recurrent is not None and recurrent.layers[index]:
        states = recurrent.layer(sum(recurrent.layers[:index]), parameters)
        if config.sandwich_norms:
            states = replace(states, out_norm=parameters["attention_out_norm"])
        if not recurrent.alongside_attention:
            return states
    if config.latent is not None:
        return LatentAttention.from_parameters(config, config.latent, index, parameters)
    own = config.of_layer(index)
    q_norm, k_norm = _head_norms(own, index, parameters)
    attention = SelfAttention if states is None else partial(AttentionAlongsideStates, states=states)
    return attention(
        own,
        index,
        config.kv_layers.index(index - own.kv_before),
        parameters.get("input_norm"),
        parameters["qkv"],
        parameters["out"],
        q_norm,
        k_norm,
        q_norm.new_ones(own.head_dim) if own.value_norm and q_norm is not None else None,
        parameters.get("attention_out_norm"),
        sinks=parameters.get("sinks"),
        norms_of_all=(parameters["q_norm"], parameters["k_norm"]) if config.qk_norm == "all" else None,
        query_scale=parameters["q_norm"].float() * parameters["k_norm"].float() if config.qk_norm == "after" else None,
    )


def _mlp(config: DecoderConfig, index: int, activation: Activation, parameters: dict[str, Any]) -> MLP | ExpertMLP:
    experts = config.experts_of(index)
    if experts is not None:
        return _expert_mlp(experts, activation, parameters)
    return MLP(
        parameters.get("mlp_norm", parameters.get("input_norm")),
        parameters["gate_up"],
        parameters["down"],
        activation,
        parameters.get("mlp_out_norm"),
    )


def _head_norms(
    config: DecoderConfig, index: int, parameters: dict[str, Any]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Weights of the norms of each head's query and key."""
    if config.qk_norm == "head":
        return parameters["q_norm"], parameters.get("k_norm")
    if config.qk_norm == "after":
        # Rotation keeps the length of a head. What remains of the norms is a factor of each product of a query's and a
        # key's element, which the query has (`SelfAttention.query_scale`).
        ones = torch.ones_like(parameters["q_norm"])
        return ones, ones
    if config.qk_norm == "rotated" and config.ropes[index].rotated != 0:
        ones = torch.ones_like(parameters["input_norm"][: config.head_dim])
        return ones, ones
    return None, None


def _expert_mlp(experts: ExpertsConfig, activation: Activation, parameters: dict[str, Any]) -> ExpertMLP:
    shared = None
    if experts.shared_size:
        shared = SharedExperts(parameters["gate_up"], parameters["down"], activation, parameters.get("shared_gate"))
    gate_up, down = parameters.pop("experts_gate_up"), parameters.pop("experts_down")
    biases = None
    if experts.has_product_biases:
        biases = parameters["experts_gate_up_bias"], parameters["experts_down_bias"]
    router, always, is_gated = parameters["router"], 0, False
    if experts.is_beside_mlp:
        router_norm = parameters["router_norm"] * parameters["router_norm"].numel() ** -0.5
        return ExpertsBesideMLP(
            parameters["mlp_norm"],
            router,
            Experts(gate_up, down, activation, experts.own.start, None, experts.count),
            experts.routing,
            shared=shared,
            out_norm=parameters["mlp_out_norm"],
            load=parameters.get("expert_load"),
            scales=parameters["expert_scales"],
            router_norm=router_norm,
            experts_norm=parameters["experts_norm"],
            shared_out_norm=parameters["shared_out_norm"],
            experts_out_norm=parameters["experts_out_norm"],
        )
    latent = None if experts.latent_size is None else (parameters["latent_in"], parameters["latent_out"])
    unlike = experts.activation is not None or biases is not None or experts.scales_inputs or latent is not None
    can_join = router.weight.is_cuda and not unlike
    if shared is not None and can_join and (whole := with_shared(gate_up, down, shared, router)) is not None:
        always, is_gated = len(whole.gate_up) - experts.count, shared.gate is not None
        (gate_up, down, router), shared = whole, None
    return ExpertMLP(
        parameters.get("mlp_norm", parameters.get("input_norm")),
        router,
        Experts(gate_up, down, experts.activation or activation, experts.own.start, biases, experts.count + always),
        experts.routing,
        parameters.get("choice_bias"),
        shared,
        parameters.get("mlp_out_norm"),
        always,
        is_gated,
        parameters.get("expert_load"),
        experts.scales_inputs,
        latent,
    )
