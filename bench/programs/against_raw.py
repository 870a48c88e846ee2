"""Programs in the language against the same programs as plain calls of OpenAI's protocol, on the same server.

    python -m bench.programs.against_raw                       # starts `shoal serve` with one replica
    python -m bench.programs.against_raw --url http://... --programs 64 --words 1000

Every workload runs three times, in turns, each with texts of its own, so that no run finds the cache of another:

language  in the language
raw       plain calls, independent ones at the same time
no_cache  plain calls whose prompts share no prefix

Figures are rates divided by each other: `NAME.WORKLOAD.vs_raw` and `NAME.WORKLOAD.vs_no_cache`, `NAME.median.vs_raw`,
`NAME.least.vs_raw`, `NAME.best.vs_no_cache`. `agreement` (in the file) is the share of programs whose answers are equal
in the language and as plain calls, on the same texts. The two cut a text into tokens differently where generated text
meets constant text, so it may be below 1.
"""

import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import openai

import shoal
from bench import results
from bench.load.options import count
from bench.programs.raw_client import RawClient
from bench.programs.workloads import WORKLOADS, ProgramWorkload
from bench.replica.server_process import server
from bench.results import Figure
from shoal.help import Parser

FORMS = ("language", "raw", "no_cache")


async def run(
    form: str, workload: ProgramWorkload, arguments: Sequence[Mapping[str, Any]], backend: Any, client: RawClient
) -> tuple[float, list[Any]]:
    """Runs all programs at the same time. Returns seconds and the programs' answers."""
    begun_s = time.perf_counter()
    if form == "language":
        states = await workload.program.compile().run_batch_async(
            arguments, backend=backend, num_threads=len(arguments), temperature=0
        )
        answers = [state.ret_value for state in states]
        for state in states:
            if (error := state.run.error) is not None:
                raise error
    else:
        answers = await asyncio.gather(*(workload.raw(client, **given) for given in arguments))
    return time.perf_counter() - begun_s, answers


async def measure(url: str, names: Sequence[str], programs: int, words: int, rounds: int) -> dict[str, Any]:
    """Seconds of each form of each workload, the medians of the rounds, and the agreement of answers."""
    backend = shoal.ShoalServer(url)
    found: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=8) as http:
        model = (await http.models.list()).data[0].id
        clients = {form: RawClient(http, model, cached=form != "no_cache") for form in FORMS}
        for name in names:
            workload = WORKLOADS[name]
            seconds: dict[str, list[float]] = {form: [] for form in FORMS}
            for number in range(rounds):
                for form in FORMS if number % 2 == 0 else FORMS[::-1]:
                    given = [_marked(workload.arguments(i, words), f"{form} {number}") for i in range(programs)]
                    spent, _ = await run(form, workload, given, backend, clients[form])
                    seconds[form].append(spent)
            _, answers = await run("language", workload, given, backend, clients["raw"])
            _, raw_answers = await run("raw", workload, given, backend, clients["raw"])
            found[name] = {form: statistics.median(values) for form, values in seconds.items()}
            found[name] |= {"seconds": seconds, "agreement": _equal(answers, raw_answers)}
            _print(name, found[name])
    await backend.close()
    return found


def figures(prefix: str, found: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The figures of all workloads."""
    made = []
    for name, seconds in found.items():
        made.append(Figure(f"{prefix}.{name}.vs_raw", seconds["raw"] / seconds["language"], "ratio", True))
        made.append(Figure(f"{prefix}.{name}.vs_no_cache", seconds["no_cache"] / seconds["language"], "ratio", True))
    against_raw = [figure.value for figure in made if figure.name.endswith(".vs_raw")]
    against_none = [figure.value for figure in made if figure.name.endswith(".vs_no_cache")]
    return [
        *made,
        Figure(f"{prefix}.median.vs_raw", statistics.median(against_raw), "ratio", True),
        Figure(f"{prefix}.least.vs_raw", min(against_raw), "ratio", True),
        Figure(f"{prefix}.best.vs_no_cache", max(against_none), "ratio", True),
    ]


def _marked(arguments: dict[str, Any], mark: str) -> dict[str, Any]:
    """The arguments, with a mark in front of the text that comes first."""
    first = next(name for name, value in arguments.items() if isinstance(value, str))
    return arguments | {first: f"({mark:>12}) {arguments[first]}"}


def _equal(some: Sequence[Any], others: Sequence[Any]) -> float:
    return statistics.fmean(float(one == other) for one, other in zip(some, others, strict=True))


def _print(name: str, found: Mapping[str, Any]) -> None:
    spent = "  ".join(f"{form} {found[form]:7.2f} s" for form in FORMS)
    print(f"{name:<10} {spent}  vs_raw {found['raw'] / found['language']:.2f}", flush=True)


@contextlib.contextmanager
def _served(url: str | None, model: str) -> Iterator[str]:
    if url is not None:
        yield url.rstrip("/")
    else:
        with server([model, "--replicas", "1"]) as own:
            yield own


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m bench.programs.against_raw", description=__doc__)
    parser.add_argument("--url", help="a Shoal server that runs; by default one is started")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="what a server is started with")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, with commas between them")
    parser.add_argument("--programs", type=count, default=8, help="programs at the same time; 8")
    parser.add_argument("--words", type=count, default=300, help="length of shared texts; 300")
    parser.add_argument("--rounds", type=count, default=3, help="runs of each form, of which the median counts; 3")
    parser.add_argument("--name", default="programs.cpu", help="name of the result and of its figures")
    options = parser.parse_args(argv)
    names = options.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(WORKLOADS)}")
    with _served(options.url, options.model) as url:
        found = asyncio.run(measure(url, names, options.programs, options.words, options.rounds))
    made = figures(options.name, found)
    for figure in made[-3:]:
        print(f"{figure.name} {figure.value:.3f}")
    results.write(options.name, made, {"workloads": found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
