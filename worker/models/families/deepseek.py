"""DeepSeek-V2 and V3, and latent attention as other families have it too; Youtu-LLM has it in a plain Llama."""

from kernels.attention.interface import LatentHeads
from kernels.experts.choice import Routing
from kernels.ops.rotary import yarn_temperature
from worker.models.family import Differences, Family, HfConfig, RopeRules, refuse_other_than
from worker.models.family_experts import experts_of, layers_from, prediction_layers, sigmoid_experts


def latent(hf: HfConfig) -> Differences:
    """Multi-head latent attention. YaRN multiplies scores by the square of a temperature, which is not that of the
    rotation (`Rope.amplitude`)."""
    refuse_other_than(hf, attention_bias=False)
    heads = LatentHeads(hf.kv_lora_rank, hf.qk_nope_head_dim, hf.qk_rope_head_dim, hf.v_head_dim)
    if heads.v_head_dim > heads.query:
        raise ValueError(f"{hf.model_type} models whose values have more elements than queries are not supported")
    scale, rope = heads.query**-0.5, hf.rope_parameters
    if rope.get("rope_type", "default") != "default" and (over := rope.get("mscale_all_dim")):
        scale *= yarn_temperature(rope["factor"], over) ** 2
    return {
        "latent": heads,
        "q_lora_rank": hf.q_lora_rank,
        "num_kv_heads": 1,
        "head_dim": heads.row,
        "attention_scale": scale,
        "rope_rules": RopeRules(is_interleaved=getattr(hf, "rope_interleave", True), head_dim=hf.qk_rope_head_dim),
    }


def deepseek_v2(hf: HfConfig) -> Differences:
    refuse_other_than(hf, norm_topk_prob=False)
    is_grouped = {"greedy": False, "group_limited_greedy": True}.get(hf.topk_method)
    if is_grouped is None:
        raise ValueError(f"deepseek_v2 models with topk_method {hf.topk_method!r} are not supported")
    routing = Routing(
        hf.num_experts_per_tok,
        is_normalised=False,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group if is_grouped else 1,
        groups_kept=hf.topk_group if is_grouped else 1,
        group_top=1,
    )
    layers, shared_size = layers_from(hf.first_k_dense_replace, hf), hf.moe_intermediate_size * hf.n_shared_experts
    return latent(hf) | {"experts": experts_of(hf, routing, layers=layers, shared_size=shared_size)}


def deepseek_v3(hf: HfConfig) -> Differences:
    return latent(hf) | {"experts": sigmoid_experts(hf), "extra_layers": prediction_layers(hf)}


FAMILIES = {
    "deepseek_v2": Family(deepseek_v2),
    "deepseek_v3": Family(deepseek_v3, text_of=("kimi_k25",), ignored=("vision_tower", "mm_projector")),
    "youtu": Family(latent),
}
