"""Llama 4: layers that rotate attend within chunks."""

from dataclasses import replace

from kernels.experts.choice import Routing
from worker.models.families.llama import layers_with_rope
from worker.models.family import Differences, Family, HfConfig, refuse_other_than
from worker.models.family_experts import experts_of
from worker.models.query_temperature import QueryTemperature


def llama4(hf: HfConfig) -> Differences:
    """A token's one expert computes the hidden state times the score."""
    refuse_other_than(hf, num_experts_per_tok=1)
    temperature = QueryTemperature(hf.floor_scale, hf.attn_scale, first=1, in_rotated=False)
    routing, size = Routing(1, "sigmoid", is_normalised=False), hf.intermediate_size
    layers = tuple(index in hf.moe_layers for index in range(hf.num_hidden_layers))
    experts = experts_of(hf, routing, size, layers, shared_size=size, scales_inputs=True) if any(layers) else None
    return {
        "intermediate_size": hf.intermediate_size_mlp,
        "qk_norm": "rotated" if hf.use_qk_norm else None,
        "query_temperature": temperature if hf.attn_temperature_tuning else None,
        "rope_rules": replace(layers_with_rope(hf), is_interleaved=True),
        "experts": experts,
    }


FAMILIES = {
    "llama4_text": Family(
        llama4,
        names={"feed_forward": "mlp", "feed_forward.router": "mlp.gate", "shared_expert": "shared_experts"},
        text_of=("llama4",),
        ignored=("vision_model", "multi_modal_projector"),
        turned=("experts.gate_up_proj", "experts.down_proj"),
    )
}
