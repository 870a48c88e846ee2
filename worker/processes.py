"""The ranks of a replica as processes of this machine, which end when the one does that started them."""

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import torch

from worker.config import WorkerConfig
from worker.ranks import Follower, Leader, end, find_store, open_store, other_ranks
from worker.runner import Runner, place
from worker.weights import Progress

# NCCL refuses two ranks on one GPU, unless it takes them to be on different machines, of which this is the name.
_MACHINE = "NCCL_HOSTID"


def open_runner(
    model: Path, config: WorkerConfig, progress: Progress | None = None, share_gpus: bool = False
) -> Runner | Leader:
    """What computes a replica's steps on this machine: a runner, or the leader of `tp * pp` ranks, as `launch`."""
    if progress is None and sys.stderr.isatty():
        progress = _show
    return Runner(model, config, progress) if config.num_ranks == 1 else launch(model, config, progress, share_gpus)


def launch(model: Path, config: WorkerConfig, progress: Progress | None = None, share_gpus: bool = False) -> Leader:
    """This process as the leading rank, and one more for each other rank, on this machine. They end when it does. With
    `share_gpus` there may be more of them than GPUs, to see that they are right: those of one GPU take turns."""
    device, _ = place(config)
    ranks = config.num_ranks
    gpus = torch.cuda.device_count()
    if shared := device.type == "cuda" and gpus < ranks:
        if not share_gpus:
            raise ValueError(f"tp={config.tp}, pp={config.pp}, but this machine has {gpus} GPUs")
        os.environ[_MACHINE] = f"rank {config.leading_rank}"
    if device.type == "cpu" and config.cpu_threads is None:
        config = config.model_copy(update={"cpu_threads": max(1, (os.cpu_count() or 1) // ranks)})
    store, address = open_store()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in other_ranks(config):
            seat = _Seat(str(model), config.model_dump(mode="json"), rank, address)
            processes.append(_start(seat, {_MACHINE: f"rank {rank}"} if shared else {}))
    except BaseException:
        for process in processes:
            end(process, 0)
        raise
    return Leader(model, config, store, progress=progress, processes=processes)


class _Seat(msgspec.Struct):
    """What a process must know to be a rank."""

    model: str
    config: dict[str, object]
    rank: int
    address: str


def _start(seat: _Seat, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    process = subprocess.Popen([sys.executable, "-m", "worker.processes"], stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(seat) + b"\n")
    process.stdin.flush()
    return process


def _show(done: int, total: int) -> None:
    """A bar on the terminal."""
    width = 40 * done // total
    print(
        f"\rWeights [{'#' * width:<40}] {done} of {total}",
        end="\n" if done == total else "",
        file=sys.stderr,
        flush=True,
    )


def _main() -> None:
    """A rank's process. Its standard input says which, and ends with the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for that one
    seat = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Seat)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = WorkerConfig.model_validate(seat.config)
    Follower(Path(seat.model), config, seat.rank, find_store(seat.address)).run()


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _main()
