"""Llama 4: layers that rotate attend within chunks."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count
from worker.models.family_rules import RopeRules
from worker.models.query_temperature import QueryTemperature


def llama4(hf: HfConfig) -> Differences:
    """A token's one expert computes the hidden state times the score."""
    if hf.num_experts_per_tok != 1:
        raise ValueError(f"llama4 models with {hf.num_experts_per_tok} experts a token are not supported")
    layers = range(hf.num_hidden_layers)
    temperature = QueryTemperature(hf.floor_scale, hf.attn_scale, first=1, in_rotated=False)
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(1, "sigmoid", is_normalised=False),
        tuple(index in hf.moe_layers for index in layers),
        shared_size=hf.intermediate_size,
        scales_inputs=True,
    )
    return {
        "intermediate_size": hf.intermediate_size_mlp,
        "qkv_bias": hf.attention_bias,
        "out_bias": hf.attention_bias,
        "qk_norm": "rotated" if hf.use_qk_norm else None,
        "query_temperature": temperature if hf.attn_temperature_tuning else None,
        "rope_rules": RopeRules(
            is_interleaved=True, layers={index: bool(hf.no_rope_layers[index]) for index in layers}
        ),
        "experts": experts if any(experts.layers) else None,
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
