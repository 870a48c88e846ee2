"""Who compiled much lately yields, for as long as it is lately."""

import pytest

from worker.structured_output.compiling import recent_cpu
from worker.structured_output.compiling.recent_cpu import CORES_SHARE, LATELY_S, RecentCpu


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr(recent_cpu.time, "monotonic", lambda: now_s[0])
    monkeypatch.setattr(recent_cpu, "_FORKS_S", 0.0)
    return now_s


def test_who_takes_more_than_a_part_yields_until_it_has_faded(now: list[float]) -> None:
    recent = RecentCpu(cores=2)
    recent.add("much", 3 * 2 * CORES_SHARE * LATELY_S)
    recent.add("little", 0.9 * 2 * CORES_SHARE * LATELY_S)
    assert recent.is_much("much") and not recent.is_much("little") and not recent.is_much("unknown")
    now[0] += LATELY_S
    assert recent.is_much("much")
    now[0] += LATELY_S
    assert not recent.is_much("much")


def test_steady_use_is_held_to_its_part(now: list[float]) -> None:
    recent = RecentCpu(cores=1)
    for _ in range(200):  # a quarter more than its part, and a quarter less
        now[0] += 0.2
        recent.add("more", 1.25 * CORES_SHARE * 0.2)
        recent.add("less", 0.75 * CORES_SHARE * 0.2)
    assert recent.is_much("more") and not recent.is_much("less")


def test_a_flood_of_names_is_forgotten_and_who_took_much_is_not(now: list[float]) -> None:
    recent = RecentCpu(cores=1)
    recent.add("much", 10)
    for number in range(5000):
        recent.add(f"name {number}", 0.0)
    assert recent.is_much("much") and len(recent._taken) <= recent_cpu._MAX_CLIENTS + 1
