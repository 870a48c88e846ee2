"""A draft model: a smaller model of the same vocabulary, whose greedy tokens are drafts for another.

It runs in the leading rank's process, whole, on that rank's device. Its KV cache has as many pages as the other, and a
token's KV lies in the page of the same number in both. So one allocation of pages serves both, and their number is set
with the bytes of both (`memory_budget.DraftBytes`).
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from worker.config import WorkerConfig
from worker.executor.executor import Executor
from worker.executor.model_runner import ModelRunner
from worker.step import Plan


class DraftModel:
    """Computes plans of its own, which `worker.drafts.model` makes, and keeps page tables of its own.

    | attribute | meaning |
    | --- | --- |
    | `config` | its settings |
    | `page_size`, `num_pages` | as in the executor of the model that it drafts for |
    | `vocab_size` | tokens that both models have |
    | `token_budget` | most tokens of a plan |
    | `context_length` | longest sequence that it can follow, in tokens |
    """

    def __init__(self, model: Path, config: WorkerConfig, executor: Executor) -> None:
        """Loads the weights, and allocates the KV cache next to that of `executor`.

        - `model`: a Hugging Face folder.
        - `config`: that of the model that it drafts for.

        Raises the exceptions of `ModelRunner`, and ValueError if it does not fit into the memory of a GPU.
        """
        self.page_size, self.num_pages = executor.page_size, executor.num_pages
        self.token_budget = config.token_budget
        capacity = self.num_pages * self.page_size
        own: dict[str, Any] = {"kv_tokens": capacity, "context_length": None, "draft_model": None, "tp": 1}
        own |= {"window_kv_tokens": 0, "lora_modules": {}, "max_loras": 0}
        self.config = config.model_copy(update=own)
        try:
            self._runner = ModelRunner.load(model, self.config)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"draft_model {model} and its KV cache of {capacity} tokens do not fit into the GPU's memory: lower "
                "kv_tokens or kv_memory_fraction"
            ) from error
        self.context_length = self._runner.context_length
        self.vocab_size = min(self._runner.vocab_size, executor.vocab_size)

    def greedy(self, plans: Sequence[Plan]) -> tuple[list[np.ndarray], list[float]]:
        """Runs plans one after the other. Tokens that one samples may be `PENDING` in the next: on a GPU nothing waits
        in between.

        Plans have at most one row of logits a chunk. Returns, by plan, the likeliest token of each row, int64 [rows];
        and the time of each plan, in seconds, all that the host needs included.
        """
        began_s = time.monotonic()
        found = [self._run(plan) for plan in plans]
        token_ids = [each.cpu().numpy() for each in found]
        all_s = time.monotonic() - began_s
        spans = [ran.span for ran in self._runner.take_step_times()]
        own_s = np.array([span.end_s - span.begin_s for span in spans])
        if len(own_s) != len(plans) or not own_s.sum() > 0.0:
            return token_ids, [all_s / len(plans)] * len(plans)
        return token_ids, (own_s * (all_s / own_s.sum())).tolist()

    def close(self) -> None:
        """Frees the device. Nothing can run afterwards."""
        self._runner.close()

    def _run(self, plan: Plan) -> torch.Tensor:
        runner = self._runner
        output = runner.forward(plan)
        if output.greedy_tokens is not None:  # a CUDA graph, which has written `last_tokens`
            token_ids = output.greedy_tokens.clone()
        else:
            token_ids = _likeliest(output.logits)
            slots = torch.from_numpy(plan.slots[plan.num_logits > 0].astype(np.int64))
            runner.last_tokens.index_copy_(0, slots.to(runner.device), token_ids)
        runner.finish_step(plan)
        return token_ids


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row, int64. On a CPU NumPy finds it faster than PyTorch."""
    if logits.is_cuda:
        return logits.argmax(1)
    return torch.from_numpy(logits.numpy().argmax(1))
