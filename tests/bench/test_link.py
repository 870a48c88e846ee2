"""How fast a link is."""

import pytest

from bench import link


def test_a_links_speed_is_a_line_through_its_times() -> None:
    speed = link.fit({1000: 1.1e-3, 500_000: 0.5, 1_001_000: 1.001e-3 + 0.1e-3 + 1.0})
    assert speed.bytes_per_s == pytest.approx(1e6, rel=1e-3) and speed.latency_s == pytest.approx(1e-4, rel=0.02)


def test_two_processes_of_this_machine_have_one() -> None:
    speed = link.measure("cpu")
    assert speed.seconds.keys() == set(link.SIZES) and speed.bytes_per_s > 1e6 and speed.latency_s >= 0
