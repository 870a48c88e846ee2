"""Mistral, Mixtral, and Mistral Small 4 with latent attention."""

from kernels.experts.choice import Routing
from worker.models.families.deepseek import latent
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import experts_of, layers_from
from worker.models.query_temperature import QueryTemperature


def mistral(hf: HfConfig) -> Differences:
    return {"windows": (hf.sliding_window,) * hf.num_hidden_layers}


def ministral3(hf: HfConfig) -> Differences:
    return mistral(hf) | {"query_temperature": temperature(hf)}


def mixtral(hf: HfConfig) -> Differences:
    return mistral(hf) | {"experts": experts_of(hf, Routing(hf.num_experts_per_tok), hf.intermediate_size)}


def mistral4(hf: HfConfig) -> Differences:
    routing = Routing(
        hf.num_experts_per_tok,
        is_normalised=hf.norm_topk_prob,
        scale=hf.routed_scaling_factor,
        groups=hf.n_group or 1,
        groups_kept=hf.topk_group or 1,
        added_to_sum=1e-20,
    )
    layers = layers_from(hf.first_k_dense_replace or 0, hf)
    experts = experts_of(hf, routing, layers=layers, shared_size=hf.moe_intermediate_size * hf.n_shared_experts)
    return latent(hf) | {"query_temperature": temperature(hf), "experts": experts}


def temperature(hf: HfConfig) -> QueryTemperature | None:
    rope = hf.rope_parameters
    factor = rope.get("llama_4_scaling_beta")
    return QueryTemperature(rope["original_max_position_embeddings"], factor) if factor else None


MIXTRAL_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_OF_IMAGES = ("vision_tower", "multi_modal_projector")
FAMILIES = {
    "mistral": Family(mistral, text_of=("mistral3",), ignored=_OF_IMAGES),
    "ministral3": Family(ministral3, text_of=("mistral3",), ignored=_OF_IMAGES),
    "mistral4": Family(mistral4, text_of=("mistral3",), ignored=_OF_IMAGES),
    "mixtral": Family(mixtral, names=MIXTRAL_NAMES),
}
