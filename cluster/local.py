"""Ray on this machine, for one server alone: started and ended together with it, whatever happens in between."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import math
import os
import re
import secrets
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import ray

from cluster import log_lines
from cluster.config import Config, DeploymentConfig
from cluster.listening import keep_ray_here
from cluster.models import KNOWN
from cluster.replica import CONTROL_CPUS, rank_resources
from router.http.listener import bind

CPU_KV_FRACTION = 0.25  # of the memory that is free, for the KV caches of all replicas together
OBJECT_STORE_BYTES = 200 << 20  # no tensor and no token goes through it
MEMORY_BYTES = 1 << 30  # a number that nothing depends on; Ray's own measure is wrong on some machines
MAX_CPUS = 1024  # logical ones, for a server that may grow: only GPUs and memory limit it
WATCH_S = 2.0  # between looks at Ray's processes
END_S = 3.0  # how long Ray may take to end its processes, before they are killed
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
PREFIX = "shoal-ray-"
LOCK = "lock"  # in a folder: its server holds it
RAYS = "ray"  # in a folder: Ray's own, which Ray opens to everybody
REASONS = ("replica at ", "replica does not start: ")  # how they begin
HEART = ("gcs_server", "raylet")  # the processes that Ray cannot run without


class NoCluster(RuntimeError):
    """There is no Ray cluster to join. The message is for the user."""


class PortTaken(RuntimeError):
    """Another program listens on the port."""


def fit(config: Config) -> Config:
    """The configuration with everything filled in that is fixed for a server on one machine: its cores divided among
    the ranks, replicas on the loopback interface, and an absolute path to each model, for all processes."""
    share = max(1, len(os.sched_getaffinity(0)) // max(1, num_ranks(config)))

    def fitted(deployment: DeploymentConfig) -> DeploymentConfig:
        return deployment.model_copy(
            update={
                "cpus_per_rank": deployment.cpus_per_rank or share,
                "replica_host": deployment.replica_host or "127.0.0.1",
                "model": _whole_model(deployment.model),
                "lora_modules": {name: _whole_path(path) for name, path in deployment.lora_modules.items()},
                "draft_model": deployment.draft_model and _whole_model(deployment.draft_model),
            }
        )

    return config.changed(fitted)


def _whole_model(model: str) -> str:
    return model if model in KNOWN else _whole_path(model)  # a known name wins over a folder, as in `resolve`


def _whole_path(given: str) -> str:
    path = Path(given).expanduser()
    return str(path.resolve()) if path.exists() else given


def num_ranks(config: Config, device: str | None = None) -> int:
    """The ranks of all replicas of all models that there may be, or of those on a device."""
    models = [deployment for deployment in config.deployments if device in (None, deployment.device)]
    return sum(deployment.most_replicas * deployment.num_ranks for deployment in models)


def share_memory(config: Config) -> Config:
    """The configuration with each CPU rank's part of this machine's memory for its KV cache. `config` must be settled.
    A model on GPUs, or that sets a part itself, stays as it is."""
    each = CPU_KV_FRACTION / max(1, num_ranks(config, "cpu"))

    def shared(deployment: DeploymentConfig) -> DeploymentConfig:
        if deployment.device != "cpu" or deployment.kv_memory_fraction is not None:
            return deployment
        return deployment.model_copy(update={"kv_memory_fraction": each})

    return config.changed(shared)


def check_port(host: str, port: int) -> None:
    """Raises PortTaken, or OSError for a port or an address that this process may not listen on."""
    try:
        bind(host, port, shared=False).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} of {host} is taken by another program: choose another with --port") from None
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}. --host must be an address of this machine, --port "
            "a port that this user may listen on"
        ) from None


def hold_port(host: str, port: int) -> socket.socket | None:
    """Takes a port for the routers of this user, which may listen already: as long as the socket that this returns is
    open, no other server gets it, though no router may run for a moment. The socket itself takes no connections. None
    where that cannot be: the routers are of another user, or connections of another program are still closing."""
    try:
        return bind(host, port, listens=False)
    except OSError:
        return None


def join(address: str) -> None:
    """Joins the Ray cluster at host:port, or "auto": the one of this machine. Raises OSError or RuntimeError if there
    is none."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():  # Ray itself would try for minutes, deaf to Ctrl-C
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    if _token().exists():  # a cluster that asks for none does not look at it
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)


