"""What tests of the worker share: tiny random models of every architecture, made by transformers, with a driver that
generates with a Runner; and a fake runner whose answers are a hash, for everything that needs no model."""

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline.cost import CostModel
from pipeline.roofline import DEVICES, MODELS, Stage
from worker.config import WorkerConfig
from worker.costs import Costs
from worker.engine import Parts
from worker.forecast import Claim, most_pages
from worker.messages import Failure, Grammar
from worker.parallel import Group
from worker.plan import PENDING, Chunk, Plan
from worker.ranks import Leader
from worker.runner import Ran, Runner
from worker.sampling import SampledTokens, Sampler

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
            held = -(-start // page_size)
            pages = [self.free.pop() for _ in range(-(-(start + len(token_ids)) // page_size) - held)]
            chunks.append(Chunk(slot, start, token_ids, held, pages, len(token_ids)))
        logits = self.runner.forward(Plan.of(self.step, chunks))
        self.step += 1
        for chunk, rows in zip(chunks, logits.split([c.num_logits for c in chunks]), strict=True):
            self.logits[chunk.slot].append(rows)
            self.computed[chunk.slot] += len(chunk.token_ids)
            if self.computed[chunk.slot] == len(self.tokens[chunk.slot]):
                self.tokens[chunk.slot].append(int(rows[-1].argmax()))


def together(size: int, work: Callable[[Group], Any], timeout_s: float = 60.0) -> list[Any]:
    """What `work` returns on each of `size` ranks, which are threads of this process. Raises the first rank's error."""
    store = dist.HashStore()

    def rank(index: int) -> Any:
        with closing(Group.join(store, index, size, torch.device("cpu"), timeout_s)) as group:
            try:
                result = work(group)
            except Exception as error:
                group.fail(f"rank {index}: {error!r}")
                raise
            group.meet()  # who leaves early takes its connections along
            return result

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(rank, index) for index in range(size)]]


MASK = (1 << 62) - 1


def mix(state: int, value: int) -> int:
    """A hash of both, 62 bits."""
    x = (state * 0x9E3779B97F4A7C15 + value + 1) & MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & MASK


class FakeRunner:
    """A runner whose "model" is a hash, with KV in pages like a real one's, so that a wrong page, position or token
    gives a wrong next token: a token's KV depends on all tokens before it, and the next token on the KV of all.

    Tokens are 0 .. vocab_size-1. Pages start with rubbish. A step that computes the token `poison` fails.
    """

    def __init__(
        self,
        num_pages: int = 64,
        page_size: int = 4,
        vocab_size: int = 50,
        context_length: int = 10_000,
        eos_token_ids: tuple[int, ...] = (),
        poison: int | None = None,
    ) -> None:
        self.num_pages, self.page_size, self.vocab_size = num_pages, page_size, vocab_size
        self.context_length = min(context_length, num_pages * page_size)
        self.eos_token_ids = eos_token_ids
        self.device = torch.device("cpu")
        self.last_tokens = torch.full((1024,), -7)
        self.likeliest = None
        self.poison = poison
        self.plans: list[Plan] = []
        self.kv = np.random.default_rng(0).integers(0, MASK, size=num_pages * page_size)
        self.tables: dict[int, list[int]] = {}
        self.expected: list[Plan] = []

    def expect(self, plan: Plan) -> None:
        self.expected.append(plan)

    def sampled(self, plan: Plan) -> None:
        pass

    def ran(self) -> list[Ran]:
        return []

    def forward(self, plan: Plan) -> torch.Tensor:
        assert not self.expected or self.expected.pop(0) is plan
        self.plans.append(plan)
        assert len(set(plan.slots.tolist())) == len(plan)
        seen = [row for chunk in plan.chunks for row in self._chunk(chunk)]
        return self.logits(seen)

    def logits(self, seen: list[int]) -> torch.Tensor:
        """Float32 `[n, vocab_size]`, by the hash of all that a token depends on."""
        logits = torch.full((len(seen), self.vocab_size), -1.0)
        for i, one in enumerate(seen):
            logits[i, self._next(one)] = 9.0
        return logits

    def close(self) -> None:
        pass

    def _chunk(self, chunk: Chunk) -> list[int]:
        """What the next token depends on, after each of the last `num_logits` tokens."""
        token_ids = chunk.token_ids
        if token_ids == [PENDING]:
            token_ids = [int(self.last_tokens[chunk.slot])]
        assert min(token_ids) >= 0, "a token that nobody knows"
        assert self.poison not in token_ids, "a poisoned token"
        table = self.tables.setdefault(chunk.slot, [])
        assert len(table) >= chunk.num_kept
        table[chunk.num_kept :] = chunk.pages
        assert len(set(table)) == len(table)
        end = chunk.start + len(token_ids)
        where = (np.array(table)[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:end]
        assert len(where) == end, "a chunk without pages"
        states = self.kv[where]
        for i, token in enumerate(token_ids, chunk.start):
            states[i] = mix(int(states[i - 1]) if i else 0, token)
        self.kv[where[chunk.start :]] = states[chunk.start :]
        seen = np.bitwise_xor.accumulate(states)
        return seen[end - chunk.num_logits :].tolist()

    def _next(self, seen: int) -> int:
        return mix(seen, 7) % self.vocab_size

    def generate(self, prompt: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> list[int]:
        """What it should say, computed without pages: until a stop token, `max_tokens` or the context's end."""
        state = seen = 0
        for token in prompt:
            state = mix(state, token)
            seen ^= state
        output: list[int] = []
        while len(output) < min(max_tokens, self.context_length - len(prompt)):
            token = self._next(seen)
            output.append(token)
            if token in stop_ids:
                break
            state = mix(state, token)
            seen ^= state
        return output


@pytest.fixture(scope="session")
def fake_runner() -> type[FakeRunner]:
    """The class: make one of any size."""
    return FakeRunner


class FakeSampler:
    """Takes the likeliest token. Holds the calling order to the contract: a slot is added, sampled, removed."""

    def __init__(self, last_tokens: torch.Tensor) -> None:
        self.last_tokens = last_tokens
        self.slots: dict[int, list[int]] = {}
        self.refuse: int | None = None  # the first token of a prompt that `add` cannot take
        self.choke: int | None = None  # the first token of a prompt that gets a failure from `sample`
        self.broken = False  # whether `sample` raises

    def add(self, slot, sampling, prompt_ids, output_ids, eos_token_ids, grammar) -> None:
        assert slot not in self.slots
        if prompt_ids[0] == self.refuse:
            raise RuntimeError("the sampler does not like it")
        self.slots[slot] = prompt_ids + output_ids

    def remove(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def launch(self, logits: torch.Tensor, slots: np.ndarray, likeliest: None) -> "FakePending":
        assert logits.shape[0] == len(slots) and set(slots[slots >= 0].tolist()) <= set(self.slots)
        if self.broken:
            raise RuntimeError("the sampler is broken")
        choke = Failure("invalid", "the sampler chokes", "regex")
        wanted = np.flatnonzero(slots >= 0)
        slots, tokens = slots[wanted], logits.argmax(1).numpy()[wanted]
        self.last_tokens[slots] = torch.from_numpy(tokens)
        choked = {i: choke for i, slot in enumerate(slots.tolist()) if self.slots[slot][0] == self.choke}
        return FakePending(SampledTokens(tokens, {}, choked, []))


class FakePending:
    def __init__(self, sampled: SampledTokens) -> None:
        self.sampled = sampled

    def result(self) -> SampledTokens:
        return self.sampled


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences are let in as if those that run needed no more pages than for the tokens they have: many are preempted
    then."""
    monkeypatch.setattr("worker.forecast.most_pages", pages_now)


def pages_now(claims: list[Claim], page_size: int) -> int:
    return most_pages([claim._replace(to_come=0) for claim in claims], page_size)


class FakeGrammars:
    """A compiler whose futures the test settles."""

    def __init__(self) -> None:
        self.futures: list[Future] = []
        self.closed = False

    def submit(self, grammar: Grammar) -> Future:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        self.closed = True


def any_models(stages: int) -> list[CostModel]:
    """What the stages of some pipeline cost."""
    stage = Stage(MODELS["llama-8b"], DEVICES["h200"], 8)
    return [CostModel(stage.seconds) for _ in range(stages)]


def without_grammars(model_dir: Path, config: WorkerConfig, runner: Runner | Leader) -> Parts:
    """The real parts but for the grammars' compiler, a process that most tests have no use for."""
    sampler = Sampler(config.max_running, runner.vocab_size, runner.device, runner.last_tokens)
    costs = Costs.of(model_dir, config, runner.device) if config.schedule_name == "uniform" else Costs()
    return Parts(runner, sampler, FakeGrammars(), costs)


class FakeParts:
    """For `load=` of an engine: a fake runner, sampler and compiler."""

    def __init__(self, **runner: object) -> None:
        self.runner = FakeRunner(**runner)
        self.sampler = FakeSampler(self.runner.last_tokens)
        self.grammars = FakeGrammars()

    def __call__(self, model_dir: Path, config: WorkerConfig) -> Parts:
        self.runner.page_size = config.page_size
        return Parts(self.runner, self.sampler, self.grammars, Costs(any_models(config.pp)))


@pytest.fixture(scope="session")
def fake_parts() -> type[FakeParts]:
    """The class: its arguments are the fake runner's."""
    return FakeParts
