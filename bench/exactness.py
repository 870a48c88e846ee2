"""Whether the replica says what `transformers` says, on the same device.

    shoal bench exactness --device cuda --models llama,smollm2 --tp 1
    shoal bench exactness --device cuda --models llama,smollm2 --tp 1,2 --pp 2
    shoal bench exactness --device cuda --models llama --tp 2,4 --pp 1,2 --share-gpus
    shoal bench exactness --device cpu --models tiny

In float32 every output is compared token for token with `generate`, alone and in batches, in chunks of all sizes, from
a cold and a warm cache, and with preemptions; a replica is started once, and given a scheduler and a cache of its own
for every case. Where an output first differs at a position at which the two likeliest tokens are nearer than 1e-4, it
is a tie: reported, and no failure. In bfloat16 the share of positions at which the likeliest token is that of float32
is compared with the share of `transformers`' own bfloat16, over the same sequences. The exit code is 1 when anything is
wrong. With --share-gpus layouts run that have more ranks than there are GPUs: slow, and over sockets, as between
machines.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from bench import reference, results
from bench.reference import NEW_TOKENS, Reference, Scored
from bench.replica import again
from bench.results import Figure, number
from pipeline.schedule import POLICIES
from worker.config import WorkerConfig
from worker.engine import Engine, Finished, load_parts
from worker.messages import SamplingParams
from worker.processes import open_runner

TIE = 1e-4
WORSE_BY_ERRORS = 3.0  # standard errors that our agreement in bfloat16 may lie below transformers' by chance
BRIEF, BRIEF_ROUNDS = 4, 8  # most tokens of a brief output, and how often all of them are asked for
BASE = {"kv_tokens": 16384, "context_length": 512, "max_running": 32, "token_budget": 2048}


@dataclass(frozen=True)
class Case:
    """A scheduler's settings, and what is run with them, one after the other: `alone`, every third prompt by itself;
    `cold` and `warm`, all at once; `brief`, often, with outputs cut after a few tokens by a stop token, so that the
    scheduler expects little of those that follow and lets in too many. Only prompts of at most `longest` tokens.
    `preempts`: it shows nothing unless somebody was."""

    name: str
    settings: dict[str, Any]
    runs: tuple[str, ...] = ("cold",)
    longest: int = max(reference.LENGTHS)
    preempts: bool = False

    def scheduled(self, schedule: str | None) -> "Case":
        """The same with a schedule that is not the default."""
        if schedule is None:
            return self
        return dataclasses.replace(
            self, name=f"{self.name}, {schedule}", settings=self.settings | {"schedule": schedule}
        )


CASES = (
    Case("whole", {}, ("alone", "cold", "warm")),
    Case(
        "preempted", {"kv_tokens": 384, "context_length": 128, "token_budget": 96}, ("brief", "cold", "warm"), 64, True
    ),
    Case("chunks of 64", {"token_budget": 64}),
    Case("chunks of 7", {"token_budget": 7}, longest=64),
    Case("chunks of 1", {"token_budget": 1}, longest=8),
)
ALONE = slice(None, None, 3)


@dataclass
class Verdict:
    """Outputs beside those of the reference. `ties` and `wrong` say where an output first differs: the prompt's number,
    the position in the output, and the lead of the likeliest token there."""

    sequences: int = 0
    identical: int = 0
    ties: list[tuple[int, int, float]] = field(default_factory=list)
    wrong: list[tuple[int, int, float]] = field(default_factory=list)
    preemptions: int = 0
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.wrong and not self.problem


def compare(ours: Sequence[list[int]], said: Sequence[list[int]], margins: Sequence[Sequence[float]]) -> Verdict:
    """Holds each output to the reference's; `margins` are the leads at its positions."""
    verdict = Verdict(sequences=len(said))
    for i, (own, right, leads) in enumerate(zip(ours, said, margins, strict=True)):
        if own == right:
            verdict.identical += 1
            continue
        at = next((p for p, (a, b) in enumerate(zip(own, right, strict=False)) if a != b), min(len(own), len(right)))
        lead = float(leads[at]) if at < len(leads) else float("inf")
        (verdict.ties if lead < TIE and len(own) == len(right) else verdict.wrong).append((i, at, lead))
    return verdict


