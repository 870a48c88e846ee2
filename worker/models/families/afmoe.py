"""Trinity: gated attention."""

from worker.models.family import Differences, Family, HfConfig, refuse_other_than, rotated_windows
from worker.models.family_experts import layers_from, ungrouped_sigmoid_experts
from worker.models.output_gate import OutputGate


def afmoe(hf: HfConfig) -> Differences:
    refuse_other_than(hf, score_func="sigmoid", route_norm=True, attention_bias=False)
    refuse_other_than(hf, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1)
    layers, shared = layers_from(hf.num_dense_layers, hf), hf.num_shared_experts or 0
    return {
        "qk_norm": "head",
        "output_gate": OutputGate(),
        "float32_norms": True,
        "sandwich_norms": True,
        "embedding_scale": hf.hidden_size**0.5 if hf.mup_enabled else 1.0,
        "rope_rules": rotated_windows(hf),
        "experts": ungrouped_sigmoid_experts(hf, hf.moe_intermediate_size, layers, hf.route_scale, shared),
    }


_NAMES = {"mlp.router.gate": "mlp.gate", "mlp.expert_bias": "mlp.gate.e_score_correction_bias"}
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
FAMILIES = {"afmoe": Family(afmoe, names=_NAMES, norms=_NORMS, own_gates=True)}
