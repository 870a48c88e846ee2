"""The interface between the engine and the devices of one replica."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import torch

from worker.executor.attention_selector import AttentionChoice
from worker.executor.expert_balance import ExpertBalance
from worker.kv_layout import KVLayout
from worker.progress import NewestSteps
from worker.step import Plan, StepTime


class ForwardOutput(NamedTuple):
    """Logits of one step, on the device of the leading rank. The tensors hold until the next `Executor.forward`.

    | field | meaning |
    | --- | --- |
    | `logits` | float32 `[sum of Plan.num_logits, vocab_size]`, chunk after chunk; on a GPU they may still be computed
    |
    | `greedy_tokens` | int64 `[sum of Plan.num_logits]`, the argmax of `logits` if the step's CUDA graph took it, else
    None |
    | `hidden` | float32 `[sum of num_hidden, hidden_size]`, hidden states after the final norm, if the plan wants any
    |
    """

    logits: torch.Tensor
    greedy_tokens: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class Executor(ABC):
    """Runs the plans of one replica. `ModelRunner` is the local implementation, with one rank in this process;
    `MultiRankExecutor` leads the ranks of tensor and pipeline parallelism.

    For each plan, in the order of the plans: `announce` (optional), `forward`, then sampling, then `finish_step`. A plan
    may be announced, and with pipeline parallelism several are, before the plans ahead of it have run. One thread at a
    time.

    An exception of `forward` concerns that plan alone, and the next plan may run, with one exception: after RankLost
    nothing can run again.

    | attribute | meaning |
    | --- | --- |
    | `device` | the device of logits and of sampling |
    | `layout` | the groups of the cache, with as many pages and rows on all ranks |
    | `vocab_size` | columns of the logits |
    | `context_length` | longest sequence, in tokens: configured, or the model's, at most what the KV cache holds |
    | `expert_balance` | with expert parallelism: how evenly ranks compute |
    | `eos_token_ids` | the model's end tokens |
    | `attention_choice` | the attention backend that runs |
    | `last_tokens` | int64 `[max_running + 1]` on `device`, the newest token of each slot: written by sampling, read by the next step's PENDING tokens; the last entry belongs to no slot |
    """  # noqa: E501

    device: torch.device
    layout: KVLayout
    vocab_size: int
    context_length: int
    expert_balance: ExpertBalance | None = None
    eos_token_ids: tuple[int, ...]
    attention_choice: AttentionChoice
    last_tokens: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    @property
    def num_pages(self) -> int:
        """Pages of the group that sees all tokens."""
        return self.layout.num_pages

    @abstractmethod
    def announce(self, plan: Plan) -> None:
        """Prepares for a plan ahead of its `forward`: other ranks begin with it, and transfers between stages are
        posted. Raises RankLost."""

    @abstractmethod
    def forward(self, plan: Plan) -> ForwardOutput:
        """Computes the plan's chunks. On a GPU the work is launched, and not waited for. Raises ValueError for a chunk
        outside its slot's pages, RankLost, and whatever the device raises."""

    @abstractmethod
    def finish_step(self, plan: Plan) -> None:
        """Ends the plan's step: its tokens are in `last_tokens`, or will be when the device comes to it. Plans that are
        announced from now on may have these tokens as PENDING."""

    def prepare_adapter(self, number: int, folder: Path) -> "Future[None]":
        """Begins to read the adapter of a folder into the host's memory, on all ranks. `number`: what plans call it,
        not used before. Plans may have it when the result is there; a ValueError says what is wrong with the folder.
        Only with `max_loras`."""
        raise NotImplementedError

    def forget_adapter(self, number: int) -> None:
        """Frees the host's copy of an adapter that no plan has any more."""
        raise NotImplementedError

    @abstractmethod
    def take_step_times(self) -> list[StepTime]:
        """The times of steps that have ended since the last call, on all stages, by this machine's clock. Times of one
        stage are in order. Does not wait; times of other machines arrive later."""

    @property
    @abstractmethod
    def newest_steps(self) -> NewestSteps:
        """How far this process's own rank has come. May be read by any thread, also while the device hangs."""

    @property
    def silent_ranks(self) -> Sequence[int]:
        """The other ranks whose processes stand still, or whose hosts are gone. May be read by any thread."""
        return ()

    @abstractmethod
    def close(self) -> None:
        """Frees the devices and ends the other ranks. Nothing can run afterwards. Not during `forward`."""
