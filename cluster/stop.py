"""Ending a server from another process than its `shoal serve`, which may have been killed."""

import contextlib
import logging
import shutil
import signal
from pathlib import Path

import psutil
import ray

from cluster import joined, local


class NotStopped(RuntimeError):
    """There is no server to end, or it cannot be ended. The message is for the user."""


def stop(address: str | None, pid: int | None = None) -> str:
    """Ends the server on the Ray cluster at `address`, or the one of this machine. `pid`: of its `shoal serve`. Returns
    what was done. Raises NotStopped, and NoCluster of `cluster.local`."""
    own = local.servers() if pid is None else {pid: local.folders()[pid]} if pid in local.folders() else {}
    if address is None and own:
        if len(own) > 1:
            raise NotStopped(f"several servers run here: choose one with --pid {' or '.join(map(str, own))}")
        return _stop_own(*own.popitem())
    if pid is not None:
        raise NotStopped(f"process {pid} is not a server on this machine")
    return _stop_joined(address)


def _stop_own(pid: int, folder: Path) -> str:
    """Ends a server with a Ray of its own, by its `shoal serve`; if that was killed, what it has left."""
    if local.is_serve(pid):
        process = psutil.Process(pid)
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGTERM)
            process.wait()
        return f"the server of process {pid} has ended"
    local.kill_left(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return f"what process {pid} had left has ended: its `shoal serve` was killed before"


def _stop_joined(address: str | None) -> str:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    local.join_or_tell(address)
    try:
        if not joined.runs():
            raise NotStopped(f"no server runs on the Ray cluster at {address or 'auto'}")
        joined.end()
    finally:
        ray.shutdown()
    return "the server has ended"
