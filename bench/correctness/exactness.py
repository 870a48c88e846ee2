"""Correctness: whether a replica's outputs equal those of `transformers` on the same device.

    shoal bench exactness --device cuda --models llama,smollm2 --tp 1
    shoal bench exactness --device cuda --models llama,smollm2 --tp 1,2 --pp 2
    shoal bench exactness --device cuda --models llama --tp 2,4 --pp 1,2 --share-gpus
    shoal bench exactness --device cpu --models tiny
    shoal bench exactness --device cuda --models all --cases whole
    shoal bench exactness --device cuda --models gemma4,qwen3_next --dtypes bfloat16
    shoal bench exactness --device cuda --tp 2 --drafts 0.8,0.7,0.6

In float32, every output is compared token for token with that of `generate`: alone and in batches, in chunks of several
sizes, from a cold and a warm cache, and with preemptions. A model is loaded once per layout, and every case has a
scheduler and a cache of its own. A difference is a tie if the logits of the two likeliest tokens at the first differing
position are closer than 1e-4. Ties are reported, and are no failures.

In bfloat16, agreement is the share of positions at which the likeliest token is that of float32. It must not be
significantly lower than that of `transformers` in bfloat16 on the same sequences.

`all` is a model of every family that is served. A model whose architecture the installed `transformers` lacks is not
compared, which is said. A model that fails is reported as wrong, and the others are compared.

With --drafts, every step verifies guesses at the next tokens, some of them wrong, whether they pay or not. The outputs
must be the same.

The exit code is 1 if anything is wrong. --share-gpus allows layouts with more ranks than GPUs. They are slow, and
communicate over sockets, as between machines.
"""

import argparse
import dataclasses
import gc
import itertools
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from bench import results
from bench.correctness import reference
from bench.correctness.reference import NEW_TOKENS, Reference, Scored
from bench.load.options import counts, fractions
from bench.replica.replica import again
from bench.replica.synthetic_drafts import RecordedOutputs, SyntheticDrafter
from bench.results import Figure, number
from pipeline.schedule import POLICIES
from pipeline.shape import BatchShape
from shoal.help import Parser
from worker.config import WorkerConfig
from worker.drafts import Drafter
from worker.engine.cost_store import CostStore
from worker.engine.engine import Engine, Finished, load_components
from worker.executor.launch import open_executor
from worker.messages import SamplingParams

TIE = 1e-4
DTYPES = ("float32", "bfloat16")
WORSE_BY_ERRORS = 3.0  # standard errors by which our agreement in bfloat16 may be below that of transformers
BRIEF, BRIEF_ROUNDS = 4, 8  # longest brief output in tokens, and rounds of all brief outputs
BASE = {"kv_tokens": 16384, "context_length": 512, "max_running": 32, "token_budget": 2048}


@dataclass(frozen=True)
class ExactnessCase:
    """Settings of a scheduler, and the runs with these settings, in order.

    | run | prompts |
    | --- | --- |
    | `alone` | every third prompt, each by itself from an empty cache |
    | `cold` | all prompts at once, from an empty cache |
    | `warm` | all prompts at once, from the cache of the run before |
    | `brief` | all prompts at once, several times; a stop token ends each output after a few tokens |

    After `brief`, the scheduler expects short outputs. In the next run it admits too many sequences, and must preempt.

    Prompts longer than `longest` tokens are left out. With `preempts`, a case without a preemption is a failure, since
    it would test nothing.
    """

    name: str
    settings: dict[str, Any]
    runs: tuple[str, ...] = ("cold",)
    longest: int = max(reference.LENGTHS)
    preempts: bool = False

    def scheduled(self, schedule: str | None) -> "ExactnessCase":
        """The case with another schedule; None stands for the default."""
        if schedule is None:
            return self
        return dataclasses.replace(
            self, name=f"{self.name}, {schedule}", settings=self.settings | {"schedule": schedule}
        )


