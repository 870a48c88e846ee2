"""The cost of a router: its CPU time for a token, what it adds to the time to the first token, and a bystander.

    shoal bench overhead              # 256 streams on 4 replicas with steps of 25 ms: 10,240 tokens a second
    shoal bench overhead --streams 64 --rounds 1

No GPU is needed. The router is a process of its own and all of it is real (`bench.overhead.router_process`), down to
the ZeroMQ messages. The replicas compute nothing (`bench.overhead.paced_replicas`). Figures:

cores_per_100k_tok_s   CPU seconds of the router for 100,000 tokens, all of their requests' work with them
ttft_ms                median time to the first token through the router, less that of a client that speaks ZeroMQ with
                       the replica, one request after the other, in turns
bystander.ttft_p99_ms  of short requests that come one after the other during the load: time to the first token
bystander.tbt_p99_ms   and time between tokens, less the replicas' step

Each event of a stream has one token where the router keeps up; the number of tokens per event is printed. Where other
programs have the cores, there are more, and a token costs less than it would.
"""

import asyncio
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import psutil
import uvloop
import zmq
import zmq.asyncio

from bench import results
from bench.load.http import Http
from bench.load.options import count, positive
from bench.replica import dummy_models
from bench.replica.server_process import ServerFailed, end, sigterm_raises
from bench.results import Figure
from bench.secret import SECRET
from shoal.help import Parser
from worker.curve import REPLICA, Curve
from worker.messages import Generate, Outputs, SamplingParams, decode_from_replica, encode

MODEL = "tiny"
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 256
BYSTANDER_TOKENS = 20
FIRST_ID, NUM_IDS = 300, 9000  # of prompts
END = b"\n\n"  # of an event


@dataclass
class Told:
    """The events of an answer: when they came, in seconds, and how many."""

    begun_s: float = 0.0
    at_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.at_s[0] - self.begun_s


class HttpClient:
    """Sends requests for completions to the router."""

    def __init__(self, url: str) -> None:
        self._http = Http(url)

    async def stream(self, number: int, output_tokens: int) -> Told:
        """An answer to the prompt `number`. Raises ServerFailed."""
        told = Told()

        def on_data(piece: bytes, status: int, now_s: float) -> None:
            told.at_s += [now_s] * piece.count(END)

        body = {"model": MODEL, "prompt": prompt(number), "max_tokens": output_tokens, "stream": True}
        sent = msgspec.json.encode(body | {"ignore_eos": True, "temperature": 0})
        told.begun_s = time.perf_counter()
        status = await self._http.send("POST", "/v1/completions", sent, on_data)
        if status != 200:
            raise ServerFailed(f"the router answered {status}")
        told.at_s.pop()  # [DONE]
        return told

    def close(self) -> None:
        self._http.close()


