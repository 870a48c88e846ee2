"""A bystander at a server that others attack: how much longer it waits than alongside one well-behaved client.

    shoal bench door                                      # every attack, then all together: some 15 minutes
    shoal bench door --seconds 5 --attacks long_texts slow_grammars
    shoal bench door --attacks long_outputs --scheduling-policy fcfs   # what starvation looks like

A real server, two replicas of a tiny model and a router, is on one core with the bystander, which sends streams at a
pace: chats, completions, grammars that are new, and responses that are stored. The attacker, with a key and an address
of its own, is on another core. Before each attack comes a control for the same time: a client like the bystander in the
attacker's place. So what changes on the machine meanwhile meets both. At the end of each part, while it goes on, the
bystander does errands: it reads and continues a response, tokenises a long text, and asks in the background.

ttft_p99.vs_neighbour.ATTACK  time to the first token, from when a request was due: P99 under the attack by P99 of its
                              controls. An answer that never came counts as long as it was waited for
ttft_p99.vs_neighbour         the largest of these
refusals                      streams and errands of the bystander that got an error or no answer, under all attacks

The exit code is 0 if no ratio is above 2, and nothing was refused.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from bench import results
from bench.door.attacks import ATTACKS, NEIGHBOUR, TOGETHER
from bench.door.connections import HttpFrom
from bench.door.paced_client import PacedClient, Waited
from bench.load.http import Broken
from bench.load.options import count, positive
from bench.replica import dummy_models
from bench.replica.over_http import flags
from bench.replica.server_process import ServerFailed, server
from bench.results import Figure
from shoal.help import Parser

MODEL, SOURCE = "door", "127.0.0.2"  # the bystander's address
MAX_RATIO = 2.0  # the ratio that a bystander may notice
LEAD_S = 2.0  # an attack's time before the bystander is measured
REST_S = 90.0  # a server may take to come to rest after an attack
TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
# So small that one client can take all of it.
SETTINGS = {
    "load_format": "dummy", "device": "cpu", "cpu_threads": 1, "replicas": 2, "kv_tokens": 16384, "max_running": 32,
    "context_length": 8192, "max_connections": 256, "max_held_bytes": 64 << 20, "response_store_bytes": 64 << 20,
    "max_background_responses": 16, "served_model_name": MODEL,
}  # fmt: skip


@dataclass
class Slice:
    """The bystander's time alongside an attack or a neighbour. `statuses`: the answers that the other one got."""

    other: str
    answers: list[Waited] = field(default_factory=list)
    errands: list[Waited] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)

    @property
    def refused(self) -> list[str]:
        return [f"{each.kind}: {each.error}" for each in (*self.answers, *self.errands) if each.error is not None]


@dataclass
class AttackRuns:
    """An attack and its controls, over all rounds."""

    attack: str
    controls: list[Slice] = field(default_factory=list)
    attacked: list[Slice] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        return quantile_s(self.attacked, 0.99) / quantile_s(self.controls, 0.99)

    @property
    def refused(self) -> list[str]:
        return [error for each in self.attacked for error in each.refused]

    @property
    def starves_bystander(self) -> bool:
        """Whether the bystander was refused, or waited too long for its first tokens."""
        return self.ratio > MAX_RATIO or bool(self.refused)


def quantile_s(slices: Sequence[Slice], q: float) -> float:
    """A quantile of the time to the first token."""
    waits = sorted(answer.ttft_s for each in slices for answer in each.answers)
    return waits[int(q * len(waits))]