CASES = (
    ExactnessCase("whole", {}, ("alone", "cold", "warm")),
    ExactnessCase(
        "preempted", {"kv_tokens": 384, "context_length": 128, "token_budget": 96}, ("brief", "cold", "warm"), 64, True
    ),
    ExactnessCase("chunks of 64", {"token_budget": 64}),
    ExactnessCase("chunks of 7", {"token_budget": 7}, longest=64),
    ExactnessCase("chunks of 1", {"token_budget": 1}, longest=8),
)
ALONE = slice(None, None, 3)


@dataclass
class Verdict:
    """Comparison of outputs with the reference's. `ties` and `wrong` have an entry for each output that differs: the
    index of the output, the first differing position, and the lead of the likeliest token's logit there."""

    sequences: int = 0
    identical: int = 0
    ties: list[tuple[int, int, float]] = field(default_factory=list)
    wrong: list[tuple[int, int, float]] = field(default_factory=list)
    preemptions: int = 0
    accepted_drafts: int = 0
    problem: str = ""

    @property
    def right(self) -> bool:
        return not self.wrong and not self.problem


def compare(ours: Sequence[list[int]], said: Sequence[list[int]], margins: Sequence[Sequence[float]]) -> Verdict:
    """Compares each output in `ours` with the reference's in `said`. `margins`: the likeliest token's lead at each
    position of each output."""
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
    """Agreement of bfloat16 with float32.

    | field | meaning |
    | --- | --- |
    | `positions` | number of positions compared |
    | `ours`, `theirs` | share of positions with float32's likeliest token, for Shoal and transformers in bfloat16 |
    | `error` | standard error of the difference between the two shares |
    | `ours_rms`, `theirs_rms` | root mean square error of log probabilities; None if not measured |
    """

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
    """Agreement of `ours` and `theirs` with `exact`. All are likeliest tokens, int64 `[positions]`."""
    own, other = (ours == exact).double(), (theirs == exact).double()
    error = (own - other).std(correction=0).item() * len(exact) ** -0.5
    return Agreement(len(exact), own.mean().item(), other.mean().item(), error)


