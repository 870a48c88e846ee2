"""`ray up`: started, scaled, upgraded, a host lost and back, the head restarted, ended; under streams."""

import pytest

from tests.deploy.hosts import missing
from tests.deploy.ray_up import STREAM_S, Figures, rehearsed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.rehearsal]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    if why := missing():
        pytest.skip(why)
    return rehearsed(tmp_path_factory.mktemp("ray_up"), STREAM_S)


@pytest.mark.timeout(1200)
def test_no_change_fails_a_request(figures: Figures) -> None:
    assert figures.failures == []
    assert figures.streams >= 10 and figures.failed_requests == 0
    assert figures.longest_gap_s <= 5
    assert len(figures.outlasted) == 5 and min(figures.outlasted.values()) >= 1, figures.outlasted


def test_a_change_of_numbers_starts_nothing_that_runs(figures: Figures) -> None:
    assert figures.reloaded_replicas == 0


def test_nothing_is_left(figures: Figures) -> None:
    assert figures.left == []
