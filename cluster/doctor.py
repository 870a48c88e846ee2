"""Checks of one machine: whether a server, or its part of a cluster, would run here, and what to do where it would not.

Each check is a function of an `ExaminedMachine`, which reads files below a root and runs commands: a test makes one up.
A check that cannot apply, such as that of GPUs where there are none, says so.
"""

import importlib.metadata
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cluster.conversion import ModelError
from cluster.local import PortTaken, check_port
from cluster.models import resolve
from worker.folders import cache_folder

State = Literal["ok", "warning", "failed", "skipped"]
COMMAND_TIMEOUT_S = 30.0
PYTHONS = ((3, 11), (3, 12))  # that the tests run on
# The oldest driver that runs programs of a CUDA version (NVIDIA's table of minor version compatibility).
DRIVERS = {"12": 525, "13": 580}
MIN_OPEN_FILES = 65536
MIN_SHM_BYTES = 1 << 30  # NCCL and custom all-reduces share memory there; a container has 64 MB unless it is told
MIN_FREE_BYTES = 10 << 30
MIN_PROCESSES = 4096
BUSY_GPU = 0.05  # of its memory: more than a driver holds itself
UNTRUSTED_LINKS = ("SYS", "NODE")  # between GPUs, through the processors
# Those that containers and virtual machines of this machine share with it, and no other machine.
INTERFACES_LEFT_OUT = re.compile(r"lo|(docker|veth|cni|flannel|cali|br-|virbr|bonding_masters|kube|tunl).*")
LIBRARIES = ("usr/lib", "usr/lib64", "lib", "usr/local/lib")
SMI_FIELDS = "index,name,driver_version,memory.total,memory.used"
SMI_MORE_FIELDS = ",clocks_event_reasons.hw_slowdown,ecc.errors.uncorrected.volatile.total"  # of newer drivers


@dataclass(frozen=True)
class Finding:
    """The result of a check. `remedy`: what to do; empty where nothing is to be done."""

    check: str
    state: State
    says: str
    remedy: str = ""


@dataclass(frozen=True)
class Space:
    """A file system: bytes in all, and free for this user."""

    total_bytes: int
    free_bytes: int


def _run(command: Sequence[str]) -> tuple[int, str] | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return 124, f"no answer within {COMMAND_TIMEOUT_S:g} s"
    return done.returncode, (done.stdout or done.stderr).strip()


def _space(path: Path) -> Space:
    while not path.exists():
        path = path.parent
    told = os.statvfs(path)
    return Space(told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize)