@dataclass(frozen=True)
class Agreement:
    """Over `positions`: how often the likeliest token is that of float32, for us and for transformers in bfloat16, with
    the standard error of the difference; and the root mean square error of log probabilities (None: not asked for)."""

    positions: int
    ours: float
    theirs: float
    error: float
    ours_rms: float | None = None
    theirs_rms: float | None = None

    @property
    def right(self) -> bool:
        return self.ours - self.theirs >= -WORSE_BY_ERRORS * self.error


def agreement(exact: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> Agreement:
    """How `ours` and `theirs` agree with `exact`: likeliest tokens, int64 [positions] each."""
    own, other = (ours == exact).double(), (theirs == exact).double()
    error = (own - other).std(correction=0).item() * len(exact) ** -0.5
    return Agreement(len(exact), own.mean().item(), other.mean().item(), error)


class Check:
    """One model on one device, and what the reference says of it."""

    def __init__(self, name: str, folder: Path, device: str, share_gpus: bool) -> None:
        self.name, self.device, self._share_gpus = name, device, share_gpus
        self.folder = reference.make(name, folder)
        exact = Reference(self.folder, device, torch.float32)
        self.prompts = reference.prompts(reference.MODELS[name].vocabulary)
        self.said = exact.generate(self.prompts)
        self.whole = [prompt + said for prompt, said in zip(self.prompts, self.said, strict=True)]
        self.scored = [exact.score(sequence) for sequence in self.whole]
        self.margins = [scored.margins[-NEW_TOKENS:].tolist() for scored in self.scored]
        # With a token that might end them the scheduler must guess how long outputs get: it never comes.
        never = min(set(range(reference.MODELS[name].vocabulary)).difference(*self.said))
        self.greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=(never,))
        del exact
        rough = Reference(self.folder, device, torch.bfloat16)
        self.theirs = [rough.score(sequence) for sequence in self.whole]

    @contextmanager
    def replica(self, dtype: str, tp: int, pp: int, **settings: Any) -> Iterator["Replica"]:
        """The model in `pp` stages of `tp` ranks."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        settings = BASE | {"device": self.device, "dtype": dtype, "tp": tp, "pp": pp} | settings
        replica = Replica(self.folder, settings, self._share_gpus)
        try:
            yield replica
        finally:
            replica.close()

    def float32(self, replica: "Replica", case: Case) -> Verdict:
        """All runs of a case."""
        chosen = [i for i, prompt in enumerate(self.prompts) if len(prompt) <= case.longest]
        prompts, said = [self.prompts[i] for i in chosen], [self.said[i] for i in chosen]
        margins: list[list[float]] = [self.margins[i] for i in chosen]
        outputs: list[list[int]] = []
        expected: list[list[int]] = []
        leads: list[list[float]] = []
        with replica.engine(case.settings) as engine:
            for run in case.runs:
                if run == "brief":
                    ends = [row[i % BRIEF] for i, row in enumerate(said)]
                    short = [replace(self.greedy, stop_token_ids=(end,)) for end in ends]
                    for _ in range(BRIEF_ROUNDS):
                        outputs += tokens(engine.generate(prompts, short))
                        expected += [row[: row.index(end) + 1] for row, end in zip(said, ends, strict=True)]
                        leads += margins
                    continue
                if run == "alone":
                    for prompt in prompts[ALONE]:
                        engine.reset_cache()
                        outputs += tokens(engine.generate([prompt], self.greedy))
                    expected += said[ALONE]
                    leads += margins[ALONE]
                    continue
                if run == "cold":
                    engine.reset_cache()
                outputs += tokens(engine.generate(prompts, self.greedy))
                expected += said
                leads += margins
            preemptions = engine.load().preemptions
        verdict = compare(outputs, expected, leads)
        verdict.preemptions = preemptions
        if case.preempts and not preemptions:
            verdict.problem = "nobody was preempted"
        return verdict

    def bfloat16(self, tp: int, pp: int) -> dict[str, Agreement]:
        """`prefill`: every position of prompts and outputs, computed in large chunks. `decode`: those of the outputs,
        computed one token at a time with all before it in the cache."""
        # With pages of one token all of a prompt but its last token is found in the cache.
        with self.replica("bfloat16", tp, pp, page_size=1) as replica, replica.engine({}) as engine:
            asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            read = [_scored(finished) for finished in engine.generate(self.whole, asked)]
            cut = [
                sequence[:end] for sequence in self.whole for end in range(len(sequence) - NEW_TOKENS, len(sequence))
            ]
            last = [output[0] for output in tokens(engine.generate(cut, SamplingParams(max_tokens=1, temperature=0.0)))]
        exact, ours, theirs = (_joined(scores) for scores in (self.scored, read, self.theirs))
        prefill = agreement(exact.likeliest, ours.likeliest, theirs.likeliest)
        found = asdict(prefill) | {"ours_rms": _rms(ours, exact), "theirs_rms": _rms(theirs, exact)}
        exact, theirs = (_joined(scores, NEW_TOKENS) for scores in (self.scored, self.theirs))
        return {
            "prefill": Agreement(**found),
            "decode": agreement(exact.likeliest, torch.tensor(last), theirs.likeliest),
        }


class Replica:
    """A model that is loaded once, for engines one after the other, each with a scheduler and a cache of its own."""

    def __init__(self, folder: Path, settings: dict[str, Any], share_gpus: bool) -> None:
        self._folder, self._settings = folder, settings
        open_ranks = partial(open_runner, share_gpus=share_gpus)
        self._parts = load_parts(folder, WorkerConfig.model_validate(settings), open_ranks)

    @contextmanager
    def engine(self, settings: dict[str, Any]) -> Iterator[Engine]:
        """With other settings of the scheduler."""
        with again(self._folder, WorkerConfig.model_validate(self._settings | settings), self._parts) as engine:
            yield engine

    def close(self) -> None:
        """Ends what was started."""
        self._parts.grammars.close()
        self._parts.runner.close()


def tokens(finished: list[Finished]) -> list[list[int]]:
    """The outputs. Raises RuntimeError if one failed."""
    for one in finished:
        if one.failure is not None:
            raise RuntimeError(f"a request failed: {one.failure.message}")
    return [one.token_ids for one in finished]


def _scored(finished: Finished) -> Scored:
    tokens([finished])
    rows = [row for row in finished.prompt_logprobs or [] if row is not None]
    likeliest = torch.tensor([row.top[0][0] for row in rows])
    return Scored(likeliest, torch.tensor([]), torch.tensor([row.logprob for row in rows]))


def _joined(scores: Sequence[Scored], last: int = 0) -> Scored:
    """Of several sequences, one after another; only the `last` positions of each, if that is not 0."""
    parts = ([getattr(one, name)[-last:] for one in scores] for name in ("likeliest", "margins", "logprobs"))
    return Scored(*(torch.cat(part) for part in parts))


def _rms(rough: Scored, exact: Scored) -> float:
    return (rough.logprobs - exact.logprobs).double().square().mean().sqrt().item()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="shoal bench exactness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    models = _among("model", reference.MODELS)
    p.add_argument(
        "--models", type=models, default="llama,smollm2", metavar="A,B", help=f"of {', '.join(reference.MODELS)}"
    )
    p.add_argument("--tp", type=_numbers, default=[1], metavar="N,M", help="numbers of ranks in a stage (default 1)")
    p.add_argument(
        "--pp", type=_numbers, default=[1], metavar="N,M", help="numbers of stages, each with each (default 1)"
    )
    p.add_argument(
        "--cases", type=_cases, default=CASES, metavar="A,B", help=f"of {', '.join(case.name for case in CASES)}"
    )
    p.add_argument(
        "--schedules",
        type=_among("schedule", POLICIES),
        default=[None],
        metavar="A,B",
        help="in float32 (default: its own)",
    )
    p.add_argument("--share-gpus", action="store_true", help="several ranks on a GPU, where there are too few")
    p.add_argument("--name", help="of the result (default: DEVICE.exact and the numbers of ranks)")
    p.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="default: bench/results")
    return p


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _among(what: str, known: Collection[str]) -> Callable[[str], list[Any]]:
    def names(text: str) -> list[Any]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no {what} {unknown[0]}: there are {', '.join(known)}")
        return text.split(",")

    return names


def _cases(text: str) -> tuple[Case, ...]:
    names = _among("case", [case.name for case in CASES])(text)
    return tuple(case for case in CASES if case.name in names)


def main(argv: list[str] | None = None) -> int:
    """Runs everything, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    report = Report("gpu" if args.device == "cuda" else "cpu")
    for name in args.models:
        with tempfile.TemporaryDirectory(prefix="shoal-exact-") as scratch:
            check = Check(name, Path(scratch) / name, args.device, args.share_gpus)
            for tp, pp in itertools.product(args.tp, args.pp):
                if tp not in reference.MODELS[name].tp or pp > reference.MODELS[name].layers:
                    print(f"{name} cannot be shared out to {pp} stages of {tp} ranks", flush=True)
                    continue
                if args.device == "cuda" and tp * pp > torch.cuda.device_count() and not args.share_gpus:
                    print(f"{pp} stages of {tp} ranks are more than there are GPUs", flush=True)
                    continue
                report.run(check, tp, pp, args.schedules, args.cases)
    ranks = "".join(
        f"{way}{'-'.join(map(str, each))}" for way, each in (("tp", args.tp), ("pp", args.pp)) if each != [1]
    )
    path = results.write(
        args.name or f"{report.kind}.exact.{ranks or 'tp1'}", report.figures, report.raw, folder=args.out
    )
    print(f"{'all right' if report.right else 'WRONG'}; written: {path.name}")
    return 0 if report.right else 1


