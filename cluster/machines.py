"""Machines of one's own, for Ray's cluster launcher: `provider` in cluster/ray/machines.yaml.

Ray has a provider of machines by their addresses, but it only remembers which it uses: `ray down` would end nothing.
This one ends what runs there, and removes what `ray up` has put there.
"""

import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from ray.autoscaler._private.command_runner import SSHCommandRunner
from ray.autoscaler._private.local.node_provider import LocalNodeProvider
from ray.autoscaler._private.providers import _get_default_config

ENVIRONMENT = "shoal-env"  # where cluster/ray/machines.yaml installs Shoal, in the home folder
# What `ray down` does on a machine. Of the cache, downloaded models stay.
STOP = f"""\
cd ~; test ! -x ~/{ENVIRONMENT}/bin/python || ~/{ENVIRONMENT}/bin/python -m cluster.supervisor stop;
rm -rf ~/shoal ~/{ENVIRONMENT} ~/.shoal ~/shoal.log ~/ray_bootstrap_config.yaml ~/ray_bootstrap_key.pem;
rm -rf ~/.ray/auth_token /tmp/ray /tmp/ray_ssh_*; rmdir ~/.ray 2> /dev/null;
find ~/.cache/shoal -mindepth 1 -maxdepth 1 ! -name models -exec rm -rf {{}} + 2> /dev/null;
rmdir ~/.cache/shoal ~/.cache 2> /dev/null; true"""
MAX_SILENT_ASKS = 12  # by ssh, one in 5 s, before a login counts as lost
ON_HEAD = "is_head"  # in the provider's part of the file, as the head has it


class MachinesNotStopped(RuntimeError):
    """Machines could not be reached, and something may run there still. The message names them."""


class OwnMachines(LocalNodeProvider):
    """The machines `head_ip` and `worker_ips` of a file for `ray up`."""

    @staticmethod
    def bootstrap_config(cluster_config: dict[str, Any]) -> dict[str, Any]:
        """The file with what Ray adds to one for its own provider. All machines are always used."""
        config: dict[str, Any] = _get_default_config({"type": "local"}) | cluster_config
        number = len(config["provider"]["worker_ips"])
        config["max_workers"] = number
        config["available_node_types"] = {
            name: {**node_type, "min_workers": number, "max_workers": number}
            for name, node_type in config["available_node_types"].items()
        }
        config["provider"] = config["provider"] | {"auth": config["auth"]}
        return config

    def prepare_for_head_node(self, cluster_config: dict[str, Any]) -> dict[str, Any]:
        """The file as the head has it, with the key that Ray has put there."""
        cluster_config["provider"] |= {"auth": cluster_config["auth"], ON_HEAD: True}
        return cluster_config

    def get_command_runner(
        self,
        log_prefix: str,
        node_id: str,
        auth_config: dict[str, Any],
        cluster_name: str,
        process_runner: ModuleType,
        use_internal_ip: bool,
        docker_config: dict[str, Any] | None = None,
    ) -> "Login":
        """A login on a machine, with the programs of its environment on the path."""
        return Login(log_prefix, node_id, self, auth_config, cluster_name, process_runner, use_internal_ip)

    def terminate_node(self, node_id: str) -> None:
        """Ends everything on one machine. Raises MachinesNotStopped."""
        self.terminate_nodes([node_id])

    def terminate_nodes(self, node_ids: Iterable[str]) -> None:
        """Ends everything on machines, all at once. Raises MachinesNotStopped with the names of those that did not
        answer; on the head, where Ray gives up a machine that is gone and tries it again later, only prints it."""
        node_ids = list(node_ids)
        if not self.provider_config.get(ON_HEAD) and self.provider_config["head_ip"] in node_ids:
            node_ids += [name for name in self.provider_config["worker_ips"] if name not in node_ids]  # the head's
        with ThreadPoolExecutor(max(1, len(node_ids))) as threads:
            failures = list(threads.map(self._stop, node_ids))
        for node_id in node_ids:
            super().terminate_node(node_id)
        if lost := [f"{name} ({why})" for name, why in zip(node_ids, failures, strict=True) if why is not None]:
            text = f"could not log in to {', '.join(lost)}: what ran there may run still"
            if not self.provider_config.get(ON_HEAD):
                raise MachinesNotStopped(text)
            print(text)

    def _stop(self, node_id: str) -> str | None:
        """Ends everything on a machine. Returns why that was impossible, or None."""
        auth, name = self.provider_config["auth"], self.cluster_name
        login = self.get_command_runner(f"{node_id}: ", node_id, auth, name, subprocess, use_internal_ip=False)
        try:
            login.run(STOP, timeout=20)
        except Exception as error:  # of many kinds, which Ray does not export
            return str(error).splitlines()[-1]
        return None


class Login(SSHCommandRunner):
    """Ray's, but that `ray` and `shoal` are found, and show the token; and that a busy machine is waited for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # With Ray's three, `ray up` ends as soon as a machine that starts Ray has been silent for 15 s.
        self.ssh_options.arg_dict["ServerAliveCountMax"] = MAX_SILENT_ASKS

    def run(self, cmd: str | None = None, *args: Any, **kwargs: Any) -> Any:
        return super().run(
            cmd and f'export RAY_AUTH_MODE=token PATH="$HOME/{ENVIRONMENT}/bin:$PATH"; {cmd}', *args, **kwargs
        )
