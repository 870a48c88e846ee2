"""The `ray up` files against Ray's own schema and checks, their commands against bash, and what they serve against
Shoal's configuration. Nothing here needs a network, credentials or a second machine; tests/deploy runs them."""

import copy
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config import Config, load
from cluster.machines import Login, OwnMachines

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "cluster" / "ray"
FILES = ["machines", "aws"]
COMMANDS = ["initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"]
COMMANDS += ["head_start_ray_commands", "worker_start_ray_commands"]
# What AWS says of the instance types in use: vCPUs and GPUs.
INSTANCES = {"m7i.2xlarge": (8, 0), "g6.12xlarge": (48, 4)}


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def served(name: str) -> Config:
    """The configuration that the head is started with, read from its command as the shell reads it."""
    program, *words = shlex.split(read(name)["head_start_ray_commands"][-1])
    assert [program, *words[:3]] == ["~/shoal-env/bin/python", "-m", "cluster.supervisor", "head"]
    arguments = words[3:]
    arguments.remove("--follow")
    flags = dict(zip(arguments[::2], arguments[1::2], strict=True))
    file = flags.pop("--config").removeprefix("~/shoal/")
    return load(ROOT / file, {flag.removeprefix("--").replace("-", "_"): value for flag, value in flags.items()})


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_it(name: str) -> None:
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text())
    jsonschema.validate(read(name), schema)
    prepared = prepare_config(copy.deepcopy(read(name)))
    validate_config(prepared)


@pytest.mark.parametrize("name", FILES)
def test_ray_would_see_a_mistake(name: str) -> None:
    wrong = read(name) | {"max_worker": 3}
    with pytest.raises(jsonschema.ValidationError, match="max_worker"):
        validate_config(prepare_config(wrong))


@pytest.mark.parametrize("name", FILES)
def test_its_commands_are_bash(name: str) -> None:
    config = read(name)
    commands = [command for key in COMMANDS for command in config.get(key, [])]
    assert len(commands) >= 6
    for command in commands:
        parsed = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, check=False)
        assert parsed.returncode == 0 and not parsed.stderr, (command, parsed.stderr)


@pytest.mark.parametrize("name", FILES)
def test_what_it_copies_is_there_and_is_what_it_installs(name: str) -> None:
    config = read(name)
    assert config["file_mounts"] == {"~/shoal": ".", "~/.ray/auth_token": "~/.ray/auth_token"}
    torch, locks, shoal = (command.split() for command in config["setup_commands"][-3:])
    assert torch[-1].startswith("torch==") and f"{torch[-1]}\n" in (ROOT / "Makefile").read_text()
    named = re.findall(r"(?:~|\$HOME)/shoal/(\S+\.lock)", " ".join(locks))
    assert named == ["requirements.lock", "requirements.gpu.lock"] and all((ROOT / lock).is_file() for lock in named)
    assert "--require-hashes" in locks and shoal[-1] == "~/shoal"


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_flashinfer_is_installed_where_there_is_a_gpu(name: str, has_gpu: bool, tmp_path: Path) -> None:
    """The command itself, with a Python that says what it is asked, and a driver that finds a GPU or none."""
    programs = {
        tmp_path / "shoal-env" / "bin" / "python": 'echo "$@"',
        tmp_path / "bin" / "nvidia-smi": f"exit {0 if has_gpu else 9}",
    }
    for path, script in programs.items():
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    command = ["bash", "-c", read(name)["setup_commands"][-2]]
    asked = subprocess.run(command, env=environment, text=True, capture_output=True, check=True).stdout.split()
    locks = [f"{tmp_path}/shoal/requirements{part}.lock" for part in ("", *([".gpu"] if has_gpu else []))]
    assert asked[:3] == ["-m", "pip", "install"] and [each for each in asked if each.endswith(".lock")] == locks


def test_both_install_and_start_alike() -> None:
    machines, aws = read("machines"), read("aws")
    assert machines["setup_commands"] == aws["setup_commands"]
    assert machines["initialization_commands"] == aws["initialization_commands"]
    assert machines["worker_start_ray_commands"] == aws["worker_start_ray_commands"]


@pytest.mark.parametrize("name", FILES)
def test_it_serves_to_others_on_the_cluster_that_ray_up_made(name: str) -> None:
    config = served(name)
    assert config.address == "auto"
    assert config.host == "0.0.0.0"


def test_several_models_can_be_served_by_uncommenting_them(tmp_path: Path) -> None:
    lines = (FOLDER / "shoal.yaml").read_text().splitlines()
    begin = lines.index("# models:")
    models = [line.removeprefix("# ") for line in lines[begin:] if line.startswith(("# models:", "#   - {"))]
    others = [line for line in lines if not line.startswith(("#", "model:"))]
    file = tmp_path / "shoal.yaml"
    file.write_text("\n".join(others + models))
    config = load(file)
    assert [(model.name, model.replicas) for model in config.deployments] == [("small", 2), ("large", 1)]
    assert [entry.name for entry in config.upstreams] == ["other"]


def test_every_machine_of_ones_own_is_used() -> None:
    given = prepare_config(read("machines"))
    for workers in (given["provider"]["worker_ips"], []):
        bootstrapped = OwnMachines.bootstrap_config(given | {"provider": given["provider"] | {"worker_ips": workers}})
        validate_config(bootstrapped)
        (node_type,) = bootstrapped["available_node_types"].values()
        number = len(workers)
        assert node_type["min_workers"] == node_type["max_workers"] == bootstrapped["max_workers"] == number
    assert given["provider"]["head_ip"] not in given["provider"]["worker_ips"]


def test_a_login_waits_for_a_machine_that_is_busy() -> None:
    """One that starts Ray may be silent for longer than the 15 s after which `ray up` would end."""
    asked: list[list[str]] = []
    ssh = SimpleNamespace(check_call=lambda command, **_: asked.append(command))
    there = SimpleNamespace(internal_ip=lambda name: name, external_ip=lambda name: name)
    key = {"ssh_user": "ops", "ssh_private_key": "key"}
    Login("", "10.0.0.1", there, key, "cluster", ssh, use_internal_ip=True).run("true")
    options = dict(word.split("=", 1) for word in asked[-1] if word.startswith("ServerAlive"))
    assert int(options["ServerAliveInterval"]) * int(options["ServerAliveCountMax"]) >= 60


def test_aws_types_say_what_their_instances_have() -> None:
    config = read("aws")
    images = set()
    for node_type in config["available_node_types"].values():
        cpus, gpus = INSTANCES[node_type["node_config"]["InstanceType"]]
        assert node_type["resources"] == {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
        images.add(node_type["node_config"]["ImageId"])
    assert len(images) == 1  # one Python everywhere: Ray insists


def test_what_aws_serves_fits_its_workers() -> None:
    config, shoal = read("aws"), served("aws")
    worker = config["available_node_types"]["gpu"]
    head = config["available_node_types"][config["head_node_type"]]
    assert 0 <= worker["min_workers"] <= worker["max_workers"] <= config["max_workers"]
    assert shoal.device == "cuda"
    gpus = shoal.tp * shoal.pp * shoal.gpus_per_rank
    assert gpus <= worker["resources"]["GPU"]
    assert shoal.replicas * gpus <= worker["max_workers"] * worker["resources"]["GPU"]
    most = int(worker["max_workers"] * worker["resources"]["GPU"] // gpus)
    full = shoal.model_copy(update={"replicas": most})
    assert full.num_routers * full.cpus_per_router <= head["resources"]["CPU"]
