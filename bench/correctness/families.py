"""Random models of every family that is served, of any size: the `model_type` and the configuration of each.

A family has several models if published configurations differ in what is computed. Tests of the worker have the same
models at `TINY` sizes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
CONVOLVED = ["conv", "full_attention", "conv", "conv"]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the models.

    | field | meaning |
    | --- | --- |
    | `vocabulary`, `hidden`, `inner`, `positions` | tokens; hidden and MLP size; longest context in tokens |
    | `heads`, `head_dim`, `wide_head` | query heads; elements of a head, and where heads are larger |
    | `two_heads` | Gemma 4: elements of a head in layers with a window, and in the others |
    | `oss_head` | gpt-oss: elements of a head |
    | `window`, `chunk` | tokens of a window, and of Llama 4's chunks of attention |
    | `expert`, `shared`, `wide_shared` | columns of an expert, of a shared expert, and of a larger shared expert |
    | `llama4` | Llama 4: columns of an expert and of an MLP |
    | `latent` | elements of latents of keys and values, and of queries; of a head's rest, rotated part, and values |
    | `wide_value` | GLM-4.7-Flash: elements of a head, and of its values |
    | `delta` | gated delta nets: elements of a head's keys and values |
    | `mamba` | Mamba2: expansion, heads, elements of a head and of its state, tokens of a chunk in `transformers` |
    | `layer_input` | Gemma 4: elements of an input of a layer |
    | `query_scale` | Gemma 2 and 3: attention divides by its square root |
    | `attention_multiplier`, `logit_cap` | Granite's factor of attention; Gemma 4's soft cap of logits |
    | `jitter`, `swiglu_limit` | Phi-3.5-MoE's `router_jitter_noise`; gpt-oss's limit of SwiGLU |
    | `mamba_groups` | Mamba2: heads of keys and queries, of Granite 4 and of Bamba |
    """

    vocabulary: int
    hidden: int
    inner: int
    positions: int
    heads: int
    head_dim: int
    wide_head: int
    two_heads: tuple[int, int]
    oss_head: int
    window: int
    chunk: int
    expert: int
    shared: int
    wide_shared: int
    llama4: tuple[int, int]
    latent: tuple[int, int, int, int, int]
    wide_value: int
    delta: tuple[int, int]
    mamba: tuple[int, int, int, int, int]
    layer_input: int
    query_scale: int
    attention_multiplier: float
    logit_cap: float
    jitter: float
    swiglu_limit: float
    mamba_groups: tuple[int, int]


TINY = Sizes(
    vocabulary=131,
    hidden=48,
    inner=80,
    positions=256,
    heads=4,
    head_dim=12,
    wide_head=16,
    two_heads=(12, 24),
    oss_head=8,
    window=9,
    chunk=16,
    expert=20,
    shared=24,
    wide_shared=28,
    llama4=(28, 44),
    latent=(24, 20, 12, 8, 10),
    wide_value=20,
    delta=(8, 12),
    mamba=(1, 4, 12, 6, 16),
    layer_input=8,
    query_scale=16,
    attention_multiplier=0.2,
    logit_cap=3.0,
    jitter=0.6,
    swiglu_limit=1.5,
    mamba_groups=(2, 4),
)
# Large enough for the kernels that run in production on a GPU. Many prompts of `bench.correctness.reference` are longer
# than windows and chunks. gpt-oss's limit and Mamba2's one group are as published: older versions of `transformers`
# compute nothing else right.
SMALL = Sizes(
    vocabulary=4096,
    hidden=384,
    inner=512,
    positions=2048,
    heads=6,
    head_dim=64,
    wide_head=128,
    two_heads=(256, 512),
    oss_head=64,
    window=48,
    chunk=64,
    expert=128,
    shared=128,
    wide_shared=256,
    llama4=(128, 512),
    latent=(512, 128, 128, 64, 128),
    wide_value=256,
    delta=(128, 128),
    mamba=(2, 12, 64, 128, 64),
    layer_input=64,
    query_scale=64,
    attention_multiplier=0.125,
    logit_cap=30.0,
    jitter=0.01,
    swiglu_limit=7.0,
    mamba_groups=(1, 1),
)


