"""Programs in the language against the same programs as plain calls of OpenAI's protocol, on the same server.

    python -m bench.programs.against_raw                       # starts `shoal serve` with one replica
    python -m bench.programs.against_raw --url http://... --programs 64 --words 1000
    python -m bench.programs.against_raw --shape llama-8b --programs 64 --workloads forks,select --singles 4
    python -m bench.programs.against_raw --shape llama-8b --programs 64 --workloads agents --kv-tokens 99000

Every workload runs in each form, in turns, with texts of its own, so that no run finds the cache of another:

language  in the language
raw       plain calls, independent ones at the same time
serial    plain calls, one after the other within a program; for workloads with forks
no_cache  plain calls whose prompts share no prefix

Figures are rates divided by each other: `NAME.WORKLOAD.vs_raw`, `.vs_serial` and `.vs_no_cache`, `NAME.median.vs_raw`,
`NAME.least.vs_raw`, `NAME.best.vs_no_cache`. With `--singles`, single requests arrive while the programs run, and
`NAME.WORKLOAD.singles.vs_raw` is their mean latency during the language's run divided by that during the plain calls'.

In the file: `agreement` is the share of programs whose answers are equal in the language and as plain calls, on the
same texts. The two cut a text into tokens differently where generated text meets constant text, so it may be below 1.
`cached` is the share of prompt tokens that the server had, by form.

The server computes a prefix once that plain calls of the same moment share. So the model's work for `forks`, `tree`,
`skeleton`, `chat` and `rag` is the same in both forms, unless the cache is too small for all programs: there, the
figures show what a call costs beyond the model. `vs_serial` compares with a client that blocks.

Settings of `shoal serve` are flags. With `--shape`, the model has random weights.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import openai

import shoal
from bench import results
from bench.load.options import count, positive
from bench.programs.raw_client import RawClient
from bench.programs.workloads import AGENTS, MANY_FORKS, WORKLOADS, ProgramWorkload, text
from bench.replica import dummy_models
from bench.replica.over_http import flags as as_flags
from bench.replica.server_process import server
from bench.results import Figure
from cluster.config import Config
from shoal import flags
from shoal.help import Parser

FORMS = ("language", "raw", "serial", "no_cache")
NAMES = WORKLOADS | {AGENTS.name: AGENTS, MANY_FORKS.name: MANY_FORKS}
PARALLEL = ("forks", "forks_16", "tree", "skeleton", "vote")  # workloads with calls that do not depend on each other
OURS = ("model", "load_format", "host", "port", "address")  # settings that this command chooses itself
SINGLE_WORDS, SINGLE_TOKENS = 80, 32  # a single request's prompt and answer


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


@contextlib.asynccontextmanager
async def singles(client: RawClient, rate: float, mark: str) -> AsyncIterator[list[float]]:
    """Single requests meanwhile, `rate` per second at even intervals, none if it is 0. At the end, the list has their
    latencies in seconds."""
    latencies: list[float] = []
    sent: set[asyncio.Task[None]] = set()

    async def ask(number: int) -> None:
        begun_s = time.perf_counter()
        await client.complete(text(f"{mark} {number}", SINGLE_WORDS), max_tokens=SINGLE_TOKENS)
        latencies.append(time.perf_counter() - begun_s)

    async def ask_all() -> None:
        number = 0
        while True:
            sent.add(asyncio.create_task(ask(number)))
            number += 1
            await asyncio.sleep(1 / rate)

    asking = asyncio.create_task(ask_all()) if rate else None
    try:
        yield latencies
    finally:
        if asking is not None:
            asking.cancel()
    await asyncio.gather(*sent)


async def measure(
    url: str,
    names: Sequence[str],
    programs: int,
    words: int,
    rounds: int,
    rate: float = 0.0,
    forms: Sequence[str] = FORMS,
    agreement: bool = True,
) -> dict[str, Any]:
    """Seconds of each form of each workload: the medians of the rounds. Also the agreement of answers, and mean
    latencies of `rate` single requests per second meanwhile."""
    backend = shoal.ShoalServer(url)
    found: dict[str, Any] = {}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=3600, max_retries=8) as http:
        model = (await http.models.list()).data[0].id
        for name in names:
            workload = NAMES[name]
            own = [form for form in forms if form != "serial" or name in PARALLEL]
            clients = {form: RawClient(http, model, form != "no_cache", form == "serial") for form in own}
            others = RawClient(http, model)
            seconds: dict[str, list[float]] = {form: [] for form in own}
            waited: dict[str, list[float]] = {form: [] for form in own}
            given = [_marked(workload.arguments(i, words), "warm") for i in range(2)]
            for form in ("language", "raw"):  # what is compiled or connected at the first call
                await run(form, workload, given, backend, others)
            backend.token_usage.reset()
            for number in range(rounds):
                for form in own if number % 2 == 0 else own[::-1]:
                    given = [_marked(workload.arguments(i, words), f"{form} {number}") for i in range(programs)]
                    async with singles(others, rate, f"{name} {form} {number}") as latencies:
                        spent, _ = await run(form, workload, given, backend, clients[form])
                    seconds[form].append(spent)
                    waited[form] += latencies
            found[name] = {form: statistics.median(values) for form, values in seconds.items()}
            found[name] |= {"seconds": seconds, "cached": _cached(backend, clients)}
            if rate:
                found[name]["singles"] = {form: statistics.fmean(values) for form, values in waited.items()}
                found[name]["singles_seconds"] = waited
            if agreement:
                _, answers = await run("language", workload, given, backend, others)
                _, raw_answers = await run("raw", workload, given, backend, others)
                found[name]["agreement"] = _equal(answers, raw_answers)
            _print(name, found[name])
    await backend.close()
    return found


def figures(prefix: str, found: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """The figures of all workloads."""
    made = []
    for name, seconds in found.items():
        for form in FORMS[1:]:
            if form in seconds:
                made.append(Figure(f"{prefix}.{name}.vs_{form}", seconds[form] / seconds["language"], "ratio", True))
        if "singles" in seconds:
            ratio = seconds["singles"]["language"] / seconds["singles"]["raw"]
            made.append(Figure(f"{prefix}.{name}.singles.vs_raw", ratio, "ratio", False))
    against_raw = [figure.value for figure in made if figure.higher_is_better and figure.name.endswith(".vs_raw")]
    against_none = [figure.value for figure in made if figure.name.endswith(".vs_no_cache")]
    return [
        *made,
        Figure(f"{prefix}.median.vs_raw", statistics.median(against_raw), "ratio", True),
        Figure(f"{prefix}.least.vs_raw", min(against_raw), "ratio", True),
        *([Figure(f"{prefix}.best.vs_no_cache", max(against_none), "ratio", True)] if against_none else []),
    ]


def _marked(arguments: dict[str, Any], mark: str) -> dict[str, Any]:
    """The arguments, with a mark in front of the text that comes first."""
    first = next(name for name, value in arguments.items() if isinstance(value, str))
    return arguments | {first: f"({mark:>12}) {arguments[first]}"}


def _equal(some: Sequence[Any], others: Sequence[Any]) -> float:
    return statistics.fmean(float(one == other) for one, other in zip(some, others, strict=True))


def _cached(backend: shoal.ShoalServer, clients: Mapping[str, RawClient]) -> dict[str, float]:
    """The share of prompt tokens that the server had, by form."""
    usages = {form: backend.token_usage if form == "language" else client for form, client in clients.items()}
    return {form: usage.cached_tokens / max(1, usage.prompt_tokens) for form, usage in usages.items()}


def _print(name: str, found: Mapping[str, Any]) -> None:
    spent = "  ".join(f"{form} {found[form]:.2f} s ({found['cached'][form]:.0%})" for form in FORMS if form in found)
    others = "".join(f"  {form} {1e3 * s:.0f} ms" for form, s in found.get("singles", {}).items())
    print(f"{name:<10} {spent}  vs_raw {found['raw'] / found['language']:.2f}", flush=True)
    if others:
        print(f"{'':<10} singles{others}", flush=True)


@contextlib.contextmanager
def _served(options: argparse.Namespace) -> Iterator[str]:
    if options.url is not None:
        yield options.url.rstrip("/")
        return
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        settings = {"replicas": 1} | flags.given(options, Config)
        if options.shape is None:
            settings["model"] = options.model
        else:
            settings["model"] = str(dummy_models.write(options.shape, Path(scratch) / options.shape))
            settings["load_format"] = "dummy"
        with server(as_flags(settings)) as url:
            yield url


def main(argv: list[str] | None = None) -> int:
    parser = Parser("python -m bench.programs.against_raw", description=__doc__)
    parser.add_argument("--url", help="a Shoal server that runs; by default one is started")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="what a server is started with")
    parser.add_argument("--shape", choices=sorted(dummy_models.SHAPES), help="instead of --model, random weights")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--forms", default=",".join(FORMS), help="default: all")
    parser.add_argument("--programs", type=count, default=8, help="programs at the same time; 8")
    parser.add_argument("--words", type=count, default=300, help="length of shared texts; 300")
    parser.add_argument("--rounds", type=count, default=3, help="runs of each form, of which the median counts; 3")
    parser.add_argument(
        "--singles", type=positive, default=0.0, metavar="RATE", help="single requests per second; none"
    )
    parser.add_argument(
        "--no-agreement", dest="agreement", action="store_false", help="do not compare answers, which takes two runs"
    )
    results.add_options(parser, "programs.cpu")
    flags.add(parser, Config, OURS)
    options = parser.parse_args(argv)
    names, forms = options.workloads.split(","), options.forms.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no workload {unknown[0]!r}; there are {', '.join(NAMES)}")
    if not {"language", "raw"} <= set(forms) <= set(FORMS):
        parser.error(f"--forms {options.forms}: language and raw are needed, serial and no_cache can be added")
    with _served(options) as url:
        size = options.programs, options.words, options.rounds
        found = asyncio.run(measure(url, names, *size, options.singles, forms, options.agreement))
    settings = {key: str(value) for key, value in flags.given(options, Config).items()}
    size_of = {"programs": options.programs, "words": options.words, "rounds": options.rounds}
    raw = {"size": size_of, "settings": settings, "workloads": found}
    results.publish(options.name, figures(options.name, found), raw, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
