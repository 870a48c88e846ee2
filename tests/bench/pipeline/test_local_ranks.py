"""Replicas of one process, one after the other."""

import weakref
from pathlib import Path

import pytest

from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.local_ranks import LocalRanks
from bench.replica import dummy_models

ONE = ParallelLayout(1, 1)


@pytest.mark.bench
def test_a_layout_gives_its_memory_back(tmp_path: Path) -> None:
    folder = dummy_models.write("tiny", tmp_path / "tiny")
    settings = {"load_format": "dummy", "context_length": 64, "kv_tokens": 256, "device": "cpu", "max_running": 2}
    ranks = LocalRanks(folder, settings)
    replica, is_new = ranks.under(ONE, Setting("uniform", 64))
    assert is_new
    replica.settle()
    executor = weakref.ref(replica.engine.executor)
    del replica
    ranks.close()
    assert executor() is None
