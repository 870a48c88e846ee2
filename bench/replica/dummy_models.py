"""Models of well-known shapes without their weights, since speed does not depend on the values.

`write` makes a folder with a configuration and a tokenizer, `written` one that is removed afterwards. With
`load_format: dummy`, a replica gives the model random weights.
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = 256
CONSONANTS, VOWELS = "bcdfghjklmnpqrstvwyz", "aeiou"

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "sliding_window": None,
    "dtype": "bfloat16",
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
_DEEPSEEK_V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 163840,
    "vocab_size": 102400,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "dtype": "bfloat16",
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "max_position_embeddings": 131072,
    "vocab_size": 201088,
    "bos_token_id": 199998,
    "eos_token_id": 200002,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "attention_bias": True,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_GPT_OSS_MXFP4 = _GPT_OSS | {"quantization_config": {"quant_method": "mxfp4"}}  # as the models are published
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
_QWEN3_NEXT = _QWEN3_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "rope_theta": 10000000.0,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_SMALL = _LLAMA | {"vocab_size": 10240, "bos_token_id": 10238, "eos_token_id": 10239}


@dataclass(frozen=True)
class Shape:
    """The shape of a model. `label` names the model in figures; `config` is a Hugging Face configuration."""

    label: str
    config: dict[str, Any]


def _shape(
    label: str, base: dict[str, Any], layers: int, hidden: int, inner: int, heads: int, kv_heads: int, **other: Any
) -> Shape:
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
    }
    return Shape(label, base | sizes | other)


SHAPES: dict[str, Shape] = {
    "llama-8b": _shape("llama8b", _LLAMA, 32, 4096, 14336, 32, 8),
    "llama-70b": _shape("llama70b", _LLAMA, 80, 8192, 28672, 64, 8),
    "qwen3-0.6b": _shape("qwen3_06b", _QWEN3, 28, 1024, 3072, 16, 8, tie_word_embeddings=True),
    "qwen3-14b": _shape("qwen3_14b", _QWEN3, 40, 5120, 17408, 40, 8),
    "qwen3-30b-a3b": _shape(
        "qwen3_30b_a3b",
        _QWEN3_MOE,
        48,
        2048,
        6144,
        32,
        4,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    # A third of the 48 layers, which one GPU holds next to states and pages.
    "qwen3-next-cut": _shape(
        "qwen3_next_cut",
        _QWEN3_NEXT,
        16,
        2048,
        5120,
        16,
        2,
        head_dim=256,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
    "deepseek-v2-lite": _shape(
        "deepseek_v2_lite",
        _DEEPSEEK_V2,
        27,
        2048,
        10944,
        16,
        16,
        q_lora_rank=None,
        n_routed_experts=64,
        num_experts_per_tok=6,
        moe_intermediate_size=1408,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
    ),
    "gpt-oss-20b": _shape(
        "gpt_oss_20b", _GPT_OSS, 24, 2880, 2880, 64, 8, head_dim=64, num_local_experts=32, num_experts_per_tok=4
    ),
    "gpt-oss-20b-mxfp4": _shape(
        "gpt_oss_20b_mxfp4",
        _GPT_OSS_MXFP4,
        24,
        2880,
        2880,
        64,
        8,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
    ),
    "gpt-oss-120b": _shape(
        "gpt_oss_120b", _GPT_OSS_MXFP4, 36, 2880, 2880, 64, 8, head_dim=64, num_local_experts=128, num_experts_per_tok=4
    ),
    "gemma3-12b": _shape("gemma3_12b", _GEMMA3, 48, 3840, 15360, 16, 8, head_dim=256),
    # For trying out a benchmark on any machine. The vocabulary holds the token ids of every workload. With `tiny`, a
    # CPU computes a step faster than the host prepares it; with `small`, computing takes longer.
    "tiny": _shape("tiny", _SMALL, 2, 64, 128, 4, 2, head_dim=64),
    "small": _shape("small", _SMALL, 8, 384, 1024, 6, 2, head_dim=64),
}


def write(name: str, folder: Path) -> Path:
    """Writes config.json and tokenizer.json of a model of SHAPES to `folder`, which is made if it does not exist.
    Returns `folder`."""
    config = SHAPES[name].config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tokenizer(config["vocab_size"], (config["bos_token_id"], config["eos_token_id"])).save(
        str(folder / "tokenizer.json")
    )
    return folder


@contextmanager
def written(name: str) -> Iterator[Path]:
    """A folder of that name with a model of SHAPES, for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        yield write(name, Path(scratch) / name)


def tokenizer(vocab_size: int, special_ids: tuple[int, int]) -> Any:
    """A `tokenizers.Tokenizer` with a text for every id below `vocab_size`: 256 bytes, then distinct invented words,
    each after a space. The words are about as long as in a real vocabulary, so detokenizing and sending text cost as
    much as for a real model. Encoding turns text into bytes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    spelled = sorted(pre_tokenizers.ByteLevel.alphabet()) + [f"Ġ{word(i)}" for i in range(vocab_size - BYTES)]
    special = ("<|begin|>", "<|end|>")
    for token_id, content in zip(special_ids, special, strict=True):
        spelled[token_id] = content
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(spelled)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in special])
    return made


def word(number: int) -> str:
    """A word of at least two syllables. Different numbers give different words."""
    syllables: list[str] = []
    while number or len(syllables) < 2:
        number, syllable = divmod(number, len(CONSONANTS) * len(VOWELS))
        syllables.append(CONSONANTS[syllable % len(CONSONANTS)] + VOWELS[syllable // len(CONSONANTS)])
    return "".join(syllables)
