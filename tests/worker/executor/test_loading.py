"""The step by which a rank learns how much memory it needs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from worker.config import WorkerConfig
from worker.executor.loading import ModelLoader
from worker.parallel.pipeline_stage import PipelineStage


@pytest.mark.parametrize(("context_length", "longest"), [(48, 48), (None, 256)])
def test_the_largest_step_has_positions_of_the_context_only(
    tiny_model: Callable[[str], Path], context_length: int | None, longest: int
) -> None:
    config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=1024, context_length=context_length)
    batch = ModelLoader(tiny_model("llama"), config, PipelineStage.only())._largest_step(config)
    assert (batch.starts + batch.lengths).max() == longest
    assert batch.num_tokens >= config.token_budget
