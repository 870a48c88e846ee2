"""Speed of the links between pipeline stages: how fast activations pass from one process to another.

`measure` starts the two ends of a link as processes, which read from standard input where they meet:

    python -m bench.replica.link_speed RANK DEVICE
"""

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    import torch

    from worker.parallel.communicator import Communicator
    from worker.parallel.rank_store import Meeting

SIZES = (16 << 10, 256 << 10, 1 << 20, 16 << 20)  # bytes, from those of a few decodes to those of a large chunk
ROUNDS = 12
TIMEOUT_S = 120.0
# NCCL settings that leave sockets as the only transport, which stand for Ethernet between nodes. The chunk sizes are
# those that NCCL uses between machines.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket"}
SOCKETS |= dict.fromkeys(("NCCL_P2P_NVL_CHUNKSIZE", "NCCL_P2P_PCI_CHUNKSIZE"), str(1 << 20))


@dataclass(frozen=True)
class Speed:
    """Speed of a link: `seconds` of a transfer by its number of bytes, and the line fitted through them."""

    seconds: dict[int, float]
    latency_s: float
    bytes_per_s: float


def fit(seconds: dict[int, float]) -> Speed:
    """Fits a line: bandwidth from the difference between the largest and the smallest message, latency from the
    smallest."""
    small, large = min(seconds), max(seconds)
    rate = (large - small) / max(seconds[large] - seconds[small], 1e-12)
    return Speed(seconds, max(0.0, seconds[small] - small / rate), rate)


def measure(device: str) -> Speed:
    """Measures the link between two new processes on this machine, each on a GPU of its own if `device` is "cuda".
    Raises RuntimeError if the processes fail or do not end in time."""
    from worker.parallel.rank_store import open_store

    store, meeting = open_store()
    command = [sys.executable, "-m", "bench.replica.link_speed"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    ends = [
        subprocess.Popen([*command, str(rank), device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        for rank in (0, 1)
    ]
    try:
        for end in ends:
            assert end.stdin is not None
            end.stdin.write(msgspec.json.encode(meeting) + b"\n")
            end.stdin.flush()
        said = [end.communicate(timeout=TIMEOUT_S)[0] for end in ends]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the two ends of a link did not end within {TIMEOUT_S:g} s") from None
    finally:
        for end in ends:
            end.kill()
            end.wait()
        del store
    if any(end.returncode for end in ends):
        raise RuntimeError("the two ends of a link did not meet")
    return fit({int(size): seconds for size, seconds in json.loads(said[0].splitlines()[-1]).items()})


def one_end(rank: int, meeting: "Meeting", device: str) -> dict[int, float]:
    """Seconds of half a round trip (median of ROUNDS) for each of SIZES. Both ranks, 0 and 1, must call this."""
    import torch

    from worker.parallel.communicator import Communicator
    from worker.parallel.rank_store import find_store

    place = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
        Communicator.set_nccl_buffers()
    store = find_store(meeting)
    there, back = (
        Communicator.pair(store, end, place, TIMEOUT_S, name) for end, name in ((rank, "there"), (1 - rank, "back"))
    )
    found = {}
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=place)
        times = [_round_trip(there, back, rank, x) for _ in range(ROUNDS + 3)]
        found[size] = statistics.median(times[3:]) / 2
    there.close()
    back.close()
    return found


def _round_trip(there: "Communicator", back: "Communicator", rank: int, x: "torch.Tensor") -> float:
    """Seconds of a round trip of `x`. In each pair, rank 0 sends. In the pair `back`, the two ends have swapped
    ranks."""
    import torch

    begin = time.perf_counter()
    if rank == 0:
        there.begin_send(x, 1).wait()
        back.begin_receive(x, 0).wait()
    else:
        there.begin_receive(x, 0).wait()
        back.begin_send(x, 1).wait()
    if x.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


if __name__ == "__main__":
    from worker.parallel.rank_store import Meeting

    met = msgspec.json.decode(sys.stdin.buffer.readline(), type=Meeting)
    print(json.dumps(one_end(int(sys.argv[1]), met, sys.argv[2])), flush=True)
