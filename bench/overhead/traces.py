"""The cost of traces: a router that traces every request, and the same without, in turns.

    shoal bench traces                 # 48 streams on 4 replicas with steps of 2 ms: more than a router can send
    shoal bench traces --rounds 1

No GPU is needed. The router, the replicas and the receiver of the traces are processes of their own; the replicas
compute nothing (`bench.overhead.paced_replicas`) and are quicker than a router, so the router's work decides. The
router has two addresses, and traces what comes to one of them: two processes would differ by more than the traces cost.
Figures:

operate.trace.throughput  tokens a second with traces, divided by those without; median of the rounds
operate.trace.cpu         CPU seconds of the router for a token with traces, divided by those without
operate.trace.error       by how much the sum of a request's spans differs from the time that its client measures, as a
                          part of that time; median of requests that come when neither has to wait for the other
"""

import asyncio
import itertools
import statistics
import sys
import time
from dataclasses import dataclass

import msgspec
import uvloop

from bench import results
from bench.load.http import Http
from bench.load.options import count, positive
from bench.overhead.command import END, MODEL, OUTPUT_TOKENS, child, cpu_s, prompt
from bench.replica import dummy_models
from bench.replica.server_process import ServerFailed, sigterm_raises
from bench.results import Figure
from shoal.help import Parser

FEW_STREAMS = 2
WAIT_S = 30.0  # for the last spans


class NamedHttp(Http):
    """An HTTP client whose requests have ids. `name`: the next one's."""

    name = ""

    def request(self, method: str, path: str, body: bytes) -> bytes:
        named = f"X-Request-Id: {self.name}\r\nAccept: ".encode()
        return super().request(method, path, body).replace(b"Accept: ", named, 1)


@dataclass(frozen=True)
class LoadOnRouter:
    """A load on one router: its tokens a second, its CPU seconds for a token, and the times of the requests by id."""

    tokens_s: float
    cpu_s: float
    spent_s: dict[str, float]


async def load(url: str, pid: int, streams: int, requests: int, numbers: "itertools.count[int]") -> LoadOnRouter:
    """Runs `streams` streams at once, each of `requests` requests, with prompts of the next `numbers`."""
    http = NamedHttp(url)
    spent_s: dict[str, float] = {}

    async def follow() -> int:
        events = 0

        def on_data(piece: bytes, status: int, now_s: float) -> None:
            nonlocal events
            events += piece.count(END)

        for _ in range(requests):
            number = next(numbers)
            body = {"model": MODEL, "prompt": prompt(number), "max_tokens": OUTPUT_TOKENS, "stream": True}
            sent = msgspec.json.encode(body | {"ignore_eos": True, "temperature": 0})
            begun_s = time.perf_counter()
            http.name = name = f"n{number}"
            if (status := await http.send("POST", "/v1/completions", sent, on_data)) != 200:
                raise ServerFailed(f"the router answered {status}")
            spent_s[name] = time.perf_counter() - begun_s
        return events

    try:
        before_s, begun_s = cpu_s(pid), time.perf_counter()
        await asyncio.gather(*(follow() for _ in range(streams)))
        took_s, used_s = time.perf_counter() - begun_s, cpu_s(pid) - before_s
    finally:
        http.close()
    tokens = streams * requests * OUTPUT_TOKENS
    return LoadOnRouter(tokens / took_s, used_s / tokens, spent_s)


async def told(receiver: str, wanted: set[str]) -> dict[str, float]:
    """The sums of the spans of these requests, once the receiver has all. Raises ServerFailed."""
    http = Http(receiver)
    until_s = time.monotonic() + WAIT_S
    try:
        while True:
            _, sums = await http.get("/")
            if wanted <= sums.keys():
                return {name: float(sums[name]) for name in wanted}
            if time.monotonic() > until_s:
                raise ServerFailed(f"{len(wanted - sums.keys())} of {len(wanted)} traces did not come")
            await asyncio.sleep(0.5)
    finally:
        http.close()


def parser() -> Parser:
    p = Parser("shoal bench traces", __doc__)
    p.add_argument("--streams", type=count, default=48, metavar="N", help="streams at once (default 48)")
    p.add_argument("--requests", type=count, default=2, metavar="N", help="requests of each in a round (default 2)")
    p.add_argument("--replicas", type=count, default=4, metavar="N", help="replicas (default 4)")
    p.add_argument("--step-ms", type=positive, default=2.0, metavar="MS", help="their steps (default 2)")
    p.add_argument(
        "--rounds", type=count, default=20, help="counted rounds, after one that does not count (default 20)"
    )
    results.add_options(p, "operate.trace")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    router = "bench.overhead.router_process"
    with dummy_models.written(MODEL) as folder:
        try:
            with (
                sigterm_raises(),
                child("bench.overhead.paced_replicas", str(args.replicas), str(args.step_ms / 1000)) as (_, replicas),
                child("bench.overhead.span_receiver") as (_, receiver),
                child(router, str(folder), *replicas.split(), receiver) as (pid, urls),
            ):
                figures, raw = uvloop.run(
                    _measure(pid, urls.split(), receiver, args.streams, args.requests, args.rounds)
                )
        except ServerFailed as error:
            print(f"shoal bench traces: {error}", file=sys.stderr)
            return 1
    settings = {name: getattr(args, name) for name in ("streams", "requests", "replicas", "step_ms", "rounds")}
    results.publish(args.name, figures, settings | raw, args.out)
    return 0


async def _measure(
    pid: int, urls: list[str], receiver: str, streams: int, requests: int, rounds: int
) -> tuple[list[Figure], dict[str, float]]:
    numbers = itertools.count()
    plain, tracing = urls
    pairs = list[tuple[LoadOnRouter, LoadOnRouter]]()
    for number in range(-1, rounds):
        found = {}
        # Each goes first in half of the rounds: what the machine does besides changes slowly.
        for url in (plain, tracing) if number % 2 else (tracing, plain):
            found[url] = await load(url, pid, streams, requests, numbers)
        if number >= 0:
            pairs.append((found[plain], found[tracing]))
    spent_s = (await load(tracing, pid, FEW_STREAMS, rounds, numbers)).spent_s
    sums_s = await told(receiver, set(spent_s))
    errors = [abs(sums_s[name] - spent) / spent for name, spent in spent_s.items()]
    base = "operate.trace"
    throughput = statistics.median(traced.tokens_s / other.tokens_s for other, traced in pairs)
    cpu = statistics.median(traced.cpu_s / other.cpu_s for other, traced in pairs)
    figures = [
        Figure(f"{base}.throughput", throughput, "ratio", True),
        Figure(f"{base}.cpu", cpu, "ratio", False),
        Figure(f"{base}.error", statistics.median(errors), "ratio", False),
    ]
    raw = {
        "tokens_per_s": statistics.median(other.tokens_s for other, _ in pairs),
        "largest_error": max(errors),
        "lowest_throughput": min(traced.tokens_s / other.tokens_s for other, traced in pairs),
        "highest_throughput": max(traced.tokens_s / other.tokens_s for other, traced in pairs),
    }
    return figures, raw


if __name__ == "__main__":
    sys.exit(main())
