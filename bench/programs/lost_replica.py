"""Programs while a replica is killed: how many end, and how many are right.

    python -m bench.programs.lost_replica --programs 64

Starts `shoal serve` with two replicas, and runs the programs of one workload at the same time. Once a quarter of their
calls have been answered, a rank is killed (SIGKILL). Afterwards the same programs run on the whole server, and their
answers are those that are right. Greedy answers may also differ where two tokens are equally likely: `differ_anyway`
counts the programs that a third run answers otherwise.

Settings of `shoal serve` are flags.
"""

import asyncio
import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import shoal
from bench import results
from bench.load.options import count
from bench.programs.against_raw import NAMES
from bench.programs.workloads import ProgramWorkload
from bench.replica.over_http import flags as as_flags
from bench.replica.server_process import server
from bench.results import Figure
from cluster.config import Config
from shoal import flags
from shoal.help import Parser

OURS = ("model", "host", "port", "address")  # settings that this command chooses itself
LOOK_S = 0.02  # between two looks at the number of answered calls


def ranks() -> list[psutil.Process]:
    """The ranks of the server that this process has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith("ray::Rank"):
                found.append(process)
    return found


async def answers(
    workload: ProgramWorkload, arguments: Sequence[Mapping[str, Any]], backend: shoal.ShoalServer
) -> list[Any]:
    """The answers of all programs; an exception for one that has failed."""
    states = await workload.program.run_batch_async(
        arguments, backend=backend, num_threads=len(arguments), temperature=0
    )
    return [state.error() or state.ret_value for state in states]


async def measure(url: str, workload: ProgramWorkload, programs: int, words: int) -> dict[str, Any]:
    """Runs the programs three times, and kills a rank during the first. Returns what happened."""
    backend = shoal.ShoalServer(url)
    arguments = [workload.arguments(number, words) for number in range(programs)]
    await answers(workload, arguments[:1], backend)
    calls_each = backend.token_usage.calls
    backend.token_usage.reset()
    running = asyncio.create_task(answers(workload, arguments, backend))
    while backend.token_usage.calls < programs * calls_each / 4 and not running.done():
        await asyncio.sleep(LOOK_S)
    killed_at = backend.token_usage.calls
    if running.done():
        raise RuntimeError("all programs ended before a rank could be killed: use more programs")
    ranks()[0].kill()
    found = await running
    right = await answers(workload, arguments, backend)
    again = await answers(workload, arguments, backend)
    await backend.close()
    failures = [repr(answer) for answer in found if isinstance(answer, Exception)]
    return {
        "ended": programs - len(failures),
        "right": sum(one == other for one, other in zip(found, right, strict=True)),
        "differ_anyway": sum(one != other for one, other in zip(right, again, strict=True)),
        "answered_calls": killed_at,
        "calls": programs * calls_each,
        "failures": failures,
    }


def main(argv: list[str] | None = None) -> int:
    """Measures, and writes the result. Returns 1 unless all programs have ended."""
    parser = Parser("python -m bench.programs.lost_replica", description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="what the server is started with")
    parser.add_argument("--workload", choices=sorted(NAMES), default="vote", help="of the programs; vote")
    parser.add_argument("--programs", type=count, default=64, help="at the same time; 64")
    parser.add_argument("--words", type=count, default=20, help="length of shared texts; 20")
    parser.add_argument("--name", default="programs.lost_replica", help="name of the result and of its figures")
    parser.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
    flags.add(parser, Config, OURS)
    options = parser.parse_args(argv)
    settings = {"replicas": 2} | flags.given(options, Config) | {"model": options.model}
    with server(as_flags(settings)) as url:
        found = asyncio.run(measure(url, NAMES[options.workload], options.programs, options.words))
    print(
        f"{found['ended']} of {options.programs} programs ended, {found['right']} as on a whole server; "
        f"{found['differ_anyway']} differ between two whole runs. The rank was killed after {found['answered_calls']} "
        f"of {found['calls']} calls."
    )
    made = [Figure(f"{options.name}.{name}", found[name], "programs", True) for name in ("ended", "right")]
    size = {"programs": options.programs, "words": options.words, "workload": options.workload}
    results.write(options.name, made, {"size": size, "found": found}, folder=options.out)
    return 0 if found["ended"] == options.programs else 1


if __name__ == "__main__":
    sys.exit(main())
