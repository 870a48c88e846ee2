"""ERNIE 4.5, dense and with experts."""

from kernels.experts.choice import Routing
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import experts_of


def ernie(hf: HfConfig) -> Differences:
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), hf.use_bias)
    return biases | {"rope_rules": RopeRules(is_interleaved=True)}


def ernie_moe(hf: HfConfig) -> Differences:
    refuse_other_than(hf, use_bias=False)
    layers = tuple(
        (index + 1) % hf.moe_layer_interval == 0 and hf.moe_layer_start_index <= index <= hf.moe_layer_end_index
        for index in range(hf.num_hidden_layers)
    )
    routing, shared = Routing(hf.moe_k, added_to_sum=hf.moe_norm_min), hf.moe_num_shared_experts
    experts = experts_of(hf, routing, layers=layers, shared_size=hf.moe_intermediate_size * shared, has_bias=True)
    return ernie(hf) | {"experts": experts}


FAMILIES = {
    "ernie4_5": Family(ernie),
    "ernie4_5_moe": Family(
        ernie_moe,
        names={"mlp.moe_statics": "mlp.gate", "gate.moe_statics": "gate"},
        ignored=("mtp_block", "mtp_emb_norm", "mtp_hidden_norm", "mtp_linear_proj"),
    ),
}
