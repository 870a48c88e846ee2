"""Memory and CPU of thousands of states at once in one client process.

    python -m bench.programs.states --states 10000

Each state is a run of a program with two calls. The endpoint is another process, without a model. It holds the first
calls back until those of all states have come, so that all states live at the same time.

| figure | meaning |
| --- | --- |
| `programs.states.memory_kb` | most memory of this process, above that before the run, divided by the states |
| `programs.states.cpu_ms` | CPU time of this process divided by the states |
| `programs.states.wrong` | states that have failed, or have another state's answer |

Memory is that of the whole client: the state, its tasks, its connection and its buffers.
"""

import asyncio
import gc
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

import shoal
from bench.load.options import count
from bench.programs.gated_endpoint import allow_connections
from bench.results import FOLDER, Figure, write
from shoal.help import Parser

SAMPLE_S = 0.1  # between two looks at the memory


@shoal.function
def two_calls(s: Any, number: int) -> None:
    s += f"Question {number}: how does it go on?\nAnswer:" + shoal.gen("first", max_tokens=4)
    s += "\nIn other words:" + shoal.gen("second", max_tokens=4)


@contextmanager
def _endpoint(states: int) -> Iterator[str]:
    command = [sys.executable, "-m", "bench.programs.gated_endpoint", str(states)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            port = child.stdout.readline().strip()
            if not port:
                raise RuntimeError("the endpoint did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            child.terminate()


async def _run(url: str, states: int) -> dict[str, float]:
    """Runs all states at once. Returns what it took."""
    backend = shoal.ShoalServer(url)
    process = psutil.Process()
    gc.collect()
    before = most = process.memory_info().rss
    cpu_s, begun_s = time.process_time(), time.perf_counter()

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(SAMPLE_S)

    watching = asyncio.create_task(watch())
    given = [{"number": number} for number in range(states)]
    ended = await two_calls.run_batch_async(given, backend=backend, num_threads=states)
    most = max(most, process.memory_info().rss)
    spent_s, elapsed_s = time.process_time() - cpu_s, time.perf_counter() - begun_s
    watching.cancel()
    await backend.close()
    right = [state.error() is None and state["first"] == state["second"] == state.run.id for state in ended]
    return {
        "memory_kb": (most - before) / states / 1000,
        "cpu_ms": 1e3 * spent_s / states,
        "wrong": right.count(False),
        "seconds": elapsed_s,
    }


def main(argv: list[str] | None = None) -> int:
    """Measures, and writes the result. Returns 1 if a state was wrong."""
    parser = Parser("python -m bench.programs.states", description=__doc__)
    parser.add_argument("--states", type=count, default=10_000, help="at the same time; 10000")
    parser.add_argument("--name", default="programs.states", help="name of the result and of its figures")
    parser.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: bench/results")
    options = parser.parse_args(argv)
    try:
        allow_connections(options.states)
    except ValueError as error:
        parser.error(str(error))
    with _endpoint(options.states) as url:
        found = asyncio.run(_run(url, options.states))
    print(", ".join(f"{name} {value:.3g}" for name, value in found.items()))
    units = {"memory_kb": "kB", "cpu_ms": "ms", "wrong": "states"}
    made = [Figure(f"{options.name}.{name}", found[name], unit, False) for name, unit in units.items()]
    write(options.name, made, {"states": options.states, "found": found}, folder=options.out)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
