"""Starts the ranks of a replica as processes of this machine. They end when the process that started them ends."""

import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from worker.config import WorkerConfig
from worker.executor.executor import Executor
from worker.executor.gpu_defaults import resolve_device
from worker.executor.model_runner import ModelRunner
from worker.executor.multi_rank import Follower, MultiRankExecutor, end, other_ranks
from worker.executor.weight_loader import Progress
from worker.niceness import run_steps
from worker.parallel.meeting import Meeting
from worker.parallel.rank_store import find_store, open_store
from worker.spinning import limit_spinning

# The machine's name for NCCL, which refuses two ranks on one GPU unless they seem to be on different machines.
_MACHINE = "NCCL_HOSTID"


def open_executor(
    model: Path,
    config: WorkerConfig,
    progress: Progress | None = None,
    share_gpus: bool = False,
    gemm_folder: Path | None = None,
) -> Executor:
    """Opens the executor of a replica on this machine: a `ModelRunner` for one rank, else `launch` with all ranks,
    without `gemm_folder`."""
    if progress is None and sys.stderr.isatty():
        progress = _show
    if config.num_ranks == 1:
        return ModelRunner.load(model, config, progress, gemm_folder=gemm_folder)
    return launch(model, config, progress, share_gpus)


def launch(
    model: Path, config: WorkerConfig, progress: Progress | None = None, share_gpus: bool = False
) -> MultiRankExecutor:
    """Makes this process the leading rank, and starts one process for each other rank on this machine. They end when
    this process ends. With `share_gpus`, for tests, there may be more ranks than GPUs: ranks on one GPU take turns.
    Raises ValueError if there are too few GPUs, and the exceptions of `MultiRankExecutor`."""
    device, _ = resolve_device(config)
    ranks = config.num_ranks
    gpus = torch.cuda.device_count()
    if shared := device.type == "cuda" and gpus < ranks:
        if not share_gpus:
            raise ValueError(f"tp={config.tp}, pp={config.pp}, but this machine has {gpus} GPUs")
        os.environ[_MACHINE] = f"rank {config.leading_rank}"
    if device.type == "cpu" and config.cpu_threads is None:
        config = config.model_copy(update={"cpu_threads": max(1, (os.cpu_count() or 1) // ranks)})
    store, meeting = open_store()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in other_ranks(config):
            spec = _RankSpec(str(model), config.model_dump(mode="json"), rank, meeting)
            processes.append(_start(spec, {_MACHINE: f"rank {rank}"} if shared else {}))
    except BaseException:
        for process in processes:
            end(process, 0)
        raise
    return MultiRankExecutor(model, config, store, progress=progress, processes=processes)


class _RankSpec(msgspec.Struct):
    """All that a new process needs to become a rank: model folder, configuration, rank, where the ranks meet."""

    model: str
    config: dict[str, object]
    rank: int
    meeting: Meeting


def _start(spec: _RankSpec, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = {**os.environ, "PYTHONPATH": paths, **environment}
    limit_spinning(environment)
    process = subprocess.Popen([sys.executable, "-m", "worker.executor.launch"], stdin=subprocess.PIPE, env=environment)
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already: `MultiRankExecutor` looks at its status
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        process.stdin.flush()
    return process


def _show(done: int, total: int) -> None:
    """Prints a progress bar on the terminal."""
    width = 40 * done // total
    print(
        f"\rWeights [{'#' * width:<40}] {done} of {total}",
        end="\n" if done == total else "",
        file=sys.stderr,
        flush=True,
    )


def _main() -> None:
    """Runs a follower. Its `_RankSpec` comes by standard input, which closes when the process that started it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one handles Ctrl-C
    spec = msgspec.json.decode(sys.stdin.buffer.readline(), type=_RankSpec)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    config = WorkerConfig.model_validate(spec.config)
    follower = Follower(Path(spec.model), config, spec.rank, find_store(spec.meeting))
    run_steps(follower.run, follower.device)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _main()
