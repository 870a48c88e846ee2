"""A made-up model for agents: `python -m bench.correctness.clients.made_model TOKENIZER_FOLDER FOLDER`.

Agents send prompts of 20,000 tokens, which a real model on a CPU takes minutes for. This one has a context of 131,072
tokens and next to nothing to compute: its layer adds nothing, so that each token depends on the one before it alone. It
says "Hello!" and ends; inside a grammar it ends strings, lists and objects as soon as it may. What it shall call, it is
told by `director`.
"""

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

CONTEXT = 131_072
HIDDEN, HEAD = 64, 32
SAID = "Hello!"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CLOSING = {'"': 3.0, "}": 2.5, "]": 2.0, "0": 1.5, "a": 1.0}


def make(tokenizer_folder: Path, folder: Path) -> None:
    """Writes the model. Its tokenizer and template are those of a model of the family SmolLM2."""
    folder.mkdir(parents=True)
    for name in FILES:
        shutil.copy(tokenizer_folder / name, folder / name)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False).ids
    size = tokenizer.get_vocab_size()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN // HEAD,
        "num_key_value_heads": 1,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": end,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(_weights(tokenizer, end, size), folder / "model.safetensors", {"format": "pt"})


def _weights(tokenizer: Tokenizer, end: int, size: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    known = random.standard_normal((size, HIDDEN)).astype(np.float32)
    known[:, 0] = 12.0  # the same for all tokens: what is likely after any
    scores = np.zeros((size, HIDDEN), np.float32)
    scores[end, 0] = 4.0
    for text, score in CLOSING.items():
        scores[tokenizer.token_to_id(text), 0] = score
    (line,) = tokenizer.encode("\n", add_special_tokens=False).ids  # the prompt's last token
    chain = [line, *tokenizer.encode(SAID, add_special_tokens=False).ids, end]
    for before, after in pairwise(chain):
        scores[after, 1:] += 2 * known[before, 1:]
    layer = "model.layers.0"
    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HEAD, HIDDEN),
        "self_attn.v_proj": (HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (HIDDEN, HIDDEN),
        "mlp.up_proj": (HIDDEN, HIDDEN),
        "mlp.down_proj": (HIDDEN, HIDDEN),
    }
    weights: dict[str, np.ndarray] = {
        f"{layer}.{name}.weight": np.zeros(shape, np.float32) for name, shape in shapes.items()
    }
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    weights |= {f"{name}.weight": np.ones(HIDDEN, np.float32) for name in norms}
    return weights | {"model.embed_tokens.weight": known, "lm_head.weight": scores}


if __name__ == "__main__":
    make(Path(sys.argv[1]), Path(sys.argv[2]))
