"""An executor whose answers are a hash, and what goes with it, for everything of the worker that needs no model."""

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from pipeline.cost import CostModel
from pipeline.roofline import DEVICES, MODELS, StageSpec
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components
from worker.executor.attention_selector import AttentionChoice
from worker.executor.executor import Executor, ForwardOutput
from worker.kv_layout import SLOT, KVGroup, KVLayout
from worker.messages import Failure, Grammar
from worker.progress import NewestSteps
from worker.scheduler.kv_demand import KVClaim, peak_pages
from worker.step import PENDING, Chunk, Copy, Plan, SampledTokens, StepTime
from worker.structured_output.compiling.answer_verdict import AnswerToCheck

MASK = (1 << 62) - 1


def copies_of(plan: Plan) -> list[Copy]:
    """The copies of a plan one by one."""
    return [Copy(*row) for row in plan.copies.tolist()]


def mix(state: int, value: int) -> int:
    """A hash of both, 62 bits."""
    x = (state * 0x9E3779B97F4A7C15 + value + 1) & MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & MASK


class Window(NamedTuple):
    """Layers with a window, or with chunks, and the number of their pages."""

    num_pages: int
    tokens: int
    in_chunks: bool = False

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return position // self.tokens * self.tokens if self.in_chunks else max(0, position - self.tokens + 1)


def make_layout(num_pages: int, page_size: int, num_rows: int | None = None, window: Window | None = None) -> KVLayout:
    """The layout of a model that has states if `num_rows` is given, and a window if `window` is."""
    groups = [KVGroup("full", (0,), 1, num_pages)]
    if window is not None:
        groups.append(KVGroup("chunk" if window.in_chunks else "window", (1,), 1, window.num_pages, window.tokens))
    if num_rows is not None:
        groups.append(KVGroup("states", (2,), 1, num_rows))
    return KVLayout(page_size, tuple(groups))


