"""The step by which a model runner learns how much memory it needs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from worker.config import WorkerConfig
from worker.executor.model_runner import ModelRunner


@pytest.mark.parametrize(("context_length", "longest"), [(48, 48), (None, 512)])
def test_the_largest_step_has_positions_of_the_context_only(
    tiny_model: Callable[[str], Path], context_length: int | None, longest: int
) -> None:
    config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=1024, context_length=context_length)
    runner = ModelRunner(tiny_model("llama"), config)
    batch = runner._largest_step(config)
    runner.close()
    assert (batch.starts + batch.lengths).max() == min(longest, runner.context_length)
    assert batch.num_tokens >= config.token_budget
