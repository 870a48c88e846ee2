"""`ray up` with another version of Ray, on a host whose Ray and server are scripts: announced, drained, then installed.

The launcher, the files, the supervisor and the host are real.
"""

import re
from pathlib import Path

import pytest
import yaml

from tests.deploy.hosts import USER, cgroups, missing, network
from tests.deploy.operator import FILE, SITE, Operator
from tests.deploy.rehearsal import ROOT, VENV, shown, until

pytestmark = [pytest.mark.slow, pytest.mark.rehearsal]

OLD = "0.0.1"
# Ray's two essential processes are copies of `sleep` by their names.
RAY = """\
#!/bin/bash
echo "ray $1" >> ~/told
case $1 in
    start)
        mkdir -p /tmp/ray/bin
        for name in gcs_server raylet; do
            cp /bin/sleep /tmp/ray/bin/$name
            setsid --fork /tmp/ray/bin/$name 1000 < /dev/null > /dev/null 2>&1
        done ;;
    stop) pkill -x gcs_server; pkill -x raylet; true ;;
esac
"""
SHOAL = """\
#!/bin/bash
[[ $2 == --check ]] && exit
trap 'echo "answers end"; echo "answers have ended" >> ~/told; kill %1; exit 0' TERM
echo "the server answers"
sleep 1000 & wait
"""
MAKE = f"""\
test -x ~/shoal-env/bin/python || {{ {VENV}/bin/python -m venv --without-pip ~/shoal-env &&
site=~/shoal-env/lib/{SITE.parent.name}/site-packages && printf '%s\\n' ~/shoal {SITE} > $site/rehearsal.pth &&
mkdir $site/ray-{OLD}.dist-info && printf 'Name: ray\\nVersion: {OLD}\\n' > $site/ray-{OLD}.dist-info/METADATA &&
cp ~/shoal/programs/* ~/shoal-env/bin; }}"""
# It takes longer than systemd waits before it starts again what has ended.
REPLACE = f"sleep 4; echo installed >> ~/told; rm -r ~/shoal-env/lib/*/site-packages/ray-{OLD}.dist-info"


def test_another_version_of_ray_is_a_planned_stop(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    (new,) = re.findall(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    (tmp_path / "operator").mkdir()
    with network(tmp_path, ["head"], shown(), cgroups()) as net:  # with systemd where this machine has it
        (host,) = net.hosts
        operator = Operator(net, tmp_path / "operator", Path("/model"), step_s=0)
        programs = operator.checkout / "programs"
        programs.mkdir()
        for name, script in (("ray", RAY), ("shoal", SHOAL)):
            (programs / name).write_text(script)
            (programs / name).chmod(0o755)

        def up(*installs: str) -> str:
            file = operator.checkout / FILE
            file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | {"setup_commands": list(installs)}))
            done = operator.ray("up")
            assert done.returncode == 0, done.stdout[-5000:]
            return done.stdout

        def told() -> list[str]:
            return (host.folder / "upper/home" / USER / "told").read_text().splitlines()

        assert "planned stop" not in up(MAKE)
        until(lambda: "the server answers" in operator.log(), "the server")
        announced = f"Ray {OLD} becomes {new}: a planned stop, for which answers get drain_s to end"
        before = len(told())
        printed = up(MAKE, REPLACE)
        assert printed.index(announced) < printed.index("the machine has stopped after")
        assert told()[before:] == ["answers have ended", "ray stop", "installed", "ray stop", "ray start"]
        log = operator.log()
        steps = [log.index(announced), log.index("answers end"), log.rindex("starting Ray")]
        assert steps == sorted(steps)
        until(lambda: operator.log().count("the server answers") == 2, "the server, with the new Ray")
        # The same version again stops nothing.
        before = len(told())
        assert "planned stop" not in up(MAKE)
        assert told()[before:] == []
