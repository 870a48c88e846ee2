"""What tests of the worker share: tiny random models of every architecture, made by transformers, with a driver that
generates with a Runner; and fixtures of fakes (`fakes.py`) and of schedulers that run on them (`driver.py`)."""

import inspect
import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from bench.correctness import families
from tests.kept import kept_folder
from tests.worker.driver import Driver
from tests.worker.fakes import FakeExecutor, FakeGrammars, FakeParts, Window, pages_now
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore, predicts
from worker.engine.engine import Components
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import MultiRankExecutor
from worker.parallel.communicator import Communicator
from worker.sampling.sampler import Sampler
from worker.step import Chunk, Plan

if not torch.cuda.is_available():
    # As in tests/kernels: before anything imports a kernel of Triton's.
    os.environ.setdefault("TRITON_INTERPRET", "1")

COMMON = families.common(families.TINY)
# By name: model_type, and what differs from COMMON.
TINY = families.models(families.TINY)

_SECTIONS = {"mrope_section": [2, 2, 2], "rope_type": "default", "rope_theta": 1e4}
_HALF = {"rope_parameters": _SECTIONS | {"mrope_section": [1, 1, 1], "partial_rotary_factor": 0.5}}
# Models with a vision part, by `model_type`: that of the text part, and what differs from COMMON in it.
TEXT_PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral3": TINY["ministral3"],
    "exaone4_5": TINY["exaone4"],
    "gemma4_unified": (
        "gemma4_unified_text",
        {key: value for key, value in TINY["gemma4_moe"][1].items() if "moe" not in key and "experts" not in key},
    ),
    "glm46v": ("glm4v_text", _HALF),
    "glm4v_moe": (
        "glm4v_moe_text",
        TINY["glm4_moe"][1] | _HALF | {"use_qk_norm": False, "head_dim": COMMON["head_dim"]},
    ),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"rope_parameters": _SECTIONS}),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": _SECTIONS | {"mrope_interleaved": True}}),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "rope_parameters": _SECTIONS},
    ),
}

# Layers that normalise each head's output magnify what is rounded off: on such models float32 logits of transformers
# are up to 4e-4 from its own with matrix products in float64, and ours up to 6e-4.
DELTA_NETS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]


def make_tiny(name: str, folder: Path, layers: int | None = None, **sizes: int) -> Path:
    """Save a random model under `folder`; every parameter, norms and biases too, is unlike every other. `layers` and
    `sizes` are in place of those in TINY."""
    if layers is not None:
        sizes["num_hidden_layers"] = layers
    model_type, changes = TINY[name]
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(model_type, **(COMMON | changes | sizes))
    model = families.model_class(model_type).from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return folder


def randomise(model: Any) -> None:
    """Gives random values to all parameters of a model, also to those that begin training with one value."""
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key:
                parameter.add_(0.3 * torch.randn_like(parameter))
            else:
                parameter.normal_(0.0, 0.25)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key or "expert_bias" in key:
                buffer.normal_(0.0, 0.25)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.2)


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[str], Path]:
    """Name of TINY to the folder that holds such a model in safetensors, which all tests share."""
    how = [inspect.getsource(makes) for makes in (make_tiny, randomise)]

    @cache
    def get(name: str) -> Path:
        return kept_folder([name, *TINY[name], COMMON, how], lambda folder: make_tiny(name, folder))

    return get


class Sequences:
    """Greedy generation of several sequences with a Runner, as a scheduler would drive it, in shuffled pages."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.num_pages))
        random.Random(seed).shuffle(self.free)
        *_, last = runner.layout.paged
        self.window = Window(last.num_units, last.window_tokens, last.kind == "chunk") if last.window_tokens else None
        self.free_windows = list(range(last.num_units))
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
        if self.window is not None:
            of_windows = np.array(self.window_pages(chunks, self.window), dtype=np.int32)
            plan.pages = np.stack((plan.pages[0], of_windows))
        logits = self.runner.forward(plan).logits
        self.step += 1
        for chunk, rows in zip(chunks, logits.split([c.num_logits for c in chunks]), strict=True):
            self.logits[chunk.slot].append(rows)
            self.computed[chunk.slot] += len(chunk.token_ids)
            if self.computed[chunk.slot] == len(self.tokens[chunk.slot]):
                self.tokens[chunk.slot].append(int(rows[-1].argmax()))

    def window_pages(self, chunks: list[Chunk], window: Window) -> list[int]:
        """The new window pages of chunks. Before them, each sequence gives back those that lie before its window."""
        added = []
        for chunk in chunks:
            own = self.windows.setdefault(chunk.slot, [])
            first = window.first(chunk.start) // self.runner.page_size
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