class Check:
    """A model on a device, and the reference's outputs and scores."""

    def __init__(self, name: str, folder: Path, device: str, share_gpus: bool, acceptance: Sequence[float]) -> None:
        """`acceptance`: of the drafts, as in `RecordedOutputs`; empty for none."""
        self.name, self.device, self._share_gpus, self._acceptance = name, device, share_gpus, acceptance
        self.folder = reference.make(name, folder)
        self._exact = exact = Reference(self.folder, device, torch.float32)
        self.prompts = reference.prompts(reference.MODELS[name].vocabulary)
        self.said = exact.generate(self.prompts)
        self.whole = [prompt + said for prompt, said in zip(self.prompts, self.said, strict=True)]
        self.scored = [exact.score(sequence) for sequence in self.whole]
        self.margins = [scored.margins[-NEW_TOKENS:].tolist() for scored in self.scored]
        # A stop token that never occurs: with a stop token, the scheduler must guess how long outputs get.
        never = min(set(range(reference.MODELS[name].vocabulary)).difference(*self.said))
        self.greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, stop_token_ids=(never,))

    @contextmanager
    def replica(self, dtype: str, tp: int, pp: int, **settings: Any) -> Iterator["ExactReplica"]:
        """Loads the model in `pp` stages of `tp` ranks."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        settings = BASE | {"device": self.device, "dtype": dtype, "tp": tp, "pp": pp} | settings
        if self._acceptance:
            settings |= {"speculation": "auto", "jump_forward": "off"}
        replica = ExactReplica(self.folder, settings, self._share_gpus)
        try:
            yield replica
        finally:
            replica.close()

    def float32(self, replica: "ExactReplica", case: ExactnessCase) -> Verdict:
        """Executes all runs of a case and compares the outputs with the reference's."""
        chosen = [i for i, prompt in enumerate(self.prompts) if len(prompt) <= case.longest]
        prompts, said = [self.prompts[i] for i in chosen], [self.said[i] for i in chosen]
        margins: list[list[float]] = [self.margins[i] for i in chosen]
        outputs: list[list[int]] = []
        expected: list[list[int]] = []
        leads: list[list[float]] = []
        with replica.engine(case.settings, self._drafters()) as engine:
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
            load = engine.load()
        verdict = compare(outputs, expected, leads)
        verdict.preemptions, verdict.accepted_drafts = load.preemptions, sum(load.accepted.values())
        if case.preempts and not load.preemptions:
            verdict.problem = "no sequence was preempted"
        if self._acceptance and not verdict.accepted_drafts:
            verdict.problem = "no draft was accepted"
        return verdict

    @cached_property
    def _rough(self) -> Reference:
        return Reference(self.folder, self.device, torch.bfloat16)

    @cached_property
    def _theirs(self) -> list[Scored]:
        """Scores of `whole` in bfloat16."""
        return [self._rough.score(sequence) for sequence in self.whole]

    def _drafters(self) -> Sequence[Drafter]:
        if not self._acceptance:
            return ()
        vocab_size = reference.MODELS[self.name].vocabulary
        return (SyntheticDrafter(RecordedOutputs(self.prompts, self.said, self._acceptance, vocab_size)),)

    def bfloat16(self, tp: int, pp: int) -> dict[str, Agreement]:
        """Agreement in bfloat16, in two ways.

        - `prefill`: all positions of prompts and outputs, computed in large chunks.
        - `decode`: the positions of the outputs that Shoal generates, each computed as one token of a batch.
        """
        with self.replica("bfloat16", tp, pp) as replica, replica.engine({}) as engine:
            asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
            read = [_scored(finished) for finished in engine.generate(self.whole, asked)]
            engine.reset_cache()
            said = tokens(engine.generate(self.prompts, SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0)))
        exact, ours, theirs = (_joined(scores) for scores in (self.scored, read, self._theirs))
        prefill = agreement(exact.likeliest, ours.likeliest, theirs.likeliest)
        found = asdict(prefill) | {"ours_rms": _rms(ours, exact), "theirs_rms": _rms(theirs, exact)}
        # Outputs in bfloat16 part from those in float32 somewhere, so they are sequences of their own.
        whole = [prompt + output for prompt, output in zip(self.prompts, said, strict=True)]
        exact, theirs = (_joined(map(model.score, whole), NEW_TOKENS) for model in (self._exact, self._rough))
        return {
            "prefill": Agreement(**found),
            "decode": agreement(exact.likeliest, torch.tensor(said).flatten(), theirs.likeliest),
        }


class DraftsAlwaysPay(CostStore):
    """Cost models by which a step takes no longer for its drafts. The schedule has the models themselves."""

    def seconds(self, shape: BatchShape) -> float:
        return 1.0


class ExactReplica:
    """A model that is loaded once, for several engines in turn, each with a scheduler and a cache of its own."""

    def __init__(self, folder: Path, settings: dict[str, Any], share_gpus: bool) -> None:
        self._folder, self._settings = folder, settings
        open_ranks = partial(open_executor, share_gpus=share_gpus)
        self._parts = load_components(folder, WorkerConfig.model_validate(settings), open_ranks)

    @contextmanager
    def engine(self, settings: dict[str, Any], drafters: Sequence[Drafter] = ()) -> Iterator[Engine]:
        """An engine with these settings of the scheduler. All that the drafters propose is verified."""
        config = WorkerConfig.model_validate(self._settings | settings)
        parts, store = self._parts._replace(drafters=drafters), DraftsAlwaysPay if drafters else CostStore
        with again(self._folder, config, parts, store) as engine:
            yield engine

    def close(self) -> None:
        """Ends the executor and the grammar compiler."""
        self._parts.grammars.close()
        self._parts.executor.close()


def tokens(finished: list[Finished]) -> list[list[int]]:
    """The output tokens of all requests. Raises RuntimeError if a request failed."""
    for one in finished:
        if one.failure is not None:
            raise RuntimeError(f"a request failed: {one.failure.message}")
    return [one.token_ids for one in finished]