@dataclass(frozen=True)
class AttackedServer:
    """Where clients meet a server. `keys`: by client, which are `bystander`, `neighbour` and each attack. `core`: the
    attacker's."""

    url: str
    keys: Mapping[str, str]
    core: int
    rate_s: float
    seed: int
    model: str = MODEL

    async def alongside(self, name: str, attacks: Sequence[str], seconds: float, round_number: int = 0) -> Slice:
        """The bystander alongside a client that does some attacks at once. Raises ServerFailed if that client fails."""
        made = Slice(name)
        http = HttpFrom(self.url, self.keys["bystander"], SOURCE)
        # Arrivals are the same in a control and its attack; texts that were never asked are not.
        client = PacedClient(http, self.model, self.rate_s, Random(f"{self.seed} {round_number}"))
        try:
            async with self._other(name, attacks, made):
                await asyncio.sleep(LEAD_S)
                made.answers = await client.run(seconds)
                made.errands = await client.errands()
            with contextlib.suppress(Broken, OSError):
                await client.forget()
        finally:
            http.close()
        return made

    @contextlib.asynccontextmanager
    async def _other(self, name: str, attacks: Sequence[str], made: Slice) -> AsyncIterator[None]:
        about = [self.url, self.keys[name], self.model, str(self.core), str(self.rate_s), str(self.seed), *attacks]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "bench.door.attacker", *about, stdin=pipe, stdout=pipe
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            if await process.stdout.readline() != b"ready\n":
                raise ServerFailed(f"the attacker of {name} did not begin")
            yield
            process.stdin.close()
            told = await process.stdout.read()
            if await process.wait():
                raise ServerFailed(f"the attacker of {name} failed")
            made.statuses = json.loads(told)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def until_at_rest(self) -> None:
        """Returns once the server has nothing to do. Raises ServerFailed."""
        http = HttpFrom(self.url, self.keys["bystander"], SOURCE)
        deadline = time.monotonic() + REST_S
        try:
            while time.monotonic() < deadline:
                with contextlib.suppress(Broken, OSError, TypeError):
                    state = (await http.get("/state"))[1]
                    loads = [replica["load"] for model in state["models"] for replica in model["replicas"]]
                    if loads and not any(load is None or load["running"] or load["waiting"] for load in loads):
                        return
                await asyncio.sleep(0.1)  # other processes' doing
        finally:
            http.close()
        raise ServerFailed(f"the server is not at rest {REST_S:g} s after an attack")


async def measure(at: AttackedServer, attacks: Sequence[str], seconds: float, rounds: int) -> list[AttackRuns]:
    """Runs all attacks, each after its control. Prints a line for each. Raises ServerFailed."""
    made = {name: AttackRuns(name) for name in attacks}
    alone = [name for name in attacks if name != TOGETHER]
    await at.alongside(NEIGHBOUR, [NEIGHBOUR], min(seconds, 5.0))  # to warm it up
    print(f"{'attack':18}{'p50 ms':>8}{'p99 ms':>8}{'control':>9}{'ratio':>7}{'refused':>9}{'errands s':>11}  attacker")
    for number in range(rounds):
        for name, runs in made.items():
            await at.until_at_rest()
            runs.controls.append(await at.alongside(NEIGHBOUR, [NEIGHBOUR], seconds, number))
            does = (alone or list(ATTACKS)) if name == TOGETHER else [name]
            runs.attacked.append(await at.alongside(name, does, seconds, number))
            print(line(runs), flush=True)
    return list(made.values())


def line(runs: AttackRuns) -> str:
    """The line of a table, over all rounds so far."""
    attacked, controls = runs.attacked, runs.controls
    times = [1000 * quantile_s(attacked, q) for q in (0.5, 0.99)]
    errands_s = max(answer.ttft_s for each in attacked for answer in each.errands)
    got = ", ".join(f"{count} {status}" for status, count in attacked[-1].statuses.items())
    return (
        f"{runs.attack:18}{times[0]:8.0f}{times[1]:8.0f}{1000 * quantile_s(controls, 0.99):9.0f}"
        f"{runs.ratio:7.2f}{len(runs.refused):9}{errands_s:11.2f}  {got}"
    )


def figures(made: Sequence[AttackRuns]) -> list[Figure]:
    """The figures of a run."""
    base = "door.bystander"
    ratios = [Figure(f"{base}.ttft_p99.vs_neighbour.{each.attack}", each.ratio, "ratio", False) for each in made]
    return [
        *ratios,
        Figure(f"{base}.ttft_p99.vs_neighbour", max(each.value for each in ratios), "ratio", False),
        Figure(f"{base}.refusals", sum(len(each.refused) for each in made), "requests", False),
    ]


