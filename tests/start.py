"""How long `make serve` takes until the server answers: alone, and beside a foreign load of two busy processes a core.

    python -m tests.start --out FILE

Starts alternate, so that what else changes on the machine meets both alike. The figure is the ratio of their medians.
"""

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from tests.deploy.rehearsal import ROOT, until

BUSY_A_CORE = 2


@contextlib.contextmanager
def foreign_load(processes: int) -> Iterator[None]:
    # In sessions of their own: Linux shares cores among sessions first, and the server has many.
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command, start_new_session=True) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def start_s() -> float:
    """Seconds until a server of the default model is ready. Ends the server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.monotonic()
    command = ["make", "serve", f"ARGS=--port {port}"]
    # A group of its own: `make` hands no SIGINT on to what it runs, as a terminal does.
    server = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200, "the server is ready")
        return time.monotonic() - began
    finally:
        os.killpg(server.pid, signal.SIGINT)
        server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=3, help="of each kind")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    alone, beside = [], []
    for _ in range(args.starts):
        alone.append(start_s())
        with foreign_load(BUSY_A_CORE * (os.cpu_count() or 1)):
            beside.append(start_s())
    ratio = statistics.median(beside) / statistics.median(alone)
    text = json.dumps({"alone_s": alone, "beside_s": beside, "ratio": ratio}, indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
