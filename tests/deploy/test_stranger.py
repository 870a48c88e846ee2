"""A stranger on the network of a server reads nothing, and changes nothing."""

from pathlib import Path

import pytest

from tests.conftest import make_tiny_llama
from tests.deploy import stranger
from tests.deploy.hosts import missing

pytestmark = [pytest.mark.slow, pytest.mark.rehearsal]


def test_a_stranger_on_the_network_reads_and_changes_nothing(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    found, ports, before, after = stranger.visit(tmp_path, make_tiny_llama(tmp_path / "tiny-llama"))
    assert found.read_bytes == 0
    assert stranger.PORT in found.reached and len(found.reached) >= 2, "the routers' and a replica's"
    assert len(ports) > len(found.reached), "what must be private is not reached"
    assert {status for got in found.statuses.values() for status in got} == {401}, found.statuses
    (answer, models, _), (again, models_after, _) = before, after
    assert (again, models_after) == (answer, models)
