"""Hosts are apart, lose their power and come back, and say what is left on them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.hosts import SUBNET, Network, cgroups, missing, network

pytestmark = [pytest.mark.slow, pytest.mark.rehearsal]


@pytest.fixture(params=[False, True], ids=["sshd", "systemd"])
def two(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    if request.param and cgroups() is None:
        pytest.skip("hosts have systemd where this machine has it, and cgroups v2")
    with network(tmp_path, ["one", "two"], (), cgroups() if request.param else None) as made:
        yield made


def test_hosts_have_the_systemd_that_they_should(two: Network) -> None:
    (one, _) = two.hosts
    found = two.ssh(one, "systemctl --user is-active default.target", check=False).stdout.strip()
    assert (found == "active") is (two.cgroups is not None)


def test_hosts_are_apart_and_reach_each_other(two: Network) -> None:
    one, other = two.hosts
    before = one.files()
    assert two.ssh(one, "hostname; echo 1 > ~/mine; echo 2 > /tmp/mine; whoami").stdout.split()[0] == "one"
    assert two.ssh(other, "ls ~/mine /tmp/mine", check=False).returncode != 0
    assert "home/ops/mine" in one.files() - before and "home/ops/mine" not in other.files()
    assert one.volatile() == {"/tmp/mine"} and not other.volatile()
    listens = "import socket, time; s = socket.create_server(('', 4000)); time.sleep(600)"
    two.ssh(one, f'setsid --fork python3 -c "{listens}" < /dev/null > /dev/null 2>&1')
    reach = f"for i in $(seq 100); do (: < /dev/tcp/{SUBNET}.10/4000) 2> /dev/null && exit; sleep 0.1; done; exit 1"
    two.ssh(other, reach)
    assert one.ports() == {4000} and not other.ports()
    assert [line for line in one.processes().values() if "create_server" in line] and not other.processes()


def test_a_host_without_power_is_gone_and_comes_back_with_its_files(two: Network) -> None:
    one, other = two.hosts
    two.ssh(one, "echo kept > ~/kept; echo lost > /tmp/lost; setsid --fork sleep 600 < /dev/null > /dev/null 2>&1")
    two.ssh(one, "until pgrep -x sleep; do sleep 0.05; done")
    assert "sleep 600" in one.processes().values()
    one.vanish()
    assert not one.processes()
    reach = f"timeout 2 bash -c ': < /dev/tcp/{one.address}/22'"
    assert two.ssh(other, reach, check=False).returncode != 0
    one.start()
    assert two.ssh(one, "cat ~/kept").stdout.strip() == "kept" and not one.volatile()
    assert not one.processes()
