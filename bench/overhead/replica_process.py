"""A replica as a process of its own, without Ray.

    python -m bench.overhead.replica_process FOLDER SETTINGS   # settings as JSON; prints its address, runs on

All of the replica is real: one rank, with the scheduler, the device and the ZeroMQ socket.
"""

import json
import sys
from pathlib import Path

from bench.secret import SECRET
from cluster.config import load
from cluster.replica_server import open_server

HOST = "127.0.0.1"


def run(folder: Path, settings: str) -> None:
    """Serves the model in `folder` until the process ends."""
    config = load(overrides={"model": str(folder), "load_format": "dummy", **json.loads(settings)})
    server = open_server(folder, config.deployments[0], HOST, SECRET)
    server.warm_up()
    print(server.address, flush=True)
    server.run()


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
