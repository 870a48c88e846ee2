"""What tests of the worker share: tiny random models of every architecture, made by transformers, with a driver that
generates with a Runner; and fixtures of fakes (`fakes.py`) and of schedulers that run on them (`driver.py`)."""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from tests.worker.driver import Driver
from tests.worker.fakes import FakeExecutor, FakeGrammars, FakeParts, pages_now
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore, predicts
from worker.engine.engine import Components
from worker.executor.executor import WindowPages
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import MultiRankExecutor
from worker.parallel.communicator import Communicator
from worker.sampling.sampler import Sampler
from worker.step import Chunk, Plan

if not torch.cuda.is_available():
    # As in tests/kernels: before anything imports a kernel of Triton's.
    os.environ.setdefault("TRITON_INTERPRET", "1")

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

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "norm_topk_prob": True,
}
NETS = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 3.0,
}

MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 12, "mamba_expand": 1, "mamba_d_state": 6, "mamba_chunk_size": 16}
MIXED = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]

LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}

GPT_OSS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 20,
    "num_attention_heads": 6,
    "head_dim": 8,
    "sliding_window": 9,
    "swiglu_limit": 1.5,
    "layer_types": SLIDING,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}

GEMMA4 = {
    "tie_word_embeddings": True,
    "sliding_window": 9,
    "layer_types": SLIDING,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}

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
    "gemma4": (
        "gemma4_text",
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "layer_types": ["sliding_attention", *SLIDING],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 131,
        },
    ),
    "gemma4_moe": (
        "gemma4_text",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 20,
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "granite": ("granite", GRANITE | {"attention_bias": True}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 9}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3_partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "phi3_longrope": (
        "phi3",
        {
            "original_max_position_embeddings": 1,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "original_max_position_embeddings": 1,
                "attention_factor": 1.2,
                "short_factor": [1.0, 1.0, 1.0],
                "long_factor": [1.1, 2.5, 7.0],
            },
        },
    ),
    "glm": ("glm", {"attention_bias": True}),
    "glm4": ("glm4", {"attention_bias": True, "rms_norm_eps": 1e-5}),
    "ernie4_5": ("ernie4_5", {"use_bias": True, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"num_local_experts": 5}),
    "phimoe": (
        "phimoe",
        {
            "num_local_experts": 5,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.6,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "short_factor": [1.0, 1.1, 1.3, 2.0, 3.0, 7.0],
                "long_factor": [1.0] * 6,
            },
        },
    ),
    "qwen2_moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 28, "mlp_only_layers": [1]}),
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe_sparse_step": ("qwen3_moe", EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}),
    "granitemoe": ("granitemoe", GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "granitemoeshared": (
        "granitemoeshared",
        GRANITE | {"num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 24},
    ),
    "glm4_moe": ("glm4_moe", SIGMOID | {"use_qk_norm": True, "attention_bias": True, "head_dim": 16}),
    "dots1": ("dots1", SIGMOID | {"sliding_window": None}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 2},
    ),
    "deepseek_v2_moe": (
        "deepseek_v2",
        LATENT
        | SIGMOID
        | {
            "topk_method": "group_limited_greedy",
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "rope_parameters": YARN,
        },
    ),
    "deepseek_v3_moe": ("deepseek_v3", LATENT | SIGMOID | {"rope_parameters": YARN}),
    "glm4_moe_lite": ("glm4_moe_lite", LATENT | SIGMOID | {"v_head_dim": 20, "rms_norm_eps": 1e-5}),
    "youtu": (
        "youtu",
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "tie_word_embeddings": True, "pad_token_id": None},
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "llama4_moe": (
        "llama4_text",
        {
            "num_local_experts": 5,
            "intermediate_size": 28,
            "intermediate_size_mlp": 44,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 16,
            "floor_scale": 6,
            "attn_scale": 0.4,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
        },
    ),
    "qwen3_next": ("qwen3_next", EXPERTS | NETS | {"shared_expert_intermediate_size": 28}),
    "qwen3_5": ("qwen3_5_text", NETS | {"full_attention_interval": 2, "tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS | NETS | {"shared_expert_intermediate_size": 28}),
    "granitemoehybrid": (
        "granitemoehybrid",
        GRANITE
        | MAMBA2
        | {"layer_types": MIXED, "num_local_experts": 6, "num_experts_per_tok": 3, "shared_intermediate_size": 24},
    ),
    "granitemoehybrid_dense": (
        "granitemoehybrid",
        GRANITE
        | MAMBA2
        | {"layer_types": MIXED, "num_local_experts": 0, "mamba_n_groups": 2, "position_embedding_type": "rope"},
    ),
    "bamba": ("bamba", MAMBA2 | {"mamba_n_groups": 4, "mamba_conv_bias": False, "attn_layer_indices": [1]}),
}

# Layers that normalise each head's output magnify what is rounded off: on such models float32 logits of transformers
# are up to 4e-4 from its own with matrix products in float64, and ours up to 6e-4.
DELTA_NETS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
# With recurrent states.
HYBRIDS = [*DELTA_NETS, "granitemoehybrid", "granitemoehybrid_dense", "bamba"]


def make_tiny(name: str, folder: Path, layers: int | None = None, **sizes: int) -> Path:
    """Save a random model under `folder`; every parameter, norms and biases too, is unlike every other. `layers` and
    `sizes` are in place of those in TINY."""
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    model_type, changes = TINY[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(model_type, **(COMMON | changes | sizes))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.25)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key:
                buffer.normal_(0.0, 0.25)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.2)
    model.save_pretrained(folder)
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

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.num_pages))
        random.Random(seed).shuffle(self.free)
        self.free_windows = list(range(runner.window.num_pages)) if runner.window else []
        random.Random(seed).shuffle(self.free_windows)
        self.windows: dict[int, list[int]] = {}  # by slot, its window pages; those that it gave back are -1
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
            held = -(-start // page_size)
            pages = [self.free.pop() for _ in range(-(-(start + len(token_ids)) // page_size) - held)]
            chunks.append(Chunk(slot, start, token_ids, held, pages, len(token_ids)))
        plan = Plan.from_chunks(self.step, chunks)
        if (window := self.runner.window) is not None:
            plan.window_pages = np.array(self.window_pages(chunks, window), dtype=np.int32)
        logits = self.runner.forward(plan).logits
        self.step += 1
        for chunk, rows in zip(chunks, logits.split([c.num_logits for c in chunks]), strict=True):
            self.logits[chunk.slot].append(rows)
            self.computed[chunk.slot] += len(chunk.token_ids)
            if self.computed[chunk.slot] == len(self.tokens[chunk.slot]):
                self.tokens[chunk.slot].append(int(rows[-1].argmax()))

    def window_pages(self, chunks: list[Chunk], window: WindowPages) -> list[int]:
        """The new window pages of chunks. Before them, each sequence gives back those that lie before its window."""
        added = []
        for chunk in chunks:
            own = self.windows.setdefault(chunk.slot, [])
            first = max(0, chunk.start - window.window_tokens + 1)
            if window.in_chunks:
                first = chunk.start // window.window_tokens * window.window_tokens
            first //= self.runner.page_size
            self.free_windows += [page for page in own[:first] if page >= 0]
            own[:first] = [-1] * first
            new = [self.free_windows.pop() for _ in chunk.pages]
            own += new
            added += new
        return added


def together(size: int, work: Callable[[Communicator], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `work` returns on each of `size` ranks, which are threads of this process. Raises the first rank's error."""
    store = dist.HashStore()

    def rank(index: int) -> Any:
        with closing(Communicator.join(store, index, size, torch.device("cpu"), timeout_s)) as group:
            try:
                result = work(group)
            except Exception as error:
                group.fail(f"rank {index}: {error!r}")
                raise
            group.barrier()  # who leaves early takes its connections along
            return result

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(rank, index) for index in range(size)]]


@pytest.fixture(scope="session")
def fake_executor() -> type[FakeExecutor]:
    """The class: make one of any size."""
    return FakeExecutor


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are let in as if those that run needed no more pages than for the tokens they have: many are preempted
    then."""
    monkeypatch.setattr("worker.scheduler.kv_demand.peak_pages", pages_now)


def without_grammars(model_dir: Path, config: WorkerConfig, executor: ModelRunner | MultiRankExecutor) -> Components:
    """The real parts but for the grammars' compiler, a process that most tests have no use for."""
    sampler = Sampler(config.max_running, executor.vocab_size, executor.device, executor.last_tokens)
    costs = CostStore.load(model_dir, config, executor.device) if predicts(config) else CostStore()
    return Components(executor, sampler, FakeGrammars(), costs)


@pytest.fixture(scope="session")
def fake_parts() -> type[FakeParts]:
    """The class: its arguments are the fake executor's."""
    return FakeParts


@pytest.fixture(params=[False, True], ids=["", "overlap"])
def drive(fake_executor, request):
    """Makes a Driver; at the end nothing may be left over."""
    drivers = []

    def make(num_pages: int = 64, page_size: int = 4, **config) -> Driver:
        names = ("vocab_size", "context_length", "num_checkpoints", "window")
        executor = {name: config.pop(name) for name in names if name in config}
        fake = fake_executor(num_pages=num_pages, page_size=page_size, **executor)
        drivers.append(Driver(fake, overlap=request.param, **config))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.land()
        driver.scheduler.check_integrity()
        driver.scheduler.abort(list(driver.scheduler._sequences))
        driver.scheduler.check_integrity()
        assert driver.tree.num_cached + driver.tree.pool.num_free == driver.executor.num_pages
        driver.tree.reset()
        assert driver.tree.pool.num_free == driver.executor.num_pages
