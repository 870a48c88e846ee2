"""ERNIE 4.5, dense and with experts."""

from kernels.experts.choice import Routing
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count
from worker.models.family_rules import RopeRules


def ernie(hf: HfConfig) -> Differences:
    return {
        "qkv_bias": hf.use_bias,
        "out_bias": hf.use_bias,
        "mlp_bias": hf.use_bias,
        "rope_rules": RopeRules(is_interleaved=True),
    }


def ernie_moe(hf: HfConfig) -> Differences:
    if hf.use_bias:
        raise ValueError("ernie4_5_moe models with biases are not supported")
    layers = tuple(
        (index + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= index <= hf.moe_layer_end_index
        for index in range(hf.num_hidden_layers)
    )
    experts = ExpertsConfig(
        expert_count(hf),
        hf.moe_intermediate_size,
        Routing(hf.moe_k, added_to_sum=hf.moe_norm_min),
        layers,
        hf.moe_intermediate_size * hf.moe_num_shared_experts,
        has_bias=True,
    )
    return ernie(hf) | {"experts": experts}


FAMILIES = {
    "ernie4_5": Family(ernie),
    "ernie4_5_moe": Family(
        ernie_moe,
        names={"mlp.moe_statics": "mlp.gate", "gate.moe_statics": "gate"},
        ignored=("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"),
    ),
}
