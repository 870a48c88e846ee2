"""A job through the whole of `shoal serve`: token-id prompts to /v1/completions, every answer streamed."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench import metrics, processes
from bench.child import ServerFailed, server
from bench.client import Abilities, Endpoint
from bench.http import Http
from bench.jobs import HIGHEST_ID, Job
from bench.load import Load
from bench.workload import Session, Span, Turn, Vocabulary

TIMEOUT_S = 600.0
AT_ONCE = 1024  # as good as all: the engine beside it is given the whole job at once


@dataclass(frozen=True)
class Given(Vocabulary):
    """Prompts that are there already: the key of a span is the number of its prompt."""

    prompts: tuple[list[int], ...] = ()

    def ids(self, spans: Sequence[Span]) -> list[int]:
        return [token for span in spans for token in self.prompts[span.key[0]]]


def flags(settings: Mapping[str, Any]) -> list[str]:
    """Settings as arguments of `shoal serve`."""
    made: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        made += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return made


def measure(folder: Path, settings: Mapping[str, Any], job: Job, warm_rounds: int, rounds: int) -> dict[str, Any]:
    """Starts a server for the model in `folder`, puts the job on it `warm_rounds` and then `rounds` times, and ends it.
    Returns what `load` returns. Raises ServerFailed also if the server does not start.
    """
    with server(["--model", str(folder), *flags(settings)]) as url:
        return load(url, folder.name, job, warm_rounds, rounds)


def load(url: str, model: str, job: Job, warm_rounds: int, rounds: int) -> dict[str, Any]:
    """Puts the job on a server. Returns `output_tok_s`, the median, and the summary of every round that counts, with
    the seconds of CPU that the processes of each role took (`cpu_s`), as far as this process has started them.

    Each round has other tokens, of the same lengths: a server keeps its cache. Raises ServerFailed if an answer is
    missing or short.
    """
    summaries = []
    for number in range(-warm_rounds, rounds):
        before = processes.cpu_s()
        summary = uvloop.run(_round(url, model, shifted(job, number)))
        summaries.append(summary | {"cpu_s": processes.since(before)})
    counted = summaries[warm_rounds:]
    rate = statistics.median(summary["output_tokens_per_s"] for summary in counted)
    return {"output_tok_s": rate, "rounds": counted}


def cpu_us_per_token(measured: Mapping[str, Any]) -> dict[str, float]:
    """Of what `load` returned: microseconds of CPU for each token of output, by role."""
    rounds = measured["rounds"]
    tokens = sum(summary["output_tokens"] for summary in rounds)
    roles = {role for summary in rounds for role in summary["cpu_s"]}
    return {role: sum(summary["cpu_s"].get(role, 0.0) for summary in rounds) / tokens * 1e6 for role in sorted(roles)}


def shifted(job: Job, number: int) -> Job:
    """The job with every token's id moved on by `number`, around the end; of round 0, the job itself."""
    return [[(token + number) % (HIGHEST_ID + 1) for token in prompt] for prompt in job[0]], job[1]


def line(measured: Mapping[str, Any]) -> str:
    """What `load` returned, for a terminal."""
    spent = ", ".join(f"{role} {each:.1f}" for role, each in cpu_us_per_token(measured).items())
    return f"{measured['output_tok_s']:8.0f} tokens/s; us of CPU a token: {spent}"


async def _round(url: str, model: str, job: Job) -> dict[str, Any]:
    sessions = [
        Session((Turn((Span((i,), len(prompt)),), length),))
        for i, (prompt, length) in enumerate(zip(*job, strict=True))
    ]
    http = Http(url)
    endpoint = Endpoint(False, model, {}, Abilities(chunk_usage=False))
    load = Load(sessions, http, endpoint, Given(prompts=tuple(job[0])), TIMEOUT_S)
    try:
        await load.run(AT_ONCE)
    finally:
        http.close()
    await asyncio.sleep(0)  # lets the closed connections go
    summary = metrics.summarise(load.samples)
    if summary["failures"]:
        first = next(sample for sample in load.samples if sample.error is not None)
        raise ServerFailed(f"{sum(summary['failures'].values())} requests failed: {first.error}: {first.message}")
    if summary["short_answers"]:
        raise ServerFailed(f"{summary['short_answers']} answers are shorter than asked for")
    return summary
