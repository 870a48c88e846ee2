"""The chart as an operator uses it: deployed, scaled, upgraded, a host lost, a pod drained, removed; under streams."""

import pytest

from tests.deploy.hosts import missing
from tests.deploy.kubernetes import STREAM_S, Figures, rehearsed

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> Figures:
    if why := missing():
        pytest.skip(why)
    return rehearsed(tmp_path_factory.mktemp("kubernetes"), STREAM_S, drain_s=5)


@pytest.mark.timeout(1200)
def test_no_change_fails_a_request(figures: Figures) -> None:
    assert figures.failures == []
    assert figures.streams >= 10
    assert (figures.failed_requests, figures.failed_short_requests, figures.silent_ends) == (0, 0, 0)
    assert figures.longest_gap_s <= 5


def test_a_change_of_numbers_starts_no_replica_that_runs(figures: Figures) -> None:
    assert figures.reloaded_replicas == 0


def test_without_a_worker_a_client_is_told(figures: Figures) -> None:
    assert figures.without_worker["/v1/models"] == "503"


def test_a_pod_that_is_drained_ends_within_its_grace_period(figures: Figures) -> None:
    assert figures.pre_stop_rc == [0, 0]


def test_nothing_is_left(figures: Figures) -> None:
    assert figures.left == []