def _scored(finished: Finished) -> Scored:
    tokens([finished])
    rows = [row for row in finished.prompt_logprobs or [] if row is not None]
    likeliest = torch.tensor([row.top[0][0] for row in rows])
    return Scored(likeliest, torch.tensor([]), torch.tensor([row.logprob for row in rows]))


def _joined(scores: Iterable[Scored], last: int = 0) -> Scored:
    """The scores of several sequences, concatenated. Only the `last` positions of each sequence, or all if 0."""
    each = list(scores)
    parts = ([getattr(one, name)[-last:] for one in each] for name in ("likeliest", "margins", "logprobs"))
    return Scored(*(torch.cat(part) for part in parts))


def _rms(rough: Scored, exact: Scored) -> float:
    return (rough.logprobs - exact.logprobs).double().square().mean().sqrt().item()


def parser() -> Parser:
    """The command line."""
    p = Parser("shoal bench exactness", __doc__)
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    p.add_argument(
        "--models",
        type=_models,
        default="llama,smollm2",
        metavar="A,B",
        help=f"all, or some among {', '.join(reference.MODELS)}",
    )
    p.add_argument(
        "--dtypes",
        type=_among("dtype", DTYPES),
        default=list(DTYPES),
        metavar="A,B",
        help="among float32, bfloat16 (default: both)",
    )
    p.add_argument("--tp", type=counts, default=[1], metavar="N,M", help="numbers of ranks per stage (default 1)")
    p.add_argument(
        "--pp",
        type=counts,
        default=[1],
        metavar="N,M",
        help="numbers of stages, each combined with each --tp (default 1)",
    )
    p.add_argument(
        "--cases", type=_cases, default=CASES, metavar="A,B", help=f"among {', '.join(case.name for case in CASES)}"
    )
    p.add_argument(
        "--schedules",
        type=_among("schedule", POLICIES),
        default=[None],
        metavar="A,B",
        help="schedules in float32 (default: the replica's own)",
    )
    p.add_argument(
        "--drafts",
        type=fractions,
        default=[],
        metavar="A,B",
        help="in float32, verify drafts of which the first, second and so on are right so often (default: no drafts)",
    )
    p.add_argument("--share-gpus", action="store_true", help="put several ranks on a GPU if there are too few GPUs")
    results.add_options(p, None, "DEVICE.exact and the layouts")
    return p


def _among(what: str, known: Collection[str]) -> Callable[[str], list[Any]]:
    def names(text: str) -> list[Any]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"no {what} {unknown[0]}: there are {', '.join(known)}")
        return text.split(",")

    return names


def _models(text: str) -> list[str]:
    every = {"all": list(reference.FAMILIES)}
    return every.get(text) or _among("model", reference.MODELS)(text)


def _cases(text: str) -> tuple[ExactnessCase, ...]:
    names = _among("case", [case.name for case in CASES])(text)
    return tuple(case for case in CASES if case.name in names)


