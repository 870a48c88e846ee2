"""Tiny random models of every supported architecture, made by transformers, and a driver that generates with a Runner."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from worker.plan import Chunk, Plan
from worker.runner import Runner

COMMON = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32, "factor": 4.0}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# By name: model_type, and what differs from COMMON.
TINY: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama_biased_tied": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama_one_kv_head": ("llama", {"num_key_value_heads": 1, "num_attention_heads": 3, "head_dim": 16}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "llama_dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}),
    "llama_llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}),
    "llama_yarn": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral_window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"tie_word_embeddings": True, "sliding_window": 9, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {
            "tie_word_embeddings": True,
            "sliding_window": 9,
            "query_pre_attn_scalar": 16,
            "layer_types": SLIDING,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}


def make_tiny(name: str, folder: Path, **save: object) -> Path:
    """Save a random model under `folder`; every parameter, norms and biases too, is unlike every other."""
    model_type, changes = TINY[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(model_type, **(COMMON | changes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder, **save)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Name of TINY to the folder that holds such a model in safetensors."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


class Sequences:
    """Greedy generation of several sequences with a Runner, as a scheduler would drive it, in shuffled pages."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.num_pages))
        random.Random(seed).shuffle(self.free)
        self.computed: dict[int, int] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logits: dict[int, list[torch.Tensor]] = {}
        self.step = 0

    def add(self, slot: int, prompt: list[int]) -> None:
        self.tokens[slot], self.computed[slot], self.logits[slot] = list(prompt), 0, []

    def advance(self, lengths: dict[int, int]) -> None:
        """One step: up to so many missing tokens of each slot, in this order, with logits for all of them."""
        chunks, page_size = [], self.runner.page_size
        for slot, length in lengths.items():
            start = self.computed[slot]
            token_ids = self.tokens[slot][start : start + length]
            needed = -(-(start + len(token_ids)) // page_size) - -(-start // page_size)
            pages = [self.free.pop() for _ in range(needed)]
            chunks.append(Chunk(slot, start, token_ids, pages, start == 0, len(token_ids)))
        logits = self.runner.forward(Plan(self.step, chunks))
        self.step += 1
        for chunk, rows in zip(chunks, logits.split([c.num_logits for c in chunks]), strict=True):
            self.logits[chunk.slot].append(rows)
            self.computed[chunk.slot] += len(chunk.token_ids)
            if self.computed[chunk.slot] == len(self.tokens[chunk.slot]):
                self.tokens[chunk.slot].append(int(rows[-1].argmax()))
