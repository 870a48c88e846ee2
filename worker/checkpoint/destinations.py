"""Where the tensors of a checkpoint go: which part of each a rank has, and its place in the rank's parameters."""

from worker.checkpoint.destination import Destination, TensorPiece, scaled, whole_tensor
from worker.checkpoint.recurrent_weights import recurrent_destinations
from worker.models.config import DecoderConfig
from worker.models.experts import ExpertsConfig
from worker.models.parameters import parameter_shapes
from worker.models.sharding import Shard

# Norms before and after attention, before and after the MLP: parameters, and their names where a layer has all.
_NORMS = ("input_norm", "attention_out_norm", "mlp_norm", "mlp_out_norm")
_SANDWICH_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_NORMS_BESIDE_MLP = {
    "mlp.gate.scale": "router_norm",
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_1.weight": "shared_out_norm",
    "post_feedforward_layernorm_2.weight": "experts_out_norm",
}


def destinations(shard: Shard, stacked: bool) -> dict[str, Destination]:
    """Destinations of all tensors of a model that this rank needs, by Hugging Face's names. `stacked`: whether the
    experts of a layer are one tensor."""
    shapes = parameter_shapes(shard.config)
    vocabulary, hidden = (shard.whole.vocab_size, shard.whole.hidden_size), shard.whole.hidden_size
    destinations = {
        "model.embed_tokens.weight": whole_tensor("embedding", vocabulary, shard.vocabulary),
        **_norm_destination("model.norm", "norm", shard.whole),
        "model.embed_positions.weight": whole_tensor("positions", (shard.whole.learned_positions, hidden)),
        "lm_head.weight": whole_tensor("head", vocabulary, shard.vocabulary),
        "lm_head.bias": whole_tensor("head_bias", vocabulary[:1], shard.vocabulary),
    }
    if (inputs := shard.whole.layer_inputs) is not None:
        size = inputs.size * inputs.layers
        embedding = whole_tensor("layer_inputs_embedding", (vocabulary[0], size), shard.vocabulary)
        destinations["model.embed_tokens_per_layer.weight"] = embedding
        destinations["model.per_layer_model_projection.weight"] = whole_tensor(
            "layer_inputs_projection", (size, hidden)
        )
        destinations["model.per_layer_projection_norm.weight"] = whole_tensor("layer_inputs_norm", (inputs.size,))
    for own, index in enumerate(shard.layers):
        part = shard.of_layer(index)
        layer = _norm_destinations(shard.whole, index) | _further_destinations(shard)
        if shard.whole.has_attention(index):
            layer |= _attention_destinations(part, index)
        experts = shard.config.experts_of(own)
        if experts is None:
            size = part.whole.intermediate_size
            layer |= _mlp_destinations(part, shard.whole.family.mlp, size, part.intermediate)
        else:
            layer |= _expert_destinations(shard, stacked)
        for tensor, factors in shard.whole.weight_factors.items():
            if tensor not in layer:  # of a layer of another kind
                continue
            own_pieces = zip(layer[tensor].pieces, factors, strict=True)
            pieces = tuple(piece._replace(factor=factor) for piece, factor in own_pieces)
            layer[tensor] = layer[tensor]._replace(pieces=pieces)
        for tensor, destination in layer.items():
            destinations[f"model.layers.{index}.{tensor}"] = destination._replace(
                parameter=f"layers.{own}.{destination.parameter}"
            )
    return {tensor: destination for tensor, destination in destinations.items() if destination.parameter in shapes}


def _attention_destinations(shard: Shard, index: int) -> dict[str, Destination]:
    """Destinations of the tensors of the attention of layer `index`, or of what it has in place of one or alongside."""
    recurrent, order = shard.whole.recurrent, shard.whole.ropes[index].order
    if recurrent is not None and recurrent.layers[index]:
        states = recurrent_destinations(shard, recurrent)
        if not recurrent.alongside_attention:
            return states
        return _head_destinations(shard, order) | _behind_heads(states, shard)
    return _head_destinations(shard, order) if shard.whole.latent is None else _latent_destinations(shard, order)