def join_or_tell(address: str | None) -> None:
    """Joins the Ray cluster at `address`; None: the one that this machine is part of. Raises NoCluster."""
    try:
        join(address or "auto")
    except (OSError, RuntimeError) as error:
        if address is None:
            raise NoCluster("no server runs on this machine, and it is part of no Ray cluster") from None
        raise NoCluster(f"no Ray cluster at {address}: {error}") from error


def logs(folder: Path) -> Path:
    """Where the processes of the Ray in `folder` write their logs."""
    return folder / RAYS / "session_latest" / "logs"


def make_folder() -> Path:
    """Makes the folder for Ray's logs and sockets, for this user alone. Not in $TMPDIR, because paths of sockets must
    be short. The folder is locked until this process ends. Removes the folders of servers that were killed, or did not
    start."""
    _sweep()
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}{os.getpid()}-", dir="/tmp"))
    lock = os.open(made / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    os.write(lock, _processes().encode())
    fcntl.flock(lock, fcntl.LOCK_EX)
    # Only now does the folder get a name by which others find it: they remove what is not locked.
    return made.rename(made.with_name(made.name.removeprefix(".")))


def start(config: Config, folder: Path, grows: bool = False) -> None:
    """Starts Ray with as many logical CPUs as the server asks for, whatever the number of cores. Only processes of this
    machine reach it. `grows`: it may ask for more later, and Ray cannot be given more later."""
    _adopt_orphans()
    _make_token()
    keep_ray_here()
    cpus = config.num_routers * config.cpus_per_router
    for deployment in config.deployments:
        ranks = deployment.num_ranks * rank_resources(deployment)["CPU"]
        cpus += deployment.most_replicas * (CONTROL_CPUS + ranks)
    without_gpus = all(deployment.device == "cpu" for deployment in config.deployments)
    ray.init(
        address="local",  # a new one, even where RAY_ADDRESS or another Ray on this machine exists
        num_cpus=max(MAX_CPUS, math.ceil(cpus)) if grows else math.ceil(cpus),
        num_gpus=0 if without_gpus else None,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _memory=MEMORY_BYTES,
        _temp_dir=str(folder / RAYS),
        # Ray's measure of free memory is wrong on some machines: killing for memory is left to the kernel.
        # Ray's workers have a low priority (nice 15) by default, so replicas starve on a machine with other work.
        # Ray would start a process for each logical CPU in advance.
        _system_config={
            "memory_monitor_refresh_ms": 0,
            "worker_niceness": 0,
            **({"enable_worker_prestart": False} if grows else {}),
        },
    )


def _token() -> Path:
    """The file of the token that Ray asks for."""
    return Path.home() / ".ray" / "auth_token"


def _make_token() -> None:
    """Makes the token where there is none, and where Ray would make it: for this user alone, which Ray's would not
    be."""
    has_other = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    if has_other or os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return
    path = _token()
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists():
        return
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".auth_token-") as file:  # its mode is 0600
        file.write(secrets.token_hex(32))
        file.flush()
        with contextlib.suppress(FileExistsError):  # whole, or another server's
            os.link(file.name, path)


def open_token() -> Path | None:
    """The token that Ray asks for, if other users of this machine may read it."""
    with contextlib.suppress(OSError):
        if _token().stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
            return _token()
    return None


class RayWatch:
    """Looks whether an essential process of the Ray that `start` starts has ended: from before that start on, in a
    thread of its own. A call that waits for such a Ray waits for a minute, after which Ray ends this process, with no
    chance to end the others."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """`tell` is called with the reason. Then all descendants are killed, and this process ends with exit code 1."""
        self._tell = tell
        self._seen = set[str]()
        self._ended = set[int]()
        self._over = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def stop(self) -> None:
        """From now on, processes end because this one ends them."""
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(WATCH_S):
            # What ends Ray may be a signal for this process too: it has the time to end Ray by itself.
            if (gone := self.gone()) and not self._over.wait(END_S):
                self._tell(f"its {' and '.join(gone)} ended")
                while _kill_children():
                    pass
                os._exit(1)
            self._ended = reap(self._ended)

    def gone(self) -> list[str]:
        """The names of the essential processes that have ended."""
        names, ended = set[str](), set[str]()
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_zombie = process.status() == psutil.STATUS_ZOMBIE
                (ended if is_zombie else names).add(process.name())
        self._seen.update(names | ended)
        return [name for name in HEART if name in self._seen and name not in names]


def reap(ended: set[int]) -> set[int]:
    """Reaps children of this process that had ended by the last look already, when this function returned `ended`:
    nothing waits for what was adopted, such as the compiler of a rank that was killed. A child that is waited for is
    gone by then, and of Ray's essential processes `RayWatch` must see the end."""
    found = set()
    for process in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_ZOMBIE and process.name() not in HEART:
                found.add(process.pid)
    for pid in found & ended:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return found - ended


