"""A scheduler in virtual time and without an executor: steps of equal length or of any cost, tokens without meaning."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pipeline.cost import CostModel
from tests.worker.fakes import any_models, make_layout
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.messages import Generate, SamplingParams
from worker.scheduler.scheduler import Scheduler
from worker.step import SampledTokens

STEP_S = 0.03
EOS, OTHER = 1, 2
MODELS: list[CostModel] = any_models(1)


class VirtualReplica:
    """`sent_s`, `first_s`, `ended_s`: when requests came, got their first token and ended, by id. `served`: output
    tokens by client. `work`: by client the prompt tokens that were computed, and twice the output tokens."""

    def __init__(
        self,
        kv_tokens: int,
        max_running: int = 64,
        page_size: int = 16,
        cost_s: Callable[[int], float] = lambda tokens: STEP_S,
        **config: Any,
    ) -> None:
        """`cost_s`: seconds of a step with so many tokens."""
        self.now_s = 0.0
        self._cost_s = cost_s
        self.config = WorkerConfig(page_size=page_size, max_running=max_running, token_budget=512, **config)
        self.scheduler = Scheduler(
            self.config,
            make_layout(kv_tokens // page_size, page_size),
            vocab_size=50_000,
            context_length=kv_tokens,
            eos_token_ids=(EOS,),
            policy=CostStore(MODELS).policy(self.config, overlap=False),
            clock=lambda: self.now_s,
        )
        self.sent_s: dict[str, float] = {}
        self.first_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.served, self.work = Counter[str](), Counter[str]()
        self._client: dict[str, str] = {}
        self._ends: dict[str, int] = {}
        self._num_live = Counter[str]()
        self._number = 0

    def send(
        self, client: str, prompt: int | list[int], max_tokens: int, *, ends: int | None = None, **fields: Any
    ) -> str:
        """Sends a request, and returns its id. `prompt`: its tokens, or how many, unlike all others'. `ends`: the
        output tokens after which it ends by itself, which no forecast knows; None: at its limit."""
        if isinstance(prompt, int):
            self._number += 1
            prompt = [3 + self._number % 40_000, *range(3, 2 + prompt)]
        request_id = f"{client} {len(self.sent_s)}"
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=ends is None)
        self._client[request_id], self.sent_s[request_id] = client, self.now_s
        self._ends[request_id] = max_tokens if ends is None else ends
        request = Generate(request_id=request_id, prompt_ids=prompt, sampling=sampling, client=client, **fields)
        assert self.scheduler.add(request)
        self._num_live[client] += 1
        return request_id

    def step(self) -> None:
        """Plans a step, runs it, and takes its outputs."""
        step = self.scheduler.schedule().step
        if step is not None:
            chosen = np.flatnonzero(step.samples & ~step.dropped)
            sequences = [step.sequences[chunk] for chunk in chosen.tolist()]
            tokens = [
                EOS if seq.num_tokens - seq.num_prompt >= self._ends[seq.request_id] else OTHER for seq in sequences
            ]
            self.now_s += self._cost_s(step.plan.num_tokens)
            for seq, size in zip(step.sequences, step.plan.lengths.tolist(), strict=True):
                self.work[self._client[seq.request_id]] += size if size > 1 else 0
            self.scheduler.update(step, chosen, SampledTokens(np.array(tokens, dtype=np.int64), {}, {}, []), {})
        else:
            self.now_s += self._cost_s(0) / 4
        for output in self.scheduler.take_outputs():
            assert output.failure is None
            self.first_s.setdefault(output.request_id, self.now_s)
            client = self._client[output.request_id]
            self.served[client] += len(output.token_ids)
            self.work[client] += 2 * len(output.token_ids)
            if output.finish_reason is not None:
                self.ended_s[output.request_id] = self.now_s
                self._num_live[client] -= 1

    def run(self, seconds: float) -> None:
        """Steps for so long."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.step()
        self.scheduler.check_integrity()

    def num_live(self, client: str) -> int:
        """Requests of a client that have not ended."""
        return self._num_live[client]

    def waits_s(self, client: str) -> list[float]:
        """How long the requests of a client waited for their first tokens; those that have none, until now."""
        return [
            self.first_s.get(request_id, self.now_s) - sent_s
            for request_id, sent_s in self.sent_s.items()
            if self._client[request_id] == client
        ]
