"""A job through `shoal serve`: prompts of token ids to /v1/completions, with streamed answers."""

import asyncio
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from bench.load import metrics
from bench.load.client import Abilities, Endpoint
from bench.load.http import Http
from bench.load.load import LoadRun
from bench.load.workload import ConversationTurn, Session, TokenSpan, Vocabulary
from bench.replica import cpu_usage
from bench.replica.offline_workloads import MAX_TOKEN_ID, Job
from bench.replica.server_process import ServerFailed, server

TIMEOUT_S = 600.0
AT_ONCE = 1024  # practically all, as an engine without a server gets the whole job at once


@dataclass(frozen=True)
class Given(Vocabulary):
    """A vocabulary of given prompts. The key of a span is the index of its prompt."""

    prompts: tuple[list[int], ...] = ()

    def ids(self, spans: Sequence[TokenSpan]) -> list[int]:
        return [token for span in spans for token in self.prompts[span.key[0]]]


def flags(settings: Mapping[str, Any]) -> list[str]:
    """The arguments of `shoal serve` for these settings."""
    made: list[str] = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        made += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return made


def measure(folder: Path, settings: Mapping[str, Any], job: Job, warm_rounds: int, rounds: int) -> dict[str, Any]:
    """Starts a server for the model in `folder`, runs `load` on it, and ends it. Returns the result of `load`. Raises
    ServerFailed, also if the server does not start.
    """
    with server(["--model", str(folder), *flags(settings)]) as url:
        return load(url, folder.name, job, warm_rounds, rounds)


def load(url: str, model: str, job: Job, warm_rounds: int, rounds: int) -> dict[str, Any]:
    """Puts the job on a server, `warm_rounds` times without counting and then `rounds` times. Returns:

    | key | meaning |
    | --- | --- |
    | `output_tok_s` | output tokens per second, the median of the rounds |
    | `rounds` | the summary of every counted round |
    | `cpu_s`, in a summary | CPU seconds by role, of this process and its descendants |

    The tokens differ from round to round, since a server keeps its cache; the lengths stay. Raises ServerFailed if an
    answer is missing or short.
    """
    summaries = []
    for number in range(-warm_rounds, rounds):
        before = cpu_usage.cpu_s()
        summary = uvloop.run(_round(url, model, shifted(job, number)))
        summaries.append(summary | {"cpu_s": cpu_usage.since(before)})
    counted = summaries[warm_rounds:]
    rate = statistics.median(summary["output_tokens_per_s"] for summary in counted)
    return {"output_tok_s": rate, "rounds": counted}


def cpu_us_per_token(measured: Mapping[str, Any]) -> dict[str, float]:
    """Microseconds of CPU per output token, by role. `measured` is a result of `load`."""
    rounds = measured["rounds"]
    tokens = sum(summary["output_tokens"] for summary in rounds)
    roles = {role for summary in rounds for role in summary["cpu_s"]}
    return {role: sum(summary["cpu_s"].get(role, 0.0) for summary in rounds) / tokens * 1e6 for role in sorted(roles)}


def shifted(job: Job, number: int) -> Job:
    """The job with `number` added to every token id, modulo the number of ids. Round 0 has the job itself."""
    return [[(token + number) % (MAX_TOKEN_ID + 1) for token in prompt] for prompt in job[0]], job[1]


def line(measured: Mapping[str, Any]) -> str:
    """A line for the terminal about a result of `load`."""
    spent = ", ".join(f"{role} {each:.1f}" for role, each in cpu_us_per_token(measured).items())
    return f"{measured['output_tok_s']:8.0f} tokens/s; us of CPU a token: {spent}"


async def _round(url: str, model: str, job: Job) -> dict[str, Any]:
    sessions = [
        Session((ConversationTurn((TokenSpan((i,), len(prompt)),), length),))
        for i, (prompt, length) in enumerate(zip(*job, strict=True))
    ]
    http = Http(url)
    endpoint = Endpoint(False, model, {}, Abilities(chunk_usage=False))
    load = LoadRun(sessions, http, endpoint, Given(prompts=tuple(job[0])), TIMEOUT_S)
    try:
        await load.run(AT_ONCE)
    finally:
        http.close()
    await asyncio.sleep(0)  # lets the event loop finish closing the connections
    summary = metrics.summarise(load.samples)
    if summary["failures"]:
        first = next(sample for sample in load.samples if sample.error is not None)
        raise ServerFailed(f"{sum(summary['failures'].values())} requests failed: {first.error}: {first.message}")
    if summary["short_answers"]:
        raise ServerFailed(f"{summary['short_answers']} answers are shorter than asked for")
    return summary
