"""A model of a few hundred kilobytes with a byte tokenizer, in a folder as the hub has it: made without torch."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "dtype": "float32",
}
TEMPLATE = (
    "{% for message in messages %}<|start|>{{ message.role }}: {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    save_file(_weights(np.random.default_rng(7)), folder / "model.safetensors", {"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _weights(random: np.random.Generator) -> dict[str, np.ndarray]:
    hidden, inner, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    queries, keys = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }

    def normal(*shape: int) -> np.ndarray:
        return (random.standard_normal(shape) * 0.3).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": normal(CONFIG["vocab_size"], hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": normal(CONFIG["vocab_size"], hidden),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights |= {f"{prefix}.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float32)
    return weights


def _tokenizer() -> Tokenizer:
    """Every byte is a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    return tokenizer


@pytest.fixture
def free_port() -> int:
    return find_port()


@pytest.fixture(scope="session")
def session_port() -> int:
    return find_port()


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
