"""The checks of a machine, on machines that are made up: files below a folder, commands by name."""

import errno
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster import doctor
from cluster.doctor import CHECKS, ExaminedMachine, Finding, Space, WantedHere, examine
from cluster.local import PortTaken

GIB = 1 << 30
SMI = "0, NVIDIA H100 80GB HBM3, 580.65.06, 81559, 1, Not Active, 0"
TOPO = "\t\x1b[4mGPU0\tGPU1\tCPU Affinity\x1b[0m\nGPU0\t X \t{link}\t0-31\nGPU1\t{link}\t X \t0-31\n\nLegend:\n"
NO_LIMIT = -1


class MadeUp:
    """A machine with which all is well. Tests take something away."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.commands: dict[str, tuple[int, str]] = {"timedatectl": (0, "yes"), "nvcc": (0, "13.0")}
        self.packages = {"ray": doctor._pinned("ray") or "1", "flashinfer-python": "0.7.2"}
        self.limits = {
            resource.RLIMIT_NOFILE: 1 << 20,
            resource.RLIMIT_NPROC: NO_LIMIT,
            resource.RLIMIT_MEMLOCK: NO_LIMIT,
        }
        self.environ = {"HOME": "/home/me"}
        self.space = Space(100 * GIB, 50 * GIB)
        self.cuda: str | None = None
        self.python = (3, 11)
        self.taken: dict[int, Exception] = {}
        self.file("/dev/shm/x")
        self.file("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
        for name in ("lo", "eth0", "docker0"):
            self.file(f"/sys/class/net/{name}/operstate", "up\n")
        self.file("/sys/class/net/eth0/speed", "25000\n")

    def file(self, name: str, text: str = "") -> None:
        path = self.root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def with_gpus(self, *lines: str, link: str = "NV18") -> "MadeUp":
        self.file("/dev/nvidiactl")
        self.file("/home/me/.cache/flashinfer/0.7.2/90a/cached_ops/norm/norm.so")
        self.file("/proc/modules", "nvidia_peermem 16384 0\n")
        self.commands["nvidia-smi"] = (0, "\n".join(lines or (SMI,)))
        self.commands["nvidia-smi topo"] = (0, TOPO.format(link=link))
        self.cuda = "13.0"
        return self

    def findings(self, check: str, **wanted: Any) -> list[Finding]:
        def run(command: Sequence[str]) -> tuple[int, str] | None:
            told = self.commands.get(" ".join(command[:2])) or self.commands.get(command[0])
            if told is None or told[0] != 0:
                return told
            return doctor._run(["printf", "%s", told[1]])  # as what a program prints comes to a check

        def check_port(host: str, port: int) -> None:
            if port in self.taken:
                raise self.taken[port]

        machine = ExaminedMachine(
            root=self.root,
            environ=self.environ,
            run=run,
            space=lambda path: self.space,
            limit=self.limits.__getitem__,
            package=self.packages.get,
            packaged=lambda name, file: self.root / "site" / file if name in self.packages else None,
            cuda=lambda: self.cuda,
            check_port=check_port,
            python=self.python,
        )
        return [found for found in examine(machine, WantedHere(**wanted)) if found.check == check]


@pytest.fixture
def machine(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path)


def states(found: list[Finding]) -> list[str]:
    return [each.state for each in found]


def test_a_machine_without_gpus_is_well(machine: MadeUp) -> None:
    found = [each for check in CHECKS for each in machine.findings(check)]
    assert {each.state for each in found} == {"ok", "skipped"}
    assert all(not each.remedy for each in found)
    skipped = {each.check for each in found if each.state == "skipped"}
    assert skipped == {"driver", "gpus", "links", "flashinfer", "rdma", "model"}


def test_a_machine_with_gpus_is_well(machine: MadeUp) -> None:
    machine.with_gpus(SMI, SMI.replace("0,", "1,", 1))
    machine.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    machine.file("/usr/lib/x86_64-linux-gnu/libibverbs.so.1")
    found = [each for check in CHECKS for each in machine.findings(check)]
    assert {each.check for each in found if each.state not in ("ok", "skipped")} == set()
    assert {each.check for each in found if each.state == "skipped"} == {"model"}
    said = " ".join(each.says for each in found)
    assert "2 of NVIDIA H100" in said and "NVLink" in said and "1 kernels compiled" in said and "mlx5_0" in said


FAULTS: list[tuple[str, str, str, Callable[[MadeUp], Any]]] = [
    ("python", "warning", "3.14", lambda m: setattr(m, "python", (3, 14))),
    ("ray", "failed", "not installed", lambda m: m.packages.pop("ray")),
    ("ray", "warning", "2.0", lambda m: m.packages.update(ray="2.0")),
    ("driver", "failed", "no nvidia-smi", lambda m: m.with_gpus().commands.pop("nvidia-smi")),
    ("driver", "failed", "mismatch", lambda m: m.with_gpus().commands.update({"nvidia-smi": (18, "version mismatch")})),
    ("driver", "failed", "too old", lambda m: m.with_gpus(SMI.replace("580.65.06", "550.54"))),
    ("driver", "failed", "built for CPUs", lambda m: setattr(m.with_gpus(), "cuda", None)),
    ("gpus", "warning", "another program", lambda m: m.with_gpus(SMI.replace(", 1, Not", ", 60000, Not"))),
    ("gpus", "failed", "memory errors", lambda m: m.with_gpus(SMI[:-1] + "3")),
    ("gpus", "warning", "differ", lambda m: m.with_gpus(SMI, SMI.replace("H100", "A100"))),
    ("links", "warning", "processors", lambda m: m.with_gpus(SMI, SMI, link="SYS")),
    ("links", "warning", "topo", lambda m: m.with_gpus(SMI, SMI).commands.update({"nvidia-smi topo": (1, "")})),
    ("flashinfer", "warning", "not installed", lambda m: m.with_gpus().packages.pop("flashinfer-python")),
    ("flashinfer", "warning", "no kernel compiled", lambda m: m.with_gpus().environ.update(HOME="/home/you")),
    ("flashinfer", "warning", "nvcc", lambda m: m.with_gpus().commands.pop("nvcc")),
    ("clocks", "warning", "slowed down", lambda m: m.with_gpus(SMI.replace("Not Active", "Active"))),
    ("clocks", "warning", "synchronised", lambda m: m.commands.update(timedatectl=(0, "no"))),
    ("ports", "warning", "taken", lambda m: m.taken.update({8000: PortTaken("taken")})),
    ("ports", "failed", "denied", lambda m: m.taken.update({8000: OSError(errno.EACCES, "permission denied")})),
    ("shared memory", "warning", "64 MiB", lambda m: setattr(m, "space", Space(64 << 20, 64 << 20))),
    ("shared memory", "failed", "64 MiB", lambda m: setattr(m.with_gpus(SMI, SMI), "space", Space(64 << 20, 64 << 20))),
    ("limits", "warning", "1024 open files", lambda m: m.limits.update({resource.RLIMIT_NOFILE: 1024})),
    ("limits", "warning", "100 processes", lambda m: m.file("/sys/fs/cgroup/pids.max", "100\n")),
    ("interfaces", "failed", "ib7", lambda m: m.environ.update(NCCL_SOCKET_IFNAME="ib7")),
    ("interfaces", "warning", "several", lambda m: m.file("/sys/class/net/ib0/operstate", "up")),
    ("rdma", "warning", "no port", lambda m: m.file("/sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")),
    ("rdma", "warning", "libibverbs", lambda m: m.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")),
    ("disks", "warning", "1.0 GiB free", lambda m: setattr(m, "space", Space(100 * GIB, GIB))),
]  # fmt: skip


@pytest.mark.parametrize(("check", "state", "says", "fault"), FAULTS, ids=[f"{c}-{s}" for c, _, s, _ in FAULTS])
def test_a_fault_is_found_with_its_remedy(
    machine: MadeUp, check: str, state: str, says: str, fault: Callable[[MadeUp], Any]
) -> None:
    fault(machine)
    found = [each for each in machine.findings(check) if says in each.says]
    assert found
    assert all(each.state == state and each.remedy for each in found)


def test_kernels_that_came_compiled_in_the_package_count(machine: MadeUp) -> None:
    machine.with_gpus().environ["HOME"] = "/home/you"
    machine.file("/site/flashinfer/data/aot/norm/norm.so")
    (found,) = machine.findings("flashinfer")
    assert found.state == "ok" and "1 kernels compiled" in found.says


@pytest.mark.parametrize("link", ["NV18", "SYS", "PIX"])
def test_links_with_and_without_colours(machine: MadeUp, link: str) -> None:
    machine.with_gpus(SMI, SMI, link=link)
    coloured = machine.findings("links")
    machine.commands["nvidia-smi topo"] = (0, TOPO.format(link=link).replace("\x1b[4m", "").replace("\x1b[0m", ""))
    assert machine.findings("links") == coloured
    (found,) = coloured
    assert f"({link})" in found.says


def test_ranks_that_share_memory_need_it(machine: MadeUp) -> None:
    machine.space = Space(64 << 20, 64 << 20)
    assert states(machine.findings("shared memory", tp=2)) == ["failed"]
    assert states(machine.findings("shared memory", tp=1)) == ["warning"]


@pytest.mark.parametrize(("state", "says"), [("1: DOWN", "no port"), ("4: ACTIVE", "libibverbs")])
def test_rdma_is_needed_where_nccl_is_told_so(machine: MadeUp, state: str, says: str) -> None:
    machine.file("/sys/class/infiniband/mlx5_0/ports/1/state", state)
    machine.environ["NCCL_NET"] = "IB"
    (found,) = [each for each in machine.findings("rdma") if each.remedy]
    assert found.state == "failed" and says in found.says


def test_a_machine_without_a_compiler_runs_other_kernels(machine: MadeUp) -> None:
    machine.with_gpus().environ["HOME"] = "/home/you"
    del machine.commands["nvcc"]
    assert states(machine.findings("flashinfer")) == ["warning", "warning"]
    machine.file("/opt/cuda/bin/nvcc")
    machine.environ["CUDA_HOME"] = "/opt/cuda"
    (found,) = machine.findings("flashinfer")
    assert "nvcc" not in found.says


def test_memory_that_cannot_be_locked(machine: MadeUp) -> None:
    machine.file("/sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE\n")
    machine.file("/usr/lib/libibverbs.so.1")
    machine.limits[resource.RLIMIT_MEMLOCK] = 65536
    assert states(machine.findings("rdma")) == ["ok", "warning"]
    machine.environ["NCCL_NET"] = "IB"
    assert states(machine.findings("rdma")) == ["ok", "failed"]


@pytest.mark.parametrize("named", ["eth0", "eth", "=eth0", "^docker0", "ib0,eth0"])
def test_interfaces_that_nccl_would_take(machine: MadeUp, named: str) -> None:
    machine.file("/sys/class/net/ens5/operstate", "up")
    machine.environ["NCCL_SOCKET_IFNAME"] = named
    assert states(machine.findings("interfaces")) == ["ok"]


def test_kernels_as_a_package_need_no_compiler(machine: MadeUp) -> None:
    machine.with_gpus().packages["flashinfer-jit-cache"] = "0.7.2"
    machine.environ["HOME"] = "/home/you"
    del machine.commands["nvcc"]
    assert states(machine.findings("flashinfer")) == ["ok"]


def test_ports_of_routers_are_looked_at(machine: MadeUp) -> None:
    machine.taken[9001] = PortTaken("taken")
    found = machine.findings("ports", port=8001, metrics_port=9001)
    assert states(found) == ["ok", "warning"] and "metrics_port" in found[1].remedy


def test_the_models_folder(machine: MadeUp, tiny_model: Path) -> None:
    assert states(machine.findings("model", model=str(tiny_model))) == ["ok"]
    (found,) = machine.findings("model", model=str(tiny_model / "not-there"))
    assert found.state == "failed" and "shoal pull" in found.remedy


def test_a_check_that_breaks_is_a_finding(machine: MadeUp) -> None:
    machine.with_gpus().commands["nvidia-smi"] = (0, "0")  # a driver that answers otherwise
    (found,) = machine.findings("driver")
    assert found.state == "warning" and "KeyError" in found.says


def test_an_older_driver_is_asked_for_less(machine: MadeUp) -> None:
    machine.with_gpus()
    del machine.commands["nvidia-smi"]
    older = f"nvidia-smi --query-gpu={doctor.SMI_FIELDS}"
    newer = older + doctor.SMI_MORE_FIELDS
    machine.commands[newer] = (2, 'Field "clocks_event_reasons.hw_slowdown" is not a valid field to query.')
    machine.commands[older] = (0, ",".join(SMI.split(",")[:5]))
    assert states(machine.findings("driver")) == ["ok"] and states(machine.findings("gpus")) == ["ok"]
    assert "failed" not in states(machine.findings("clocks"))
