"""An executor that computes nothing, for what a step costs the host."""

import torch

from worker.executor.attention_selector import AttentionChoice
from worker.executor.executor import Executor, ForwardOutput
from worker.executor.page_table import PageTable
from worker.executor.step_timer import StepTimer
from worker.kv_layout import KVGroup, KVLayout
from worker.progress import NewestSteps
from worker.step import Plan, StepTime

VOCAB_SIZE = 10_240
PAGE_SIZE = 16
PAGES_A_SEQUENCE = 4096 // PAGE_SIZE


class NullExecutor(Executor):
    """Keeps page tables, and gives every sequence the same token."""

    def __init__(self, max_running: int, max_prompts: int = 0) -> None:
        """The KV cache holds 4,096 tokens for each of `max_running` sequences and `max_prompts` more."""
        self.device = torch.device("cpu")
        self.vocab_size, self.context_length = VOCAB_SIZE, 8192
        pages = (max_running + max_prompts) * PAGES_A_SEQUENCE
        self.layout = KVLayout(PAGE_SIZE, (KVGroup("full", (), 0, pages),))
        self.eos_token_ids = (VOCAB_SIZE - 1,)
        self.attention_choice = AttentionChoice("none")
        self.last_tokens = torch.zeros(max_running + 1, dtype=torch.int64)
        self._logits = torch.zeros(max_running, VOCAB_SIZE)
        self._tokens = torch.zeros(max_running, dtype=torch.int64)
        self._step_timer = StepTimer.for_device(self.device)
        self._tables = PageTable(max_running, self.context_length // PAGE_SIZE, PAGE_SIZE)

    def announce(self, plan: Plan) -> None:
        """Nothing: there is one stage."""

    def forward(self, plan: Plan) -> ForwardOutput:
        self._step_timer.begin()
        self._tables.update(plan)
        count = int(plan.num_logits.sum())
        return ForwardOutput(self._logits[:count], self._tokens[:count])

    def finish_step(self, plan: Plan) -> None:
        self._step_timer.end(plan.step)

    @property
    def newest_steps(self) -> NewestSteps:
        return NewestSteps(self._step_timer.ended, self._step_timer.ended)

    def take_step_times(self) -> list[StepTime]:
        return [StepTime(0, step, span) for step, span in self._step_timer.take_spans()]

    def close(self) -> None:
        """Nothing to give back."""