class Report:
    """Figures named `KIND.exact...`, all that they were made of, and whether all is right."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.figures: list[Figure] = []
        self.raw: dict[str, Any] = {}
        self.right = True
        self._began_s = time.monotonic()

    def run(self, check: Check, tp: int, pp: int, schedules: Sequence[str | None], cases: Sequence[Case]) -> None:
        """These cases of a model in so many stages of so many ranks, with each of the schedules, a line each."""
        ranks = f"tp{tp}" if pp == 1 else f"tp{tp}pp{pp}"
        label = f"{self.kind}.exact.{check.name}.{ranks}"
        verdicts = {}
        with check.replica("float32", tp, pp) as replica:
            for case in (case.scheduled(schedule) for schedule in schedules for case in cases):
                verdicts[case.name] = verdict = check.float32(replica, case)
                same = f"{verdict.identical} of {verdict.sequences} same"
                self._say(f"{label} float32 {case.name}", verdict.right, same)
                if verdict.ties or verdict.wrong or verdict.problem:
                    print(f"    ties {verdict.ties} wrong {verdict.wrong} {verdict.problem}")
        agreements = check.bfloat16(tp, pp)
        for way, found in agreements.items():
            shares = f"{found.ours:.2%} as float32, transformers {found.theirs:.2%}, of {found.positions}"
            self._say(f"{label} bfloat16 {way}", found.right, shares)
            self.figures += [
                Figure(f"{label}.bfloat16.{way}.agreement", found.ours, "ratio", True),
                Figure(f"{label}.bfloat16.{way}.transformers", found.theirs, "ratio", True),
            ]
            if found.ours_rms is not None and found.theirs_rms is not None:
                print(f"    error of log probabilities {number(found.ours_rms)}, theirs {number(found.theirs_rms)}")
        identical, all_ = (sum(getattr(v, what) for v in verdicts.values()) for what in ("identical", "sequences"))
        self.figures.append(Figure(f"{label}.float32.identical", identical / all_, "ratio", True))
        self.raw[f"{check.name}.{ranks}"] = {
            "float32": {name: asdict(verdict) for name, verdict in verdicts.items()},
            "bfloat16": {way: asdict(found) for way, found in agreements.items()},
        }

    def _say(self, what: str, right: bool, found: str) -> None:
        self.right &= right
        elapsed_s = time.monotonic() - self._began_s
        print(f"{elapsed_s:6.1f} s  {what:48s} {'right' if right else 'WRONG'}  {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
