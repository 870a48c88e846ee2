"""`ray up` as an operator has it: real sshd hosts, Ray's own launcher, the file of the checkout; streams meanwhile."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import make_tiny_llama
from tests.deploy.hosts import Host, missing, network
from tests.deploy.operator import FILE, Operator, problems, until
from tests.deploy.streams import Stream

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STREAM_TOKENS = 900  # of 50 ms and more each
CLIENTS = 2  # at each router
MOST_GAP_S = 5.0
BY_LOGINS = {"var/log/lastlog", "var/log/wtmp", "var/log/btmp"}


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    if why := missing():
        pytest.skip(why)
    model = make_tiny_llama(tmp_path / "tiny-llama")
    with network(tmp_path, ["head", "worker"], shown=[str(model)]) as made:
        addresses = [host.address for host in made.hosts]
        (tmp_path / "operator").mkdir()
        yield Operator(made, tmp_path / "operator", model, drain_s=5, routers=1, router_hosts=addresses)


def replicas(operator: Operator, host: Host) -> dict[str, str]:
    """The replicas that a host's router knows: their ids, each with the machine it is on."""
    _, page = operator.ask(host, "/state")
    return {each["id"]: each["address"] for model in json.loads(page)["models"] for each in model["replicas"]}
