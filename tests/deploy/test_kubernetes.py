"""The chart as an operator uses it: deployed, scaled, upgraded, a host lost, a pod drained, removed; under streams."""

from pathlib import Path

import pytest

from tests.deploy.hosts import missing
from tests.deploy.kubernetes import STREAM_S, rehearsed


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.rehearsal
@pytest.mark.timeout(1200)
def test_no_change_fails_a_request_and_nothing_is_left(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    figures = rehearsed(tmp_path, STREAM_S, drain_s=5)
    assert figures.failures == []
    assert (figures.failed_requests, figures.failed_short_requests, figures.silent_ends) == (0, 0, 0)
    assert figures.streams >= 8 and figures.short_requests > 0
    assert figures.longest_gap_s <= 5
    assert figures.reloaded_replicas == 0
    assert figures.pre_stop_rc == [0] and figures.killed_pods == []
    assert figures.without_worker["/v1/models"] == "503"
    assert figures.left == []