def raw(made: Sequence[AttackRuns]) -> dict[str, Any]:
    """The times from which the figures come, in milliseconds, by kind."""

    def told(each: Slice) -> dict[str, Any]:
        kinds = sorted({answer.kind for answer in each.answers})
        waits = {kind: [round(1000 * a.ttft_s, 1) for a in each.answers if a.kind == kind] for kind in kinds}
        errands = {answer.kind: round(1000 * answer.ttft_s, 1) for answer in each.errands}
        return {"ttft_ms": waits, "errands_ms": errands, "refused": each.refused, "statuses": each.statuses}

    return {
        each.attack: {
            "controls": [told(one) for one in each.controls],
            "attacked": [told(one) for one in each.attacked],
        }
        for each in made
    }


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """A context in which this process, and those that it starts, run on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def parser() -> Parser:
    p = Parser("shoal bench door", __doc__)
    p.add_argument(
        "--attacks", nargs="+", choices=[*ATTACKS, TOGETHER], default=[*ATTACKS, TOGETHER], metavar="A",
        help=f"default: all, one after the other, then {TOGETHER}: those that are named, at once. "
        f"{'; '.join(f'{name}: {(attack.__doc__ or str()).strip()}' for name, attack in ATTACKS.items())}",
    )  # fmt: skip
    p.add_argument("--seconds", type=positive, default=15.0, metavar="S", help="of an attack, and of its control (15)")
    p.add_argument("--rounds", type=count, default=1, metavar="N", help="rounds of all attacks (default 1)")
    p.add_argument("--rate", type=positive, default=8.0, metavar="R", help="streams of the bystander a second (8)")
    p.add_argument("--scheduling-policy", choices=["shortest", "fcfs"], help="of the server (default: its own)")
    p.add_argument("--seed", type=int, default=0, help="of texts and moments (default 0)")
    p.add_argument("--name", default="door", help="name of the result (default door; none: no result)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="FOLDER", help="folder of the result")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    attacks = list(dict.fromkeys(args.attacks))
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        print("shoal bench door: one core alone, which the attacker shares with the server", file=sys.stderr)
    keys = {name: f"sk-{name}" for name in ("bystander", NEIGHBOUR, *attacks)}
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch, pinned(cores[0]):
            settings = SETTINGS | files(Path(scratch), keys)
            if args.scheduling_policy:
                settings["scheduling_policy"] = args.scheduling_policy
            with server(flags(settings)) as url:
                at = AttackedServer(url, keys, cores[-1], args.rate, args.seed)
                made = asyncio.run(measure(at, attacks, args.seconds, args.rounds))
    except ServerFailed as error:
        print(f"shoal bench door: {error}", file=sys.stderr)
        return 1
    found = figures(made)
    for each in made:
        for message in each.refused[:5]:
            print(f"{each.attack}: {message}")
    if args.name != "none":
        about = {key: getattr(args, key) for key in ("seconds", "rounds", "rate", "seed", "scheduling_policy")}
        written = results.write(args.name, found, {"about": about, "attacks": raw(made)}, folder=args.out)
        print(f"written: {written.name}")
    return int(any(each.starves_bystander for each in made))


def files(folder: Path, keys: Mapping[str, str]) -> dict[str, Any]:
    """Writes the model and the keys. Returns their settings. Only attackers may have many users."""
    model = dummy_models.write("tiny", folder / MODEL)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    clients = [
        {"name": name, "key": key, "by_user": name in ATTACKS or name == TOGETHER, "concurrent_requests": 1024}
        for name, key in keys.items()
    ]
    (folder / "keys.yaml").write_text("keys:\n" + "".join(f"  - {json.dumps(client)}\n" for client in clients))
    return {
        "model": str(model), "api_key_file": str(folder / "keys.yaml"), "response_store_dir": str(folder / "responses")
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