class FakeExecutor(Executor):
    """An executor whose "model" is a hash, with KV in pages like a real one's, so that a wrong page, position or token
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
        num_checkpoints: int | None = None,
        window: Window | None = None,
    ) -> None:
        self.has_states, self.vocab_size = num_checkpoints is not None, vocab_size
        self.layout = make_layout(num_pages, page_size, num_checkpoints, window)
        self.context_length = min(context_length, num_pages * page_size)
        self.eos_token_ids = eos_token_ids
        self.device = torch.device("cpu")
        self.last_tokens = torch.full((1024,), -7)
        self.attention_choice = AttentionChoice("none")
        self.poison = poison
        self.plans: list[Plan] = []
        self.kv = np.random.default_rng(0).integers(0, MASK, size=num_pages * page_size)
        self.tables: dict[int, list[int]] = {}
        self.window = window
        window_tokens = window.num_pages * page_size if window else 0
        self.window_kv = np.random.default_rng(1).integers(0, MASK, size=window_tokens)
        self.window_tables: dict[int, list[int]] = {}
        self.expected: list[Plan] = []
        self.states: dict[int, tuple[int, int]] = {}  # by slot: number of tokens, and a hash of them
        self.rows = [(-1, 0)] * (num_checkpoints or 0)  # of checkpoints

    def announce(self, plan: Plan) -> None:
        self.expected.append(plan)

    def finish_step(self, plan: Plan) -> None:
        pass

    def take_step_times(self) -> list[StepTime]:
        return []

    @property
    def newest_steps(self) -> NewestSteps:
        newest = self.plans[-1].step if self.plans else 0
        return NewestSteps(newest, newest)

    def forward(self, plan: Plan) -> ForwardOutput:
        assert not self.expected or self.expected.pop(0) is plan
        self.plans.append(plan)
        assert len(set(plan.slots.tolist())) == len(plan)
        copies = copies_of(plan)
        if self.has_states:
            self._begin_states(plan, copies)
        seen = [
            row
            for index, chunk in enumerate(plan.chunks)
            for row in self._chunk(chunk, [copy for copy in copies if copy.chunk == index])
        ]
        if self.window is not None:
            self._run_windows(plan, self.window)
        return ForwardOutput(self.logits(seen))

    def logits(self, seen: list[int]) -> torch.Tensor:
        """Float32 `[n, vocab_size]`, by the hash of all that a token depends on."""
        logits = torch.full((len(seen), self.vocab_size), -1.0)
        for i, one in enumerate(seen):
            logits[i, self._next(one)] = 9.0
        return logits

    def close(self) -> None:
        pass

    def _run_windows(self, plan: Plan, window: Window) -> None:
        """Keeps each token's KV in window pages too, and reads those of the windows as the chunks find them."""
        added, size = np.split(plan.pages[1], np.cumsum(plan.num_pages)[:-1]), self.page_size
        for chunk, pages in zip(plan.chunks, added, strict=True):
            table = self.window_tables.setdefault(chunk.slot, [])
            table[chunk.num_kept_pages :] = pages.tolist()
            end, first = chunk.start + len(chunk.token_ids), window.first(chunk.start)
            assert len(set(table[first // size :])) == len(table[first // size :])
            where, there = (
                (np.array(one)[:, None] * size + np.arange(size)).ravel()[first:end]
                for one in (table, self.tables[chunk.slot])
            )
            begun = chunk.start - first
            assert (self.window_kv[where[:begun]] == self.kv[there[:begun]]).all(), "a window of other tokens"
            self.window_kv[where[begun:]] = self.kv[there[begun:]]

    def _begin_states(self, plan: Plan, copies: list[Copy]) -> None:
        """Recurrent states as they are before the step. Rows are read before any is written."""
        reads = [copy for copy in copies if copy.to_tier == SLOT]
        assert all(copy.position == plan.starts[copy.chunk] for copy in reads), "states that a chunk has changed"
        assert all(copy.to_unit == plan.slots[copy.chunk] for copy in reads), "another sequence's slot"
        read = {copy.chunk: self.rows[copy.from_unit] for copy in reads}
        for index, (slot, start) in enumerate(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True)):
            if start == 0 or index in read:
                self.states[slot] = read.get(index, (0, 0))

    def _run_states(self, chunk: Chunk, token_ids: list[int], copies: list[Copy]) -> int:
        """Goes on from the states of the chunk's slot, and saves them in rows. Returns the hash of all tokens."""
        at, state = self.states[chunk.slot]
        assert at == chunk.start, "states after other tokens"
        for token in token_ids:
            at, state = at + 1, mix(state, token)
            for copy in copies:
                if copy.from_tier == SLOT and copy.position == at:
                    assert copy.from_unit == chunk.slot, "states of another sequence"
                    self.rows[copy.to_unit] = at, state
        self.states[chunk.slot] = at, state
        return state

    def _chunk(self, chunk: Chunk, copies: list[Copy]) -> list[int]:
        """What the next token depends on, after each of the last `num_logits` tokens."""
        token_ids = chunk.token_ids
        if token_ids == [PENDING]:
            token_ids = [int(self.last_tokens[chunk.slot])]
        assert min(token_ids) >= 0, "a token that nobody knows"
        assert self.poison not in token_ids, "a poisoned token"
        table = self.tables.setdefault(chunk.slot, [])
        assert len(table) >= chunk.num_kept_pages
        table[chunk.num_kept_pages :] = chunk.pages
        assert len(set(table)) == len(table)
        end = chunk.start + len(token_ids)
        where = (np.array(table)[:, None] * self.page_size + np.arange(self.page_size)).ravel()[:end]
        assert len(where) == end, "a chunk without pages"
        states = self.kv[where]
        for i, token in enumerate(token_ids, chunk.start):
            states[i] = mix(int(states[i - 1]) if i else 0, token)
        self.kv[where[chunk.start :]] = states[chunk.start :]
        if self.has_states:
            assert self._run_states(chunk, token_ids, copies) == states[end - 1], "states of another sequence"
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

    def launch(self, logits: torch.Tensor, slots: np.ndarray, likeliest: None, draft_ids: None = None) -> "FakePending":
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


def pages_now(claims: list[KVClaim], page_size: int) -> int:
    return peak_pages([claim._replace(to_come=0) for claim in claims], page_size)


class FakeGrammars:
    """A compiler whose futures the test settles."""

    def __init__(self) -> None:
        self.futures: list[Future] = []
        self.clients: list[str] = []
        self.answers: list[tuple[AnswerToCheck, Future]] = []
        self.closed = False

    def submit(self, grammar: Grammar, client: str = "") -> Future:
        self.futures.append(Future())
        self.clients.append(client)
        return self.futures[-1]

    def check(self, answer: AnswerToCheck, client: str = "") -> Future:
        self.answers.append((answer, Future()))
        self.clients.append(client)
        return self.answers[-1][1]

    def close(self) -> None:
        self.closed = True


def any_models(stages: int) -> list[CostModel]:
    """What the stages of some pipeline cost."""
    stage = StageSpec(MODELS["llama-8b"], DEVICES["h200"], 8)
    return [CostModel(stage.seconds) for _ in range(stages)]


class FakeParts:
    """For `load=` of an engine: a fake executor, sampler and compiler."""

    def __init__(self, **executor: object) -> None:
        self.executor = FakeExecutor(**executor)
        self.sampler = FakeSampler(self.executor.last_tokens)
        self.grammars = FakeGrammars()

    def __call__(self, model_dir: Path, config: WorkerConfig) -> Components:
        self.executor.layout = replace(self.executor.layout, page_size=config.page_size)
        return Components(self.executor, self.sampler, self.grammars, CostStore(any_models(config.pp)))
