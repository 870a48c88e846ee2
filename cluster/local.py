"""Ray on this machine, for one server alone: it is started with it and ends with it, whatever happens in between."""

import contextlib
import ctypes
import errno
import logging
import math
import os
import re
import shutil
import socket
import tempfile
import threading
from pathlib import Path

import psutil
import ray

from cluster.config import Config
from cluster.replica import CONTROL_CPUS, rank_resources
from router.listener import bind

OBJECT_STORE_BYTES = 200 << 20  # no tensor and no token goes through it
MEMORY_BYTES = 1 << 30  # a label that nothing asks for; what Ray would measure is wrong on some machines
END_S = 3.0  # what Ray gets to end its processes, before they are killed
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>
PREFIX = "shoal-ray-"
HEART = ("gcs_server", "raylet")  # Ray's processes without which nothing goes on


class PortTaken(RuntimeError):
    """Another program listens there."""


def fit(config: Config) -> Config:
    """What a server on this machine alone does not leave open: cores shared out, replicas on the loopback interface,
    and a model's path that holds in every process."""
    ranks = config.replicas * config.num_ranks
    path = Path(config.model).expanduser()
    return config.model_copy(
        update={
            "cpus_per_rank": config.cpus_per_rank or max(1, len(os.sched_getaffinity(0)) // ranks),
            "replica_host": config.replica_host or "127.0.0.1",
            "model": str(path.resolve()) if path.exists() else config.model,
        }
    )


def check_port(host: str, port: int) -> None:
    """Raises PortTaken, or OSError for a port or an address that this process may not listen on."""
    try:
        bind(host, port, shared=False).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} of {host} is taken by another program: choose another with --port") from None
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}. --host is an address of this machine, --port "
            "a port that you may take"
        ) from None


def check_address(address: str) -> None:
    """Raises OSError if `address` is a host:port where nothing listens."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()


def make_folder() -> Path:
    """For Ray's logs and sockets. Not in $TMPDIR: the paths of sockets must be short. Removes what servers that were
    killed, or did not start, have left there."""
    _sweep()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir="/tmp"))


def start(config: Config, folder: Path) -> None:
    """Starts Ray with as many logical CPUs as the server asks for, however many cores there are."""
    _adopt_orphans()
    ranks = config.num_ranks * rank_resources(config)["CPU"]
    cpus = config.replicas * (CONTROL_CPUS + ranks) + config.num_routers * config.cpus_per_router
    ray.init(
        address="local",  # also where RAY_ADDRESS or another Ray on this machine would be joined
        num_cpus=math.ceil(cpus),
        num_gpus=0 if config.device == "cpu" else None,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _memory=MEMORY_BYTES,
        _temp_dir=str(folder),
        # The kernel kills who takes too much; Ray's guess at what is free is wrong on some machines.
        _system_config={"memory_monitor_refresh_ms": 0},
    )


def check() -> None:
    """Raises RuntimeError once the heart of the Ray that `start` started has stopped. Whoever asks Ray itself then
    waits for a minute, and is ended by it without a chance to end the others."""
    names = [p.name() for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE]
    if gone := [name for name in HEART if name not in names]:
        raise RuntimeError(f"its {' and '.join(gone)} ended")


def reasons(folder: Path) -> list[str]:
    """Why replicas have ended so far, or did not start, as `cluster.replica` logs it; each text once."""
    logs = sorted(folder.glob("session_latest/logs/serve/replica_*.log"))
    texts = [re.findall(r"^ERROR .* -- (replica (?:at|does not start:) .+)", log.read_text(), re.M) for log in logs]
    return list(dict.fromkeys(text for found in texts for text in found))


def end() -> None:
    """Ends Ray and everything it started from this process, also if it is only half there."""
    # Ray waits long for processes that do not end, such as those that lost their head to the same signal.
    impatience = threading.Timer(END_S, _kill_children)
    impatience.daemon = True
    impatience.start()
    ray.shutdown()
    impatience.cancel()
    psutil.wait_procs(psutil.Process().children(recursive=True), timeout=END_S)
    while _kill_children():
        pass


def _adopt_orphans() -> None:
    """From now on a process whose parent dies becomes this one's child, so `end` finds what a dying raylet left."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _kill_children() -> bool:
    """Whether there were any."""
    children = psutil.Process().children(recursive=True)
    for process in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(children, timeout=END_S)
    return bool(children)


def _sweep() -> None:
    for folder in Path("/tmp").glob(f"{PREFIX}*"):
        if not psutil.pid_exists(int(folder.name.removeprefix(PREFIX).split("-")[0])):
            shutil.rmtree(folder, ignore_errors=True)
