"""The throughput of one replica through a router, against the same replica without one.

    python -m bench.overhead.throughput                                      # 256 streams, the 8B shape, on a GPU
    python -m bench.overhead.throughput --shape tiny --device cpu --streams 8 --rounds 1

The replica is a process, the router another, the clients are here. All requests of a round come at once, each with
512 prompt tokens that no other has and 256 output tokens. Rounds through the router, by HTTP, and rounds of a client
that speaks ZeroMQ with the replica come in turns, after one of each that does not count.

throughput   what the router takes: 1 - (tokens a second through it) / (tokens a second without), medians of the rounds
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio

from bench import results
from bench.load.options import count
from bench.overhead.command import MODEL, OUTPUT_TOKENS, HttpClient, child, cpu_s, prompt
from bench.replica import dummy_models
from bench.replica.server_process import ServerFailed, sigterm_raises
from bench.results import Figure
from bench.secret import SECRET
from shoal.help import Parser
from worker.curve import REPLICA, Curve
from worker.messages import Generate, Outputs, SamplingParams, decode_from_replica, encode

ROUND_S = 300.0  # that a round may take


async def routed(url: str, streams: int, first: int) -> float:
    """Seconds that the streams take through the router; prompts are those from number `first` on. Raises
    ServerFailed."""
    client = HttpClient(url)
    begun_s = time.perf_counter()
    try:
        await asyncio.gather(*(client.stream(first + number, OUTPUT_TOKENS) for number in range(streams)))
    finally:
        client.close()
    return time.perf_counter() - begun_s


async def direct(address: str, streams: int, first: int) -> float:
    """Seconds that the same takes by ZeroMQ. Raises ServerFailed."""
    socket: zmq.asyncio.Socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    Curve(SECRET, REPLICA).calls(socket)
    socket.connect(address)
    asked = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True)
    begun_s = time.perf_counter()
    try:
        for number in range(streams):
            request = Generate(request_id=str(number), prompt_ids=prompt(first + number), sampling=asked)
            await socket.send(encode(request))
        tokens = left = streams * OUTPUT_TOKENS
        while left > 0:
            message = decode_from_replica(await socket.recv())
            for output in message.outputs if isinstance(message, Outputs) else []:
                left -= len(output.token_ids)
                if output.failure is not None:
                    raise ServerFailed(f"{left} of {tokens} tokens are missing: {output.failure}")
    finally:
        socket.close(linger=0)
    return time.perf_counter() - begun_s


def parser() -> Parser:
    p = Parser("python -m bench.overhead.throughput", __doc__)
    p.add_argument("--shape", choices=dummy_models.SHAPES, default="llama-8b", help="default llama-8b")
    p.add_argument("--device", default="auto", help="cpu or cuda (default: what is there)")
    p.add_argument("--streams", type=count, default=256, metavar="N", help="requests of a round (default 256)")
    p.add_argument("--rounds", type=count, default=3, metavar="N", help="counted rounds of each (default 3)")
    p.add_argument("--name", default="fleet.overhead.gpu", help="name of the result (default fleet.overhead.gpu)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the result")
    return p


async def measure(url: str, pid: int, address: str, args: argparse.Namespace) -> tuple[list[Figure], dict[str, object]]:
    """Runs the rounds. Returns the figures and what they are made of."""
    took: dict[str, list[float]] = {"routed_s": [], "direct_s": []}
    router_s = 0.0
    for number in range(-1, args.rounds):
        first = 2 * (number + 1) * args.streams
        before_s = cpu_s(pid)
        through_s = await asyncio.wait_for(routed(url, args.streams, first), ROUND_S)
        spent_s = cpu_s(pid) - before_s
        alone_s = await asyncio.wait_for(direct(address, args.streams, first + args.streams), ROUND_S)
        print(f"{'counted' if number >= 0 else 'warm'}: routed {through_s:.3f} s, direct {alone_s:.3f} s", flush=True)
        if number >= 0:
            took["routed_s"].append(through_s)
            took["direct_s"].append(alone_s)
            router_s += spent_s
    tokens = args.streams * OUTPUT_TOKENS
    through, alone = (tokens / statistics.median(took[name]) for name in ("routed_s", "direct_s"))
    figures = [
        Figure("fleet.overhead.throughput", 1 - through / alone, "ratio", False),
        Figure("fleet.overhead.routed_tok_s", through, "tokens/s", True),
        Figure("fleet.overhead.direct_tok_s", alone, "tokens/s", True),
    ]
    return figures, {**took, "router_cpu_s_per_100k_tok": router_s / (tokens * args.rounds) * 1e5}


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        folder = dummy_models.write(args.shape, Path(scratch) / MODEL)
        settings = json.dumps({"device": args.device, "max_running": max(256, args.streams)})
        try:
            with (
                sigterm_raises(),
                child("bench.overhead.replica_process", str(folder), settings) as (_, address),
                child("bench.overhead.router_process", str(folder), address) as (pid, url),
            ):
                figures, raw = uvloop.run(measure(url, pid, address, args))
        except (ServerFailed, TimeoutError) as error:
            print(f"bench.overhead.throughput: {error}", file=sys.stderr)
            return 1
    about = {name: getattr(args, name) for name in ("shape", "device", "streams", "rounds")}
    path = results.write(args.name, figures, about | raw, folder=args.out)
    for figure in figures:
        print(f"{figure.name}: {figure.value:.4f} {figure.unit}")
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