def _head_destinations(shard: Shard, order: tuple[int, ...] | None) -> dict[str, Destination]:
    """`_attention_destinations` of attention over keys and values, including biases and norms that the model may not
    have."""
    whole, own, hidden = shard.whole, shard.config, shard.whole.hidden_size
    size = whole.head_dim
    q_rows, kv_rows = whole.num_heads * size, whole.num_kv_heads * size
    q, kv = scaled(shard.heads, size), scaled(shard.kv_heads, size)
    first_k = own.num_heads * size
    first_v = first_k + own.num_kv_heads * size
    destinations = _outward("self_attn.o_proj", "out", shard, q_rows, q)
    if whole.family.fused_qkv is not None:
        k, v = (range(kv.start + rows, kv.stop + rows) for rows in (q_rows, q_rows + kv_rows))
        all_pieces = [TensorPiece(0, q, order), TensorPiece(first_k, k, order), TensorPiece(first_v, v)]
        if whole.family.fused_qkv == "by head":
            all_pieces = [
                TensorPiece(piece.first + i * size, range(row, row + size), piece.order)
                for i, head in enumerate(shard.heads)
                for row, piece in zip(range(3 * head * size, 3 * (head + 1) * size, size), all_pieces, strict=True)
            ]
        rows = q_rows + 2 * kv_rows
        destinations["self_attn.qkv_proj.weight"] = Destination("qkv", (rows, hidden), 0, tuple(all_pieces))
        destinations["self_attn.qkv_proj.bias"] = Destination("qkv_bias", (rows,), 0, tuple(all_pieces))
    else:
        queries: tuple[TensorPiece, ...] = (TensorPiece(0, q, order),)
        first_gate = first_v + own.num_kv_heads * size
        has_gates_in_queries = whole.output_gate is not None and not whole.family.own_gates
        if has_gates_in_queries:  # the rows of each head's queries are followed by those of its gate
            parts = [(i * size, 2 * head * size) for i, head in enumerate(shard.heads)]
            queries = tuple(TensorPiece(to, range(row, row + size), order) for to, row in parts)
            queries += tuple(TensorPiece(first_gate + to, range(row + size, row + 2 * size)) for to, row in parts)
        products = [("self_attn.q_proj", (2 if has_gates_in_queries else 1) * q_rows, queries)]
        if whole.output_gate is not None and not has_gates_in_queries:
            is_per_head = whole.output_gate.is_per_head
            rows, gates = (whole.num_heads, shard.heads) if is_per_head else (q_rows, q)
            products.append(("self_attn.gate_proj", rows, (TensorPiece(first_gate, gates),)))
        keys, values = TensorPiece(first_k, kv, order), TensorPiece(first_v, kv)
        if whole.keys_are_values:
            products.append(("self_attn.k_proj", kv_rows, (keys, values)))
        elif not whole.kv_before:
            products += [("self_attn.k_proj", kv_rows, (keys,)), ("self_attn.v_proj", kv_rows, (values,))]
        for tensor, rows, pieces in products:
            destinations[f"{tensor}.weight"] = Destination("qkv", (rows, hidden), 0, pieces)
            destinations[f"{tensor}.bias"] = Destination("qkv_bias", (rows,), 0, pieces)
    all_heads = whole.qk_norm == "all"
    for tensor, parameter, rows, kept in (
        ("self_attn.q_norm", "q_norm", q_rows, q),
        ("self_attn.k_norm", "k_norm", kv_rows, kv),
    ):
        piece = (TensorPiece(0, kept if all_heads else range(size), order),)
        destinations[f"{tensor}.weight"] = Destination(parameter, (rows if all_heads else size,), 0, piece)
    destinations["self_attn.sinks"] = whole_tensor("sinks", (whole.num_heads,), shard.heads)
    return destinations


def _latent_destinations(shard: Shard, order: tuple[int, ...] | None) -> dict[str, Destination]:
    """`_attention_destinations` of latent attention. `order` is that of the rotated part of a head, which is the last
    part. All ranks have what makes the latents."""
    whole, own, hidden = shard.whole, shard.config, shard.whole.hidden_size
    latent, rank = whole.latent, whole.q_lora_rank
    assert latent is not None
    q_rows, q = whole.num_heads * latent.query, scaled(shard.heads, latent.query)
    q_pieces = (TensorPiece(0, q, _behind(latent.qk_nope_head_dim, order)),)
    row = (TensorPiece(own.qkv_size - latent.row, range(latent.row), _behind(latent.kv_lora_rank, order)),)
    up_rows, up = whole.num_heads * latent.up, (TensorPiece(0, scaled(shard.heads, latent.up)),)
    values = scaled(shard.heads, latent.v_head_dim)
    destinations = _outward("self_attn.o_proj", "out", shard, whole.num_heads * latent.v_head_dim, values) | {
        "self_attn.kv_a_proj_with_mqa.weight": Destination("qkv", (latent.row, hidden), 0, row),
        "self_attn.kv_a_layernorm.weight": whole_tensor("kv_a_norm", (latent.kv_lora_rank,)),
        "self_attn.kv_b_proj.weight": Destination("kv_b", (up_rows, latent.kv_lora_rank), 0, up),
    }
    if rank is None:
        destinations["self_attn.q_proj.weight"] = Destination("qkv", (q_rows, hidden), 0, q_pieces)
        return destinations
    return destinations | {
        "self_attn.q_a_proj.weight": whole_tensor("qkv", (rank, hidden)),
        "self_attn.q_a_layernorm.weight": whole_tensor("q_a_norm", (rank,)),
        "self_attn.q_b_proj.weight": Destination("q_b", (q_rows, rank), 0, q_pieces),
    }