def reasons(folder: Path) -> list[str]:
    """The reasons why replicas have ended so far, or did not start, as `cluster.replica` logs them; each text once."""
    files = sorted((logs(folder) / "serve").glob("replica_*.log"))
    found = [message for file in files for message in log_lines.errors(file.read_text())]
    return list(dict.fromkeys(message for message in found if message.startswith(REASONS)))


def end() -> None:
    """Ends Ray and everything that it started from this process, even after an incomplete start."""
    # Ray waits long for processes that do not end, for example because the same signal has ended Ray's head.
    impatience = threading.Timer(END_S, _kill_children)
    impatience.daemon = True
    impatience.start()
    ray.shutdown()
    impatience.cancel()
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=END_S)
    while _kill_children():
        pass


def _adopt_orphans() -> None:
    """Makes this process adopt every descendant whose parent dies, so that `end` finds what a dying raylet left."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _kill_children() -> bool:
    """Kills all descendants. Returns whether there were any."""
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children, timeout=END_S)
    return bool(children)


def servers() -> dict[int, Path]:
    """The servers of this user with a Ray of their own: the process of each `shoal serve`, which may have been killed,
    to the folder of its Ray."""
    return {pid: folder for pid, folder in folders().items() if is_serve(pid) or _left(folder)}


def is_serve(pid: int) -> bool:
    """Whether a process is Shoal's: the numbers of processes come back."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return any("shoal" in word for word in psutil.Process(pid).cmdline())
    return False


def folders() -> dict[int, Path]:
    """The folders of this user's servers with a Ray of their own, by the process of `shoal serve`; also of those that
    have ended, but none of another container, whose processes have other numbers."""
    return {pid: folder for pid, folder in _all_folders() if _is_here(folder)}


def _all_folders() -> Iterator[tuple[int, Path]]:
    """The folders of this user's servers, of all containers that share /tmp. What else has such a name is passed over:
    anybody may make it."""
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        named = re.fullmatch(rf"{PREFIX}([0-9]{{1,9}})-\w+", folder.name, re.ASCII)
        with contextlib.suppress(OSError):
            found = folder.lstat()
            if named and stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                yield int(named[1]), folder


def _processes() -> str:
    """Which numbers of processes hold for this process: containers have their own."""
    return os.readlink("/proc/self/ns/pid")


def _is_here(folder: Path) -> bool:
    """Whether a folder's server is or was among the processes that this one sees."""
    try:
        return (folder / LOCK).read_text() == _processes()
    except OSError:  # of an earlier version
        return True


def _is_over(pid: int, folder: Path) -> bool:
    """Whether a folder's `shoal serve` has ended, and nothing that it has left runs on."""
    try:
        with open(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # of an earlier version: without a lock
        if psutil.pid_exists(pid):
            return False
    return not _left(folder) and not any(map(_listens, (folder / RAYS).glob("session_*/sockets/*")))


def _listens(path: Path) -> bool:
    """Whether a process listens at a socket, in whatever container."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1)
        try:
            client.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it is too busy to answer
            return True
    return True


def kill_left(folder: Path) -> None:
    """Kills what a killed `shoal serve` has left: the Ray in a folder, and all that Ray has started."""
    while left := _left(folder):
        family = {child for process in left for child in process.children(recursive=True)} | set(left)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(list(family), timeout=END_S)


def _left(folder: Path) -> list[psutil.Process]:
    """The processes of the Ray in a folder: they name it in their command lines, or, with a title of their own, write
    logs there."""
    return [process for process in psutil.process_iter(["cmdline", "status"]) if _belongs(process, folder)]


def _belongs(process: psutil.Process, folder: Path) -> bool:
    command: list[str] = process.info["cmdline"] or []
    if process.info["status"] == psutil.STATUS_ZOMBIE or not command:
        return False
    if any(str(folder) in word for word in command):
        return True
    with contextlib.suppress(psutil.Error, OSError):
        return command[0].startswith("ray::") and any(f.path.startswith(f"{folder}/") for f in process.open_files())
    return False


def _sweep() -> None:
    """Removes the folders of servers that have ended."""
    for pid, folder in _all_folders():
        if _is_over(pid, folder):
            shutil.rmtree(folder, ignore_errors=True)