def prompt(number: int) -> list[int]:
    """A prompt that no other number has."""
    own = [FIRST_ID + number % NUM_IDS, FIRST_ID + number // NUM_IDS]
    return own + [FIRST_ID + place for place in range(PROMPT_TOKENS - len(own))]


@contextlib.contextmanager
def child(*command: str) -> Iterator[tuple[int, str]]:
    """Runs a module as a process, and yields its pid and the line that it prints first. Raises ServerFailed."""
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line:
            raise ServerFailed(f"{command[0]} did not start")
        yield process.pid, line
    finally:
        end(process)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def under_load(url: str, pid: int, streams: int, first: int) -> tuple[float, float, list[Told]]:
    """Runs streams at once, whose requests come one after the other, and meanwhile short ones of a bystander; prompts
    are those from number `first` on. Returns the router's CPU seconds per token, tokens per event, and the bystander's
    answers."""
    client = HttpClient(url)
    bystander: list[Told] = []
    all_begun = asyncio.Event()

    async def follow(number: int) -> int:
        # The first requests end, and the next begin, at different times.
        told = await client.stream(first + number, 1 + OUTPUT_TOKENS * (number + 1) // streams)
        all_begun.set()
        return len(told.at_s) + len((await client.stream(first + streams + number, OUTPUT_TOKENS)).at_s)

    async def stand_by() -> None:
        await all_begun.wait()
        while True:
            bystander.append(await client.stream(first + 2 * streams + len(bystander), BYSTANDER_TOKENS))

    try:
        before_s = cpu_s(pid)
        standing = asyncio.ensure_future(stand_by())
        events = sum(await asyncio.gather(*(follow(number) for number in range(streams))))
        spent_s = cpu_s(pid) - before_s
        standing.cancel()
        await asyncio.gather(standing, return_exceptions=True)
    finally:
        client.close()
    tokens = sum(1 + OUTPUT_TOKENS * (number + 1) // streams + OUTPUT_TOKENS for number in range(streams))
    return spent_s / (tokens + len(bystander) * BYSTANDER_TOKENS), tokens / events, bystander


async def first_tokens(url: str, address: str, rounds: int, first: int) -> tuple[list[float], list[float]]:
    """Times to the first token, in seconds: through the router, and of a client that speaks ZeroMQ with the replica."""
    client = HttpClient(url)
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    Curve(SECRET, REPLICA).calls(socket)
    socket.connect(address)
    routed, direct = [], []
    try:
        for number in range(rounds):
            routed.append((await client.stream(first + number, 1)).ttft_s)
            begun_s = time.perf_counter()
            request = Generate(
                request_id=str(number), prompt_ids=prompt(first + number), sampling=SamplingParams(max_tokens=1)
            )
            await socket.send(encode(request))
            while not isinstance(decode_from_replica(await socket.recv()), Outputs):
                pass
            direct.append(time.perf_counter() - begun_s)
    finally:
        socket.close(linger=0)
        client.close()
    return routed, direct


def p99_ms(values_s: Sequence[float]) -> float:
    return 1000 * sorted(values_s)[int(0.99 * len(values_s))]


def parser() -> Parser:
    p = Parser("shoal bench overhead", __doc__)
    p.add_argument("--streams", type=count, default=256, metavar="N", help="streams at once (default 256)")
    p.add_argument("--replicas", type=count, default=4, metavar="N", help="replicas (default 4)")
    p.add_argument("--step-ms", type=positive, default=25.0, metavar="MS", help="their steps (default 25)")
    p.add_argument("--rounds", type=count, default=3, help="counted rounds, after one that does not count (default 3)")
    results.add_options(p, "fleet.overhead")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    step_s = args.step_ms / 1000
    with dummy_models.written(MODEL) as folder:
        try:
            with (
                sigterm_raises(),
                child("bench.overhead.paced_replicas", str(args.replicas), str(step_s)) as (_, addresses),
                child("bench.overhead.router_process", str(folder), *addresses.split()) as (pid, url),
            ):
                found = uvloop.run(_measure(url, pid, addresses.split()[0], args.streams, args.rounds, step_s))
        except ServerFailed as error:
            print(f"shoal bench overhead: {error}", file=sys.stderr)
            return 1
    figures, raw = found
    settings = {name: getattr(args, name) for name in ("streams", "replicas", "step_ms", "rounds")}
    print(f"tokens per event: {raw['tokens_per_event']:.3f}")
    results.publish(args.name, figures, settings | raw, args.out)
    return 0


async def _measure(
    url: str, pid: int, address: str, streams: int, rounds: int, step_s: float
) -> tuple[list[Figure], dict[str, float]]:
    spent, per_event, bystander = [], [], list[Told]()
    for number in range(-1, rounds):
        cost_s, tokens, told = await under_load(url, pid, streams, (number + 1) * 10 * streams)
        if number >= 0:
            spent.append(cost_s)
            per_event.append(tokens)
            bystander += told
    routed, direct = await first_tokens(url, address, 100 * rounds, 100 * streams * rounds)
    gaps_s = [after - before for told in bystander for before, after in zip(told.at_s, told.at_s[1:], strict=False)]
    added_s = statistics.median(routed) - statistics.median(direct)
    base = "fleet.overhead"
    figures = [
        Figure(f"{base}.cores_per_100k_tok_s", statistics.median(spent) * 1e5, "cores", False),
        Figure(f"{base}.ttft_ms", added_s * 1000, "ms", False),
        Figure(f"{base}.bystander.ttft_p99_ms", p99_ms([told.ttft_s for told in bystander]), "ms", False),
        Figure(f"{base}.bystander.tbt_p99_ms", p99_ms(gaps_s) - step_s * 1000, "ms", False),
    ]
    raw = {
        "tokens_per_event": statistics.median(per_event),
        "ttft_p99_ms": p99_ms(routed),
        "direct_ttft_ms": statistics.median(direct) * 1000,
        "direct_ttft_p99_ms": p99_ms(direct),
    }
    return figures, raw


if __name__ == "__main__":
    sys.exit(main())