def main(argv: list[str] | None = None) -> int:
    """Runs everything, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser().error("PyTorch finds no GPU: --device cpu, which the tiny model is for (--models tiny)")
    report = ExactnessReport("gpu" if args.device == "cuda" else "cpu")
    ranks = "".join(
        f"{way}{'-'.join(map(str, each))}" for way, each in (("tp", args.tp), ("pp", args.pp)) if each != [1]
    )
    result = args.name or f"{report.kind}.exact.{ranks or 'tp1'}{'.drafts' if args.drafts else ''}"
    for name in args.models:
        try:
            if reference.is_known(name):
                _run(report, name, args)
            else:
                report.left_out(name)
        except Exception as error:  # of any kind: the other models are compared all the same
            traceback.print_exc()
            report.failed(name, error)
        path = results.write(result, report.figures, report.raw, folder=args.out)
    print(f"{'all right' if report.right else 'WRONG'}; written: {path.name}")
    return 0 if report.right else 1


def _run(report: "ExactnessReport", name: str, args: argparse.Namespace) -> None:
    """Compares the model `name` in all layouts that it can have."""
    with tempfile.TemporaryDirectory(prefix="shoal-exact-") as scratch:
        check = Check(name, Path(scratch) / name, args.device, args.share_gpus, args.drafts)
        for tp, pp in itertools.product(args.tp, args.pp):
            if tp not in reference.MODELS[name].tp or pp > reference.MODELS[name].layers:
                print(f"{name} cannot be shared out to {pp} stages of {tp} ranks", flush=True)
                continue
            if args.device == "cuda" and tp * pp > torch.cuda.device_count() and not args.share_gpus:
                print(f"{pp} stages of {tp} ranks are more than there are GPUs", flush=True)
                continue
            report.run(check, tp, pp, args.schedules, args.cases, args.dtypes)


class ExactnessReport:
    """Figures named `KIND.exact...`, the data behind them, and whether all outputs were right."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.figures: list[Figure] = []
        self.raw: dict[str, Any] = {}
        self.right = True
        self._began_s = time.monotonic()

    def left_out(self, name: str) -> None:
        """Notes that the installed `transformers` has no such model."""
        why = f"transformers {version('transformers')} has no {reference.MODELS[name].model_type}"
        print(f"{name} is not compared: {why}", flush=True)
        self.raw[name] = {"not_compared": why}

    def failed(self, name: str, error: Exception) -> None:
        """Notes that a model could not be compared to the end."""
        self._say(f"{self.kind}.exact.{name}", False, f"{type(error).__name__}: {error}")
        self.raw[name] = {"failed": f"{type(error).__name__}: {error}"}

    def run(
        self,
        check: Check,
        tp: int,
        pp: int,
        schedules: Sequence[str | None],
        cases: Sequence[ExactnessCase],
        dtypes: Collection[str],
    ) -> None:
        """Runs the cases of a model in `pp` stages of `tp` ranks with each of the schedules. Prints a line per case."""
        ranks = f"tp{tp}" if pp == 1 else f"tp{tp}pp{pp}"
        label = f"{self.kind}.exact.{check.name}.{ranks}"
        found: dict[str, Any] = {}
        if "float32" in dtypes:
            found["float32"] = self._float32(label, check, tp, pp, schedules, cases)
        if "bfloat16" in dtypes:
            found["bfloat16"] = self._bfloat16(label, check, tp, pp)
        self.raw[f"{check.name}.{ranks}"] = found

    def _float32(
        self,
        label: str,
        check: Check,
        tp: int,
        pp: int,
        schedules: Sequence[str | None],
        cases: Sequence[ExactnessCase],
    ) -> dict[str, Any]:
        verdicts = {}
        with check.replica("float32", tp, pp) as replica:
            for case in (case.scheduled(schedule) for schedule in schedules for case in cases):
                verdicts[case.name] = verdict = check.float32(replica, case)
                same = f"{verdict.identical} of {verdict.sequences} same"
                self._say(f"{label} float32 {case.name}", verdict.right, same)
                if verdict.ties or verdict.wrong or verdict.problem:
                    print(f"    ties {verdict.ties} wrong {verdict.wrong} {verdict.problem}")
        identical, all_ = (sum(getattr(v, what) for v in verdicts.values()) for what in ("identical", "sequences"))
        self.figures.append(Figure(f"{label}.float32.identical", identical / all_, "ratio", True))
        return {name: asdict(verdict) for name, verdict in verdicts.items()}

    def _bfloat16(self, label: str, check: Check, tp: int, pp: int) -> dict[str, Any]:
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
        return {way: asdict(found) for way, found in agreements.items()}

    def _say(self, what: str, right: bool, found: str) -> None:
        self.right &= right
        elapsed_s = time.monotonic() - self._began_s
        print(f"{elapsed_s:6.1f} s  {what:48s} {'right' if right else 'WRONG'}  {found}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