def _behind(first: int, order: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The order of a head whose first elements stay, and whose others have an order of their own."""
    return None if order is None else (*range(first), *(first + place for place in order))


def _behind_heads(states: dict[str, Destination], shard: Shard) -> dict[str, Destination]:
    """Destinations of the tensors of recurrent states where attention has the first rows of `qkv` and the first columns
    of `out`."""
    before = {"qkv": shard.config.qkv_size, "out": shard.config.attended_size}
    return {
        name: to._replace(pieces=tuple(p._replace(first=p.first + before.get(to.parameter, 0)) for p in to.pieces))
        for name, to in states.items()
    }


def _mlp_destinations(
    shard: Shard,
    name: str,
    rows: int,
    kept: range,
    prefix: str = "",
    own_rows: int | None = None,
    hidden: int | None = None,
) -> dict[str, Destination]:
    """Destinations of the tensors of the MLP `name`, of whose `rows` intermediate elements this rank has `kept`.
    `prefix`: of the parameters' names. `own_rows`: their number with padding; by default the share of one rank.
    `hidden`: elements of its inputs and outputs, by default those of the hidden states."""
    gate_up, down = f"{prefix}gate_up", f"{prefix}down"
    hidden, own_rows = hidden or shard.whole.hidden_size, -(-rows // shard.size) if own_rows is None else own_rows
    destinations = _outward(f"{name}.down_proj", down, shard, rows, kept, hidden)
    if not shard.whole.gated_mlps:
        whole = (TensorPiece(0, kept),)
        destinations[f"{name}.up_proj.weight"] = Destination(gate_up, (rows, hidden), 0, whole)
        destinations[f"{name}.up_proj.bias"] = Destination(f"{gate_up}_bias", (rows,), 0, whole)
        return destinations
    ups = range(kept.start + rows, kept.stop + rows)
    if shard.whole.family.fused_gate_up:
        pieces = TensorPiece(0, kept), TensorPiece(own_rows, ups)
        destinations[f"{name}.gate_up_proj.weight"] = Destination(gate_up, (2 * rows, hidden), 0, pieces)
        return destinations
    for tensor, first in ((f"{name}.gate_proj", 0), (f"{name}.up_proj", own_rows)):
        piece = (TensorPiece(first, kept),)
        destinations[f"{tensor}.weight"] = Destination(gate_up, (rows, hidden), 0, piece)
        destinations[f"{tensor}.bias"] = Destination(f"{gate_up}_bias", (rows,), 0, piece)
    return destinations


def _outward(
    tensor: str, parameter: str, shard: Shard, columns: int, kept: range, hidden: int | None = None
) -> dict[str, Destination]:
    """Destinations of a matrix that ends a sublayer, and of its bias. `hidden`: as for `_mlp_destinations`."""
    hidden = hidden or shard.whole.hidden_size
    once = range(hidden if shard.rank == 0 else 0)  # only rank 0 has the bias: ranks' outputs are added up
    return {
        f"{tensor}.weight": Destination(parameter, (hidden, columns), 1, (TensorPiece(0, kept),)),
        f"{tensor}.bias": whole_tensor(f"{parameter}_bias", (hidden,), once),
    }


def _expert_destinations(shard: Shard, stacked: bool) -> dict[str, Destination]:
    """Destinations of the tensors of a layer's experts, by the names of `tensor_names.full_name`."""
    experts, hidden = shard.whole.experts, shard.whole.hidden_size
    assert experts is not None
    own = shard.config.experts
    assert own is not None
    rows, kept, own_rows = experts.intermediate_size, shard.expert_intermediate, own.intermediate_size
    width = experts.latent_size or hidden
    shared = "mlp" if experts.is_beside_mlp else "mlp.shared_experts"
    destinations = _mlp_destinations(shard, shared, experts.shared_size, shard.shared_intermediate)
    if experts.is_beside_mlp:
        for name, parameter in _NORMS_BESIDE_MLP.items():
            destinations[name] = whole_tensor(parameter, (hidden,))
        destinations["mlp.gate.per_expert_scale"] = whole_tensor("expert_scales", (experts.count,))
    destinations["mlp.shared_expert_gate.weight"] = whole_tensor("shared_gate", (1, hidden))
    destinations["mlp.gate.weight"] = whole_tensor("router", (experts.count, hidden))
    destinations["mlp.gate.bias"] = whole_tensor("router_bias", (experts.count,))
    destinations["mlp.gate.e_score_correction_bias"] = whole_tensor("choice_bias", (experts.count,))
    destinations["mlp.fc1_latent_proj.weight"] = whole_tensor("latent_in", (width, hidden))
    destinations["mlp.fc2_latent_proj.weight"] = whole_tensor("latent_out", (hidden, width))
    if stacked and own.held is not None:
        return destinations | _whole_experts(experts, width, own.held, shard.whole.gated_mlps)
    if stacked:
        first, parts = ("gate_up_proj", 2) if shard.whole.gated_mlps else ("up_proj", 1)
        pieces = tuple(
            TensorPiece(part * own_rows, range(kept.start + part * rows, kept.stop + part * rows))
            for part in range(parts)
        )
        shape = experts.count, parts * rows, width
        destinations[f"mlp.experts.{first}"] = Destination("experts_gate_up", shape, 1, pieces)
        shape = experts.count, width, rows
        destinations["mlp.experts.down_proj"] = Destination("experts_down", shape, 2, (TensorPiece(0, kept),))
        biases = experts.count, parts * rows
        destinations[f"mlp.experts.{first}_bias"] = Destination("experts_gate_up_bias", biases, 1, pieces)
        once = (TensorPiece(0, range(hidden if shard.rank == 0 else 0)),)
        biases = experts.count, hidden
        destinations["mlp.experts.down_proj_bias"] = Destination("experts_down_bias", biases, 1, once)
        return destinations
    for place, expert in enumerate(own.own):
        one = _mlp_destinations(shard, f"mlp.experts.{expert}", rows, kept, "experts_", own_rows, width)
        destinations |= {name: to._replace(expert=place) for name, to in one.items() if name.endswith(".weight")}
    return destinations


def _whole_experts(experts: ExpertsConfig, hidden: int, held: range, is_gated: bool) -> dict[str, Destination]:
    """Destinations of the tensors of all experts of a layer, of which this rank has those `held`, whole."""
    count, rows = experts.count, experts.intermediate_size
    first, own_rows = ("gate_up_proj", 2 * rows) if is_gated else ("up_proj", rows)
    return {
        f"mlp.experts.{first}": whole_tensor("experts_gate_up", (count, own_rows, hidden), held),
        "mlp.experts.down_proj": whole_tensor("experts_down", (count, hidden, rows), held),
        f"mlp.experts.{first}_bias": whole_tensor("experts_gate_up_bias", (count, own_rows), held),
        "mlp.experts.down_proj_bias": whole_tensor("experts_down_bias", (count, hidden), held),
    }


def _further_destinations(shard: Shard) -> dict[str, Destination]:
    """Destinations of what a layer has besides attention, MLP and norms. All ranks have all of it."""
    inputs, hidden = shard.whole.layer_inputs, shard.whole.hidden_size
    destinations = {"layer_scalar": whole_tensor("scale", (1,))}
    if inputs is not None:
        destinations["per_layer_input_gate.weight"] = whole_tensor("layer_input_gate", (inputs.size, hidden))
        destinations["per_layer_projection.weight"] = whole_tensor("layer_input_out", (hidden, inputs.size))
        destinations["post_per_layer_input_norm.weight"] = whole_tensor("layer_input_norm", (hidden,))
    return destinations


def _norm_destinations(config: DecoderConfig, index: int) -> dict[str, Destination]:
    names: tuple[str | None, ...] = ("input_layernorm", None, "post_attention_layernorm", None)
    if config.sublayers is not None:
        names = ("norm",) if config.has_attention(index) else (None, None, "norm")
    elif config.family.norms is not None:
        names = config.family.norms
    elif config.parallel == "one norm":
        names = ("input_layernorm",)
    elif not config.pre_norms:
        names = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
    elif config.sandwich_norms:
        names = _SANDWICH_NORMS
    destinations: dict[str, Destination] = {}
    for tensor, parameter in zip(names, _NORMS, strict=False):
        if tensor is not None:
            destinations |= _norm_destination(tensor, parameter, config)
    return destinations


def _norm_destination(tensor: str, parameter: str, config: DecoderConfig) -> dict[str, Destination]:
    """Destinations of a norm's weights, and of its biases if it has any."""
    weights = whole_tensor(parameter, (config.hidden_size,))
    if not config.layer_norms:
        return {f"{tensor}.weight": weights}
    rows = {f"{tensor}.weight": weights._replace(expert=0), f"{tensor}.bias": weights._replace(expert=1)}
    return rows if config.norm_biases else {f"{tensor}.weight": rows[f"{tensor}.weight"]}