def common(sizes: Sizes) -> dict[str, Any]:
    """Configuration of a model, but for what its family has in place of it."""
    return {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": 4,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": 2,
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.positions,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def model_class(model_type: str) -> Any:
    """The class of `transformers` that makes and reads models of a family."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if model_type == "mistral4" else AutoModelForCausalLM


def models(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    """Models by name: `model_type`, and what differs from `common`."""
    return _dense(sizes) | _windowed(sizes) | _with_experts(sizes) | _latent(sizes) | _recurrent(sizes)


def _rope(kind: str, theta: float = 1e4, **own: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **own}}


_LLAMA3 = _rope(
    "llama3", 5e5, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32, factor=4.0
)
_TWO_LAYERS = {"num_hidden_layers": 2}  # where they are alike
_GRANITE = {"embedding_multiplier": 6.0, "residual_multiplier": 0.4, "logits_scaling": 3.0}


def _repeated(values: Sequence[float], count: int) -> list[float]:
    return [values[i % len(values)] for i in range(count)]


def _granite(sizes: Sizes) -> dict[str, Any]:
    return _GRANITE | {"attention_multiplier": sizes.attention_multiplier}


def _dense(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    return {
        "llama": ("llama", {}),
        "llama_biased_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        "llama_one_kv_head": (
            "llama",
            {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": sizes.wide_head},
        ),
        "llama_linear": ("llama", _rope("linear", factor=2.0)),
        "llama_dynamic": ("llama", _rope("dynamic", factor=2.0)),
        "llama_llama3": ("llama", _LLAMA3),
        "llama_yarn": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=64)),
        "arcee": ("arcee", {}),
        "mistral": ("mistral", {"sliding_window": None}),
        "ministral3": (
            "ministral3",
            _TWO_LAYERS
            | _rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        ),
        "nemotron": ("nemotron", {"mlp_bias": True} | _rope("default", partial_rotary_factor=0.5)),
        "jais2": ("jais2", _TWO_LAYERS),
        "qwen2": ("qwen2", {}),
        "qwen3": ("qwen3", {}),
        "seed_oss": ("seed_oss", _TWO_LAYERS | {"attention_out_bias": True, "mlp_bias": True}),
        "gemma": ("gemma", {"tie_word_embeddings": True}),
        "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
        "granite": ("granite", _granite(sizes) | {"attention_bias": True}),
        "hyperclovax": ("hyperclovax", _TWO_LAYERS | _granite(sizes) | {"residual_multiplier": 1.0}),
        "olmo2": ("olmo2", {}),
        "phi": ("phi", _TWO_LAYERS),
        "stablelm": ("stablelm", _TWO_LAYERS | {"use_qkv_bias": True} | _rope("default", partial_rotary_factor=0.5)),
        "stablelm_parallel": (
            "stablelm",
            _TWO_LAYERS | {"use_parallel_residual": True} | _rope("default", partial_rotary_factor=0.5),
        ),
        "gpt2": ("gpt2", _TWO_LAYERS | {"n_inner": sizes.inner, "tie_word_embeddings": True}),
        "gptj": ("gptj", _TWO_LAYERS | {"n_inner": sizes.inner, "rotary_dim": sizes.head_dim // 2}),
        "gpt_neox": ("gpt_neox", _TWO_LAYERS | _rope("default", partial_rotary_factor=0.5)),
        "cohere": ("cohere", _TWO_LAYERS | {"attention_bias": True, "logit_scale": 0.3, "tie_word_embeddings": True}),
        "phi3": ("phi3", {"sliding_window": None}),
        "phi3_partial": ("phi3", _rope("default", partial_rotary_factor=0.5)),
        "phi3_longrope": (
            "phi3",
            {"original_max_position_embeddings": 1}
            | _rope(
                "longrope",
                partial_rotary_factor=0.5,
                original_max_position_embeddings=1,
                attention_factor=1.2,
                short_factor=[1.0] * (sizes.head_dim // 4),
                long_factor=_repeated([1.1, 2.5, 7.0], sizes.head_dim // 4),
            ),
        ),
        "hunyuan_v1_dense": (
            "hunyuan_v1_dense",
            _TWO_LAYERS | _rope("dynamic", alpha=50.0, factor=1.0) | {"attention_bias": True},
        ),
        "glm": ("glm", {"attention_bias": True}),
        "glm4": ("glm4", {"attention_bias": True, "rms_norm_eps": 1e-5}),
        "ernie4_5": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    }


def _windowed(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    """With windows or chunks, the models with experts among them too."""
    window = {"sliding_window": sizes.window}
    gemma = window | {"tie_word_embeddings": True, "query_pre_attn_scalar": sizes.query_scale}
    swash = window | _granite(sizes) | {"layer_rope_theta": [1e4, 0, 1e5]}
    gemma4 = window | {
        "tie_word_embeddings": True,
        "layer_types": SLIDING,
        "head_dim": sizes.two_heads[0],
        "global_head_dim": sizes.two_heads[1],
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": sizes.logit_cap,
    }
    return {
        "mistral_window": ("mistral", window),
        "starcoder2": ("starcoder2", window | {"tie_word_embeddings": True}),
        "qwen2_window": ("qwen2", window | {"use_sliding_window": True, "max_window_layers": 2}),
        "gemma2": ("gemma2", gemma),
        "gemma3": (
            "gemma3_text",
            gemma
            | {
                "layer_types": SLIDING,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        "gemma4": (
            "gemma4_text",
            gemma4
            | {
                "num_hidden_layers": 5,
                "layer_types": ["sliding_attention", *SLIDING],
                "num_kv_shared_layers": 2,
                "use_double_wide_mlp": True,
                "hidden_size_per_layer_input": sizes.layer_input,
                "vocab_size_per_layer_input": sizes.vocabulary,
            },
        ),
        "gemma4_moe": (
            "gemma4_text",
            gemma4
            | {
                "attention_k_eq_v": True,
                "num_global_key_value_heads": 1,
                "enable_moe_block": True,
                "num_experts": 6,
                "top_k_experts": 3,
                "moe_intermediate_size": sizes.expert,
            },
        ),
        "olmo3": ("olmo3", window),
        "cohere2": (
            "cohere2",
            window
            | {"num_hidden_layers": 2, "layer_types": SLIDING[:2], "logit_scale": 0.3, "tie_word_embeddings": True},
        ),
        "granite_swa": ("granite_swa", swash | {"num_hidden_layers": 3, "layer_types": SLIDING[:3]}),
        "granitemoe_swa": (
            "granitemoe_swa",
            swash
            | {"num_hidden_layers": 2, "layer_types": SLIDING[:2], "layer_rope_theta": [1e4, 1e5]}
            | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": sizes.shared},
        ),
        "cwm": ("cwm", window | {"layer_types": SLIDING} | _LLAMA3),
        "cohere2_moe": (
            "cohere2_moe",
            window
            | {"num_hidden_layers": 3, "mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-5}
            | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "logit_scale": 0.3}
            | {"num_experts": 6, "num_experts_per_tok": 3, "num_shared_experts": 2, "expert_selection_fn": "sigmoid"}
            | {"intermediate_size": sizes.expert, "prefix_dense_intermediate_size": sizes.inner},
        ),
        "exaone4": ("exaone4", window | {"layer_types": SLIDING}),
        "exaone_moe": (
            "exaone_moe",
            window | {"layer_types": SLIDING} | _experts(sizes) | {"num_shared_experts": 2, "first_k_dense_replace": 1},
        ),
        "laguna_moe": (
            "laguna",
            window
            | _experts(sizes)
            | {"layer_types": SLIDING[:2], "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"]}
            | {"num_attention_heads_per_layer": [sizes.heads + 2, sizes.heads], "moe_routed_scaling_factor": 1.8}
            | {"shared_expert_intermediate_size": sizes.shared, "head_dim": sizes.wide_head},
        ),
        "afmoe": (
            "afmoe",
            window
            | _experts(sizes)
            | {"num_hidden_layers": 2, "layer_types": SLIDING[:2], "num_dense_layers": 1}
            | {"route_scale": 1.8, "mup_enabled": True},
        ),
        "mellum_moe": (
            "mellum",
            window
            | _experts(sizes)
            | {
                "layer_types": SLIDING,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "yarn",
                        "rope_theta": 1e5,
                        "factor": 4.0,
                        "original_max_position_embeddings": 64,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        ),
        "gpt_oss": (
            "gpt_oss",
            window
            | {
                "num_local_experts": 6,
                "num_experts_per_tok": 3,
                "intermediate_size": sizes.expert,
                "num_attention_heads": 6,
                "head_dim": sizes.oss_head,
                "swiglu_limit": sizes.swiglu_limit,
                "layer_types": SLIDING,
            }
            | _rope(
                "yarn",
                1.5e5,
                factor=4.0,
                beta_fast=4.0,
                beta_slow=0.5,
                truncate=False,
                original_max_position_embeddings=64,
            ),
        ),
        "llama4_moe": (
            "llama4_text",
            {
                "num_local_experts": 5,
                "intermediate_size": sizes.llama4[0],
                "intermediate_size_mlp": sizes.llama4[1],
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1, 0, 1],
                "attention_chunk_size": sizes.chunk,
                "floor_scale": 6,
                "attn_scale": 0.4,
            }
            | _LLAMA3,
        ),
    }


def _experts(sizes: Sizes) -> dict[str, Any]:
    return {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": sizes.expert}


def _sigmoid(sizes: Sizes) -> dict[str, Any]:
    return {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": sizes.expert,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8,
        "norm_topk_prob": True,
    }


def _with_experts(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    granite = _granite(sizes) | {"num_local_experts": 6, "num_experts_per_tok": 3}
    sparse_step = {"decoder_sparse_step": 2, "norm_topk_prob": False}
    return {
        "mixtral": ("mixtral", {"num_local_experts": 5}),
        "phimoe": (
            "phimoe",
            {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True, "router_jitter_noise": sizes.jitter}
            | _rope(
                "longrope",
                original_max_position_embeddings=sizes.positions,
                short_mscale=1.2,
                long_mscale=1.3,
                short_factor=_repeated([1.0, 1.1, 1.3, 2.0, 3.0, 7.0], sizes.head_dim // 2),
                long_factor=[1.0] * (sizes.head_dim // 2),
            ),
        ),
        "qwen2_moe": (
            "qwen2_moe",
            _experts(sizes) | {"shared_expert_intermediate_size": sizes.wide_shared, "mlp_only_layers": [1]},
        ),
        "qwen3_moe": ("qwen3_moe", _experts(sizes) | {"norm_topk_prob": True}),
        "qwen3_moe_sparse_step": ("qwen3_moe", _experts(sizes) | sparse_step),
        "hunyuan_v1_moe": (
            "hunyuan_v1_moe",
            _TWO_LAYERS | {"num_experts": 6, "moe_topk": [3, 3], "intermediate_size": sizes.expert},
        ),
        "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": sizes.expert}),
        "flex_olmo_moe": (
            "flex_olmo",
            _TWO_LAYERS
            | {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": sizes.expert, "attention_bias": True},
        ),
        "granitemoe": ("granitemoe", granite),
        "granitemoeshared": ("granitemoeshared", granite | {"shared_intermediate_size": sizes.shared}),
        "glm4_moe": (
            "glm4_moe",
            _sigmoid(sizes) | {"use_qk_norm": True, "attention_bias": True, "head_dim": sizes.wide_head},
        ),
        "dots1": ("dots1", _sigmoid(sizes) | {"sliding_window": None}),
        "solar_open_moe": (
            "solar_open",
            _TWO_LAYERS | _sigmoid(sizes) | {"first_k_dense_replace": 0, "attention_bias": True},
        ),
        "minimax_m2_moe": (
            "minimax_m2",
            _TWO_LAYERS
            | {
                "num_local_experts": 8,
                "num_experts_per_tok": 3,
                "intermediate_size": sizes.expert,
                "rotary_dim": sizes.wide_head // 2,
                "head_dim": sizes.wide_head,
            },
        ),
        "hy_v3_moe": ("hy_v3", _TWO_LAYERS | _experts(sizes) | {"num_shared_experts": 2, "router_scaling_factor": 1.8}),
        "ernie4_5_moe": (
            "ernie4_5_moe",
            {
                "moe_num_experts": 6,
                "moe_k": 2,
                "moe_intermediate_size": sizes.expert,
                "moe_num_shared_experts": 2,
            },
        ),
    }


def _latent(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    kv_rank, query_rank, plain, rotated, value = sizes.latent
    latent = {
        "kv_lora_rank": kv_rank,
        "q_lora_rank": query_rank,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "v_head_dim": value,
        "num_key_value_heads": sizes.heads,
    }
    yarn = _rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=0.9)
    unlike = {"topk_method": "group_limited_greedy", "norm_topk_prob": False, "q_lora_rank": None}
    return {
        "minicpm3": (
            "minicpm3",
            _TWO_LAYERS
            | latent
            | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": sizes.hidden // 3, "tie_word_embeddings": True}
            | _rope(
                "longrope",
                factor=1.0,
                original_max_position_embeddings=sizes.positions,
                short_factor=_repeated([1.0, 1.1, 1.3, 2.0], rotated // 2),
                long_factor=_repeated([1.1, 2.5, 7.0], rotated // 2),
            ),
        ),
        "deepseek_v2_moe": ("deepseek_v2", latent | _sigmoid(sizes) | unlike | yarn),
        "deepseek_v3_moe": ("deepseek_v3", latent | _sigmoid(sizes) | yarn),
        "mistral4_moe": (
            "mistral4",
            latent
            | _sigmoid(sizes)
            | {"head_dim": plain + rotated, "num_hidden_layers": 2}
            | _rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
            ),
        ),
        "glm4_moe_lite": (
            "glm4_moe_lite",
            latent
            | _sigmoid(sizes)
            | {
                "qk_nope_head_dim": sizes.wide_value - rotated,
                "v_head_dim": sizes.wide_value,
                "rms_norm_eps": 1e-5,
            },
        ),
        "youtu": (
            "youtu",
            latent | {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True, "pad_token_id": None},
        ),
    }


def _recurrent(sizes: Sizes) -> dict[str, tuple[str, dict[str, Any]]]:
    nets = {
        "head_dim": sizes.wide_head,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": sizes.delta[0],
        "linear_value_head_dim": sizes.delta[1],
    }
    mamba = dict(
        zip(
            ("mamba_expand", "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"),
            sizes.mamba,
            strict=True,
        )
    )
    granite = _granite(sizes) | mamba | {"layer_types": MIXED}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": sizes.shared}
    shared = {"shared_expert_intermediate_size": sizes.wide_shared}
    return {
        "qwen3_next": ("qwen3_next", _experts(sizes) | nets | shared),
        "qwen3_5": ("qwen3_5_text", nets | {"full_attention_interval": 2, "tie_word_embeddings": True}),
        "qwen3_5_moe": ("qwen3_5_moe_text", _experts(sizes) | nets | shared),
        "granitemoehybrid": ("granitemoehybrid", granite | experts),
        "granitemoehybrid_dense": (
            "granitemoehybrid",
            granite
            | {"num_local_experts": 0, "mamba_n_groups": sizes.mamba_groups[0], "position_embedding_type": "rope"},
        ),
        "bamba": (
            "bamba",
            mamba | {"mamba_n_groups": sizes.mamba_groups[1], "mamba_conv_bias": False, "attn_layer_indices": [1]},
        ),
        "falcon_h1": (
            "falcon_h1",
            _TWO_LAYERS
            | mamba
            | {
                "mamba_d_ssm": sizes.mamba[1] * sizes.mamba[2],
                "mamba_n_groups": sizes.mamba_groups[0],
                "embedding_multiplier": 5.7,
                "lm_head_multiplier": 0.3,
                "key_multiplier": 0.4,
                "attention_in_multiplier": 1.1,
                "attention_out_multiplier": 0.9,
                "ssm_multipliers": [0.35, 0.25, 0.5, 0.6, 0.7],
                "ssm_in_multiplier": 1.25,
                "ssm_out_multiplier": 0.3,
                "mlp_multipliers": [0.9, 0.6],
            },
        ),
        "nemotron_h": ("nemotron_h", _nemotron_h(sizes, "M-*-M--")),
        "nemotron_h_moe": ("nemotron_h", _nemotron_h_moe(sizes, "EM*EM-E")),
        "nemotron_h_latent_moe": (
            "nemotron_h",
            _nemotron_h_moe(sizes, "MEM*EME") | {"moe_latent_size": sizes.wide_shared},
        ),
        "lfm2": (
            "lfm2",
            {"full_attn_idxs": [1], "conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": True}
            | {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 16},
        ),
        "lfm3": (
            "lfm3",
            {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3}
            | {"sliding_window": sizes.window},
        ),
        "lfm2_moe": (
            "lfm2_moe",
            _experts(sizes) | {"layer_types": CONVOLVED, "num_dense_layers": 1, "routed_scaling_factor": 1.8},
        ),
    }


def _nemotron_h(sizes: Sizes, pattern: str) -> dict[str, Any]:
    """`pattern` has a letter for each layer, as in published configurations. In prompts, `transformers` 5.23 takes
    `time_step_min` for the least step, which its authors' code does not, and neither does in outputs."""
    _, heads, head_dim, state, chunk = sizes.mamba
    return {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "ssm_state_size": state,
        "n_groups": sizes.mamba_groups[0],
        "chunk_size": chunk,
        "time_step_min": 1e-30,
    }


def _nemotron_h_moe(sizes: Sizes, pattern: str) -> dict[str, Any]:
    return (
        _nemotron_h(sizes, pattern)
        | _sigmoid(sizes)
        | {"n_shared_experts": 1, "moe_shared_expert_intermediate_size": 2 * sizes.expert}
    )