def _package(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packaged(name: str, file: str) -> Path | None:
    try:
        return Path(str(importlib.metadata.distribution(name).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> str | None:
    import torch  # takes seconds

    found: str | None = torch.version.cuda
    return found


@dataclass
class ExaminedMachine:
    """A machine as checks see it.

    | field | meaning |
    | --- | --- |
    | `root` | what its files are below |
    | `environ` | environment variables |
    | `run` | runs a command: its exit code and what it says; None where there is no such command |
    | `space` | the file system of a path |
    | `limit` | the soft limit of a resource (`resource.RLIMIT_*`); -1: none |
    | `package` | the version of a Python package; None where it is not installed |
    | `packaged` | where a file or folder of a Python package is, or would be; None where it is not installed |
    | `cuda` | the CUDA version that PyTorch is built for; None: it is built for CPUs |
    | `check_port` | as `cluster.local.check_port` |
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    run: Callable[[Sequence[str]], tuple[int, str] | None] = _run
    space: Callable[[Path], Space] = _space
    limit: Callable[[int], int] = lambda which: resource.getrlimit(which)[0]
    package: Callable[[str], str | None] = _package
    packaged: Callable[[str, str], Path | None] = _packaged
    cuda: Callable[[], str | None] = _cuda
    check_port: Callable[[str, int], None] = check_port
    python: tuple[int, int] = sys.version_info[:2]

    def path(self, name: str) -> Path:
        """A file of the machine."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """The text of a file; None if it cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    @property
    def has_gpus(self) -> bool:
        return self.path("/dev/nvidiactl").exists()

    def gpus(self) -> list[dict[str, str]] | str:
        """Each GPU by the names of SMI_FIELDS and, of a newer driver, SMI_MORE_FIELDS, or why they cannot be asked."""
        fields = SMI_FIELDS + SMI_MORE_FIELDS
        told = self.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
        if told is not None and told[0] != 0 and "not a valid field" in told[1]:
            fields = SMI_FIELDS
            told = self.run(["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"])
        if told is None:
            return "there is no nvidia-smi"
        code, text = told
        if code != 0:
            return text.splitlines()[0] if text else f"nvidia-smi ends with {code}"
        names = fields.split(",")
        rows = ([cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip())
        return [dict(zip(names, row, strict=False)) for row in rows]


@dataclass(frozen=True)
class WantedHere:
    """The server that is to run here: where it listens, its model (None: not asked for), and its largest `tp`."""

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    model: str | None = None
    tp: int = 1


Check = Callable[[ExaminedMachine, WantedHere], Iterator[tuple[State, str, str]]]


def examine(machine: ExaminedMachine, wanted: WantedHere) -> list[Finding]:
    """The findings of all checks. A check that fails itself is a finding, too."""
    found = []
    for name, check in CHECKS.items():
        try:
            found += [Finding(name, *told) for told in check(machine, wanted)]
        except Exception as error:
            says = f"could not be checked: {type(error).__name__}: {error}"
            found.append(Finding(name, "warning", says, "look at it by hand, and report the mistake"))
    return found


# ---------------------------------------------------------------- programs


def _python(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    version = ".".join(map(str, machine.python))
    if machine.python in PYTHONS:
        yield "ok", f"Python {version}", ""
    else:
        tried = " and ".join(".".join(map(str, each)) for each in PYTHONS)
        yield "warning", f"Python {version}, which is not tried", f"install one that is: {tried}"


def _ray(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    version, known = machine.package("ray"), _pinned("ray")
    if version is None:
        yield "failed", "Ray is not installed", "pip install -r requirements.lock"
    elif known not in (None, version):
        yield "warning", f"Ray {version}; Shoal is tried with {known}", f"pip install 'ray[serve]=={known}'"
    else:
        yield "ok", f"Ray {version}", ""


def _pinned(package: str) -> str | None:
    """The version of a package that Shoal's own metadata names; None where they name none."""
    try:
        wants = importlib.metadata.requires("shoal") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for want in wants:
        if found := re.match(rf"{re.escape(package)}(?:\[\w+\])?==([\w.]+)", want):
            return found[1]
    return None


# ---------------------------------------------------------------- GPUs


def _driver(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    if not machine.has_gpus:
        yield "skipped", "no NVIDIA GPU here (/dev/nvidiactl is not there): models run on CPUs", ""
        return
    gpus = machine.gpus()
    if isinstance(gpus, str):
        remedy = "install the driver's tools; after an upgrade of the driver, restart the machine"
        yield "failed", f"the driver does not answer: {gpus}", remedy
        return
    driver = gpus[0]["driver_version"] if gpus else "unknown"
    cuda = machine.cuda()
    if cuda is None:
        yield "failed", f"driver {driver}, but PyTorch is built for CPUs", "install PyTorch for CUDA: see README.md"
        return
    least = DRIVERS.get(cuda.split(".")[0])
    if least is not None and driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < least:
        yield "failed", f"driver {driver} is too old for CUDA {cuda}", f"install driver {least} or newer"
    else:
        yield "ok", f"driver {driver}, PyTorch for CUDA {cuda}", ""


def _gpus(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    gpus = machine.gpus() if machine.has_gpus else []
    if isinstance(gpus, str) or not gpus:
        yield "skipped", "no GPU answers" if machine.has_gpus else "no NVIDIA GPU here", ""
        return
    kinds = {gpu["name"] for gpu in gpus}
    yield "ok", f"{len(gpus)} of {', '.join(sorted(kinds))}", ""
    if len(kinds) > 1:
        yield "warning", "the GPUs differ", "let the ranks of one replica have equal ones (CUDA_VISIBLE_DEVICES)"
    for gpu in gpus:
        name = f"GPU {gpu['index']}"
        used, total = _number(gpu["memory.used"]), _number(gpu["memory.total"])
        if total and used > BUSY_GPU * total:
            remedy = "end it (nvidia-smi shows its process), or leave the GPU out by CUDA_VISIBLE_DEVICES"
            yield "warning", f"{name}: {used:.0f} of {total:.0f} MiB are used by another program", remedy
        if _number(gpu.get("ecc.errors.uncorrected.volatile.total", "")) > 0:
            yield "failed", f"{name}: memory errors that could not be corrected", "restart the machine; replace the GPU"


def _number(text: str) -> float:
    return float(text) if re.fullmatch(r"\d+(\.\d+)?", text) else 0.0


def _links(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    gpus = machine.gpus() if machine.has_gpus else []
    if isinstance(gpus, str) or len(gpus) < 2:
        yield "skipped", "fewer than two GPUs here", ""
        return
    told = machine.run(["nvidia-smi", "topo", "-m"])
    if told is None or told[0] != 0:
        yield "warning", "nvidia-smi topo -m does not answer", "look at the links by hand"
        return
    plain = re.sub(r"\x1b\[\d*m", "", told[1])
    # The header begins like a row once its tab is stripped. A row has an X, where a GPU meets itself.
    rows = [cells for line in plain.splitlines() if re.match(r"GPU\d+\s", line) and "X" in (cells := line.split())]
    links = [row[1 + other] for number, row in enumerate(rows) for other in range(number)]
    kinds = ", ".join(sorted(set(links)))
    slow = [link for link in links if link in UNTRUSTED_LINKS]
    if links and all(link.startswith("NV") for link in links):
        yield "ok", f"NVLink between all GPUs ({kinds})", ""
    elif slow:
        remedy = "prefer pp to tp here, or replicas of one GPU; in a virtual machine, pass the links through"
        yield "warning", f"some GPUs reach each other through the processors only ({kinds})", remedy
    else:
        yield "ok", f"GPUs reach each other over PCIe ({kinds}); tp is slower than with NVLink", ""


def _clocks(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    gpus = machine.gpus() if machine.has_gpus else []
    for gpu in [] if isinstance(gpus, str) else gpus:
        if gpu.get("clocks_event_reasons.hw_slowdown", "").lower() == "active":
            remedy = "look at cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE"
            yield "warning", f"GPU {gpu['index']} is slowed down by its hardware", remedy
    governor = machine.read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor == "powersave":
        yield "warning", "the processors save power (governor powersave)", "cpupower frequency-set -g performance"
    elif governor is None:
        yield "skipped", "the processors' governor is not told here, as in virtual machines", ""
    else:
        yield "ok", f"governor {governor}", ""
    told = machine.run(["timedatectl", "show", "-p", "NTPSynchronized", "--value"])
    if told is None or told[0] != 0:
        yield "skipped", "whether the time is synchronised is not told here, as in containers", ""
    elif told[1] == "yes":
        yield "ok", "the time is synchronised", ""
    else:
        yield "warning", "the time is not synchronised", "start chrony or systemd-timesyncd: logs and traces need it"


def _flashinfer(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    if not machine.has_gpus:
        yield "skipped", "for GPUs only", ""
        return
    version = machine.package("flashinfer-python")
    if version is None:
        yield "warning", "FlashInfer is not installed: slower kernels take its place", "pip install 'shoal[gpu]'"
        return
    if machine.package("flashinfer-jit-cache") is not None:
        yield "ok", f"FlashInfer {version}, with compiled kernels as a package", ""
        return
    home = machine.environ.get("FLASHINFER_WORKSPACE_BASE") or machine.environ.get("HOME", "/root")
    compiled = list(machine.path(f"{home}/.cache/flashinfer").glob("**/cached_ops/**/*.so"))
    # FlashInfer looks there first.
    if (shipped := machine.packaged("flashinfer-python", "flashinfer/data/aot")) is not None:
        compiled += shipped.glob("*/*.so")
    if compiled:
        yield "ok", f"FlashInfer {version}, {len(compiled)} kernels compiled", ""
    else:
        remedy = "shoal doctor --compile, with --model; else the first start does it, for minutes"
        yield "warning", f"FlashInfer {version}, no kernel compiled yet", remedy
    toolkits = (machine.environ.get("CUDA_HOME"), "/usr/local/cuda")
    compilers = [machine.path(f"{each}/bin/nvcc") for each in toolkits if each]
    if machine.run(["nvcc", "--version"]) is None and not any(each.exists() for each in compilers):
        says = "no nvcc, so no kernel can be compiled: Triton's take their place"
        yield "warning", says, "install the CUDA toolkit, or set CUDA_HOME to it"


# ---------------------------------------------------------------- the system


def _ports(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    for name, port in (("port", wanted.port), ("metrics_port", wanted.metrics_port)):
        if port is None:
            continue
        try:
            machine.check_port(wanted.host, port)
        except PortTaken:
            remedy = f"unless it is a server of Shoal (shoal status), set {name}; ss -ltnp 'sport = :{port}' names it"
            yield "warning", f"{wanted.host}:{port} ({name}) is taken", remedy
        except OSError as error:
            yield "failed", str(error), f"choose another {name}"
        else:
            yield "ok", f"{wanted.host}:{port} is free", ""


def _shared_memory(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    folder = machine.path("/dev/shm")
    gpus = machine.gpus() if machine.has_gpus else []
    together = wanted.tp > 1 or (not isinstance(gpus, str) and len(gpus) > 1)
    state: State = "failed" if together else "warning"  # one rank has none to share memory with
    if not folder.exists():
        yield state, "there is no /dev/shm", "mount a tmpfs there; in a container, --shm-size=8g"
        return
    space = machine.space(folder)
    if space.total_bytes < MIN_SHM_BYTES:
        yield state, f"/dev/shm has {_bytes(space.total_bytes)}", "in a container, --shm-size=8g or --ipc=host"
    else:
        yield "ok", f"/dev/shm has {_bytes(space.total_bytes)}", ""


def _limits(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    files, processes = machine.limit(resource.RLIMIT_NOFILE), machine.limit(resource.RLIMIT_NPROC)
    if 0 <= files < MIN_OPEN_FILES:
        remedy = f"ulimit -n {MIN_OPEN_FILES}, or LimitNOFILE= of the unit: each connection of a client is a file"
        yield "warning", f"{files} open files at most", remedy
    else:
        yield "ok", f"{'any number of' if files < 0 else files} open files", ""
    told = machine.read("/sys/fs/cgroup/pids.max") or "max"
    most = [each for each in (processes, int(told) if told.isdigit() else -1) if each >= 0]
    if most and min(most) < MIN_PROCESSES:
        yield "warning", f"{min(most)} processes and threads at most", f"ulimit -u {MIN_PROCESSES}, or pids.max"


def _interfaces(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    folder = machine.path("/sys/class/net")
    there = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
    named = machine.environ.get("NCCL_SOCKET_IFNAME", "")
    if named:
        exact, prefix = named.startswith("="), named.lstrip("=^")
        matches = [
            each for each in there for one in prefix.split(",") if (each == one if exact else each.startswith(one))
        ]
        if not named.startswith("^") and not matches:
            remedy = f"name one of {', '.join(there) or 'none'}, or unset NCCL_SOCKET_IFNAME"
            yield "failed", f"NCCL_SOCKET_IFNAME={named} names an interface that this machine has not", remedy
            return
    usable = [
        each
        for each in there
        if not INTERFACES_LEFT_OUT.fullmatch(each) and machine.read(f"/sys/class/net/{each}/operstate") != "down"
    ]
    if not usable:
        yield "skipped", "no network besides the machine's own: one machine is enough for a server", ""
        return
    told = []
    for each in usable:
        speed = machine.read(f"/sys/class/net/{each}/speed") or ""
        told.append(f"{each} ({int(speed) / 1000:g} Gbit/s)" if speed.isdigit() and int(speed) > 0 else each)
    if len(usable) > 1 and not named:
        remedy = "for replicas over several machines, name the fast one: NCCL_SOCKET_IFNAME"
        yield "warning", f"several interfaces: {', '.join(told)}", remedy
    else:
        yield "ok", f"interfaces: {', '.join(told)}", ""


def _rdma(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    folder = machine.path("/sys/class/infiniband")
    devices = sorted(each.name for each in folder.iterdir()) if folder.exists() else []
    if not devices:
        yield "skipped", "no RDMA device here: between machines, NCCL uses TCP", ""
        return
    # Without RDMA NCCL goes on over TCP, unless it is told not to.
    state: State = "failed" if machine.environ.get("NCCL_NET", "").upper() == "IB" else "warning"
    active = [
        device
        for device in devices
        if any("ACTIVE" in port.read_text() for port in folder.glob(f"{device}/ports/*/state"))
    ]
    if not active:
        yield state, f"no port of {', '.join(devices)} is active", "look at cables and switch: ibstat"
        return
    yield "ok", f"active: {', '.join(active)}", ""
    if not any(path for each in LIBRARIES for path in machine.path(each).glob("**/libibverbs.so*")):
        yield state, "libibverbs is not installed: NCCL would use TCP", "apt install rdma-core libibverbs1"
    if machine.limit(resource.RLIMIT_MEMLOCK) >= 0:
        remedy = "ulimit -l unlimited; in a container, the capability IPC_LOCK"
        yield state, "memory cannot be locked without limit, as RDMA needs", remedy
    if machine.has_gpus and "nvidia_peermem" not in (machine.read("/proc/modules") or ""):
        says = "nvidia_peermem is not loaded: data may go by way of the host's memory"
        yield "warning", says, "modprobe nvidia_peermem"


def _disks(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    for name, folder in (("the cache", cache_folder()), ("Ray's logs", Path("/tmp"))):
        space = machine.space(folder if machine.root == Path("/") else machine.path(str(folder)))
        if space.free_bytes < MIN_FREE_BYTES:
            remedy = "free some, or set SHOAL_CACHE" if name == "the cache" else "free some: Ray stops at 95% use"
            yield "warning", f"{name} ({folder}): {_bytes(space.free_bytes)} free", remedy
        else:
            yield "ok", f"{name} ({folder}): {_bytes(space.free_bytes)} free", ""


def _model(machine: ExaminedMachine, wanted: WantedHere) -> Iterator[tuple[State, str, str]]:
    if wanted.model is None:
        yield "skipped", "no --model given", ""
        return
    try:
        folder = resolve(wanted.model, pull=False, progress=lambda line: None)
    except ModelError as error:
        yield "failed", str(error), f"shoal pull {wanted.model}"
    else:
        yield "ok", f"{wanted.model} is in {folder}", ""


def _bytes(number: int) -> str:
    return f"{number / (1 << 30):.1f} GiB" if number >= 1 << 30 else f"{number / (1 << 20):.0f} MiB"


CHECKS: dict[str, Check] = {
    "python": _python,
    "ray": _ray,
    "driver": _driver,
    "gpus": _gpus,
    "links": _links,
    "flashinfer": _flashinfer,
    "clocks": _clocks,
    "ports": _ports,
    "shared memory": _shared_memory,
    "limits": _limits,
    "interfaces": _interfaces,
    "rdma": _rdma,
    "disks": _disks,
    "model": _model,
}
"""All checks, in the order in which they are told."""
