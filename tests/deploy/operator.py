"""An operator's machine for a rehearsal of `ray up`: a checkout, an ssh key, and the programs of the environment here.

The files are those of the checkout; only the cluster's name, addresses, user and key, the step that installs, and what
a tiny model on a small machine needs are changed.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.hosts import USER, Host, Network
from tests.deploy.rehearsal import ROOT, VENV
from tests.deploy.streams import IMAGE

SITE = Path(next(path for path in sys.path if path.endswith("site-packages")))
LEFT_OUT = ("bench/results/", "tests/", "docs/")  # of the checkout: nothing of them is installed
FILE = "cluster/ray/machines.yaml"
# Two replicas and two routers fit on a machine of two CPUs, three replicas do not.
RANK_CPUS, ROUTER_CPUS = 0.6, 0.25
# The environment here in place of one that pip fills; a device on which a token takes a while.
INSTALL = f"""\
test -x ~/shoal-env/bin/python || {{ {VENV}/bin/python -m venv --without-pip ~/shoal-env &&
site=~/shoal-env/lib/{SITE.parent.name}/site-packages && cp {IMAGE}/sitecustomize.py $site &&
printf '%s\\n' ~/shoal {SITE} 'import os; os.environ["SHOAL_STEP_S"] = "SECONDS"' > $site/rehearsal.pth &&
for p in "ray ray.scripts.scripts" "shoal shoal.cli"; do set -- $p;
printf '#!%s/shoal-env/bin/python\\nimport sys\\nfrom %s import main\\nsys.exit(main())\\n' ~ $2 > ~/shoal-env/bin/$1;
chmod +x ~/shoal-env/bin/$1; done; }}"""


class Operator:
    """Somebody with a checkout of Shoal, who can reach the hosts."""

    def __init__(self, network: Network, folder: Path, model: Path, step_s: float, **settings: Any) -> None:
        """`step_s`: seconds that a step of the model takes. `settings`: of shoal.yaml, besides those that a small
        machine needs."""
        self.network = network
        self.home = folder
        self.checkout = folder / "checkout"
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        for name in filter(None, listed.stdout.split("\0")):
            if not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
                (self.checkout / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.checkout / name)
        # Kernels that are compiled here: each host would spend nine seconds of a core on them, twice as its first two
        # replicas start together.
        for file in (ROOT / "kernels").rglob("__pycache__/*.nb[ic]"):
            (self.checkout / file.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, self.checkout / file.relative_to(ROOT))
        file = self.checkout / FILE
        config = yaml.safe_load(file.read_text())
        addresses = [host.address for host in network.hosts]
        config["provider"] |= {"head_ip": addresses[0], "worker_ips": addresses[1:]}
        # Ray keeps open logins by the cluster's name and addresses, which other rehearsals on this machine have too.
        config["cluster_name"] = network.name
        config["auth"] = {"ssh_user": USER, "ssh_private_key": str(network.key)}
        config["setup_commands"] = [INSTALL.replace("SECONDS", f"{step_s:g}")]
        file.write_text(yaml.safe_dump(config, sort_keys=False, width=10000))
        small = {"model": str(model), "served_model_name": "tiny", "kv_tokens": 32768, "cpu_threads": 1}
        self.configure(**small, cpus_per_rank=RANK_CPUS, cpus_per_router=ROUTER_CPUS, **settings)
        made = self.run("ray", "get-auth-token", "--generate")
        assert made.returncode == 0, made.stdout

    def configure(self, **settings: Any) -> None:
        """Changes settings of shoal.yaml in the checkout."""
        file = self.checkout / "cluster/ray/shoal.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | settings))

    @property
    def head(self) -> Host:
        return self.network.hosts[0]

    def run(self, *command: str, timeout_s: float = 300.0) -> "subprocess.CompletedProcess[str]":
        """A command as the operator types it, in the checkout."""
        return subprocess.run(
            self.network.command(*command),
            cwd=self.checkout,
            env=self._environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )

    def ray(self, verb: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """`ray VERB FILE ARGUMENTS`, without questions."""
        yes = ["-y"] if verb in ("up", "down") else []
        return self.run("ray", verb, *yes, FILE, *arguments)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY", "PYTHON", "SHOAL"))}
        # What `ray up` remembers of a cluster that was never ended would be another rehearsal's.
        kept["RAY_TMPDIR"] = str(self.home)
        return kept | {"HOME": str(self.home), "PATH": f"{VENV}/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

    def log(self) -> str:
        """What the supervisor and `shoal serve` have written on the head. Read without a login, which would cost the
        machine more than what waits for a line takes."""
        file = self.head.folder / "upper" / "home" / USER / "shoal.log"
        return file.read_text(errors="replace") if file.exists() else ""
