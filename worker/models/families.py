"""The supported architectures: how each maps its configuration onto the decoder. `ARCHITECTURES` is the table.

A row says how a family differs from a plain Llama without biases, in fields of `DecoderConfig`. docs/MODELS.md says how
to add one.
"""

from collections.abc import Callable
from typing import Any

from worker.models import dense_families as dense
from worker.models import expert_families as experts
from worker.models import latent_families as latent
from worker.models import recurrent_families as recurrent
from worker.models.family_rules import HfConfig

# Differences from a plain Llama without biases, by `model_type`. An entry `rope_rules` is a `RopeRules`.
ARCHITECTURES: dict[str, Callable[[HfConfig], dict[str, Any]]] = {
    "llama": dense.llama,
    "mistral": dense.mistral,
    "ministral3": dense.ministral3,
    "internlm3": dense.llama,
    "iquestcoder": dense.llama,
    "arcee": dense.arcee,
    "nemotron": dense.nemotron,
    "jais2": dense.jais2,
    "starcoder2": dense.starcoder2,
    "qwen2": dense.qwen2,
    "qwen2_5_vl_text": dense.qwen2,
    "qwen3": dense.qwen3,
    "qwen3_vl_text": dense.qwen3,
    "seed_oss": dense.seed_oss,
    "cwm": dense.cwm,
    "gemma": dense.gemma,
    "gemma2": dense.gemma2,
    "gemma3_text": dense.gemma3,
    "gemma4_text": dense.gemma4,
    "gemma4_unified_text": dense.gemma4,
    "smollm3": dense.smollm3,
    "granite": dense.granite,
    "granite_swa": dense.granite_swa,
    "hyperclovax": dense.hyperclovax,
    "olmo2": dense.olmo2,
    "olmo3": dense.olmo2,
    "exaone4": dense.exaone4,
    "phi": dense.phi,
    "phi3": dense.phi3,
    "cohere": dense.cohere,
    "cohere2": dense.cohere2,
    "hunyuan_v1_dense": dense.hunyuan,
    "glm": dense.glm,
    "glm4": dense.glm4,
    "glm4v_text": dense.glm4v,
    "ernie4_5": dense.ernie,
    "mixtral": experts.mixtral,
    "phimoe": experts.phimoe,
    "qwen2_moe": experts.qwen2_moe,
    "qwen3_moe": experts.qwen3_moe,
    "qwen3_vl_moe_text": experts.qwen3_vl_moe,
    "mellum": experts.mellum,
    "hunyuan_v1_moe": experts.hunyuan_moe,
    "olmoe": experts.olmoe,
    "flex_olmo": experts.flex_olmo,
    "granitemoe": experts.granite_moe,
    "granitemoeshared": experts.granite_moe,
    "granitemoe_swa": experts.granite_moe_swa,
    "glm4_moe": experts.glm4_moe,
    "glm4v_moe_text": experts.glm4_moe,
    "dots1": experts.dots1,
    "solar_open": experts.solar_open,
    "cohere2_moe": experts.cohere2_moe,
    "exaone_moe": experts.exaone_moe,
    "minimax_m2": experts.minimax_m2,
    "hy_v3": experts.hy_v3,
    "afmoe": experts.afmoe,
    "ernie4_5_moe": experts.ernie_moe,
    "minicpm3": latent.minicpm3,
    "deepseek_v2": latent.deepseek_v2,
    "deepseek_v3": latent.deepseek_v3,
    "glm4_moe_lite": latent.glm4_moe_lite,
    "mistral4": latent.mistral4,
    "youtu": latent.latent,
    "gpt_oss": experts.gpt_oss,
    "llama4_text": experts.llama4,
    "qwen3_next": recurrent.qwen3_next,
    "qwen3_5_text": recurrent.qwen3_5,
    "qwen3_5_moe_text": recurrent.qwen3_5_moe,
    "granitemoehybrid": recurrent.granite_hybrid,
    "bamba": recurrent.bamba,
    "falcon_h1": recurrent.falcon_h1,
    "nemotron_h": recurrent.nemotron_h,
    "lfm2": recurrent.lfm2,
    "lfm2_moe": recurrent.lfm2_moe,
}
