"""How much memory the KV cache may take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from worker.executor import loading, memory_budget


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A container that may take 1000 bytes on a machine that has 5000 left, and has 900, 700 of them files."""
    monkeypatch.setattr(memory_budget, "_meminfo_available_bytes", lambda: 5000)
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 600\nactive_file 100\n")
    return tmp_path


def test_what_a_container_has_left_counts_files_that_nobody_uses(group: Path) -> None:
    assert memory_budget.available_memory_bytes(group) == 1000 - 900 + 600


def test_a_container_may_be_given_more_than_the_machine_has(group: Path) -> None:
    (group / "memory.max").write_text("90000\n")
    assert memory_budget.available_memory_bytes(group) == 5000


@pytest.mark.parametrize("limit", ["max\n", None], ids=["no limit", "no group"])
def test_without_a_limit_it_is_the_machines(limit: str | None, group: Path) -> None:
    (group / "memory.max").write_text(limit) if limit else (group / "memory.max").unlink()
    assert memory_budget.available_memory_bytes(group) == 5000


def test_on_a_cpu_it_is_a_part_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_budget, "available_memory_bytes", lambda: 8_000_000)
    assert memory_budget.cpu_tokens(1000) == 2000
    assert memory_budget.cpu_tokens(1000, 0.125) == 1000
    assert memory_budget.cpu_tokens(1) == memory_budget.CPU_MAX_TOKENS


def test_a_cache_holds_a_page_at_least() -> None:
    assert memory_budget.num_pages(33, 16) == 2
    with pytest.raises(ValueError, match=r"\b15 tokens .*\b16\b"):
        memory_budget.num_pages(15, 16)


@pytest.mark.parametrize(
    ("configured", "capacity", "length"), [(None, 640, 256), (None, 160, 160), (100, 640, 100), (160, 160, 160)]
)
def test_context_length(configured: int | None, capacity: int, length: int) -> None:
    assert memory_budget.context_length(configured, 256, capacity) == length


@pytest.mark.parametrize(
    ("configured", "message"),
    [
        (257, r"\b257 .*\b256\b"),
        (200, r"\b200 .*\b160 tokens"),
    ],
)
def test_a_context_that_is_too_long_is_refused(configured: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        memory_budget.context_length(configured, 256, 160)


def test_memory_of_the_steps_under_way_is_asked_for_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device's memory, half of what is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000, 10_000))
    pinned: list[int] = []
    on_device: list[int] = []
    monkeypatch.setattr(loading, "reserve_pinned", lambda *sizes: pinned.extend(sizes))
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda size, **more: on_device.append(size) or empty(size, **more))
    sizes: Any = SimpleNamespace(
        stage=SimpleNamespace(count=4),
        device=torch.device("cpu"),
        _token_budget=512,
        _working_bytes=2000,
    )
    loading.ModelLoader._reserve(sizes, 70)
    assert pinned == [8 * 512 + 4 * 70, 20]
    assert on_device == [1 << 20] * 20 + [1500]
