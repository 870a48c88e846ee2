"""Drafts on a real model: the same requests with `speculation: auto` and with `off`, side by side.

    shoal bench drafts
    shoal bench drafts --workloads form,chat --rounds 1

All of it takes about ten minutes on two cores.

form     messages to be entered in one form of eight fields with short values: one after another (latency), and
         twelve of which four run at once (throughput)
schemas  examples of objects by the schemas of public packages, one after another
edit     a given text with a name replaced, one after another: with the text as OpenAI's `prediction`, and without
chat     open questions at temperature 0.7: one after another, and eight of which four run at once

Two engines in this process take turns, request by request, or batch by batch. A round has requests of its own; one
round of each workload comes first and does not count. A figure is the time without drafts divided by that with them,
prompts included, the median of the rounds. `edit.vs_off` is the lower one of its two.

Outputs must be equal token for token. The exit code is 1 if any differ. In float32, sums of steps of different shapes
differ in the last bits. So a random number may fall between two boundaries that are 1e-7 apart: of some ten thousand
tokens drawn from the whole vocabulary, one differs. Greedy sampling and top-p have far fewer such boundaries.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import results
from bench.load.options import count
from bench.replica.draft_workloads import AT_ONCE, WORKLOADS, DraftRequest, DraftWorkload
from bench.results import Figure
from bench.targets import print_table
from shoal.help import Parser

if TYPE_CHECKING:  # slow to import
    from worker.messages import SamplingParams

SIDES = ("off", "auto")


@dataclass
class SideRun:
    """Measurements of one side of a round: seconds, output tokens, steps, and drafts by drafter: verified, right."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    outputs: list[list[int]] = field(default_factory=list, repr=False)


class Chat:
    """The requests of a model's chat template, as prompts."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ValueError for a model without a chat template."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model_dir)
        if not self._tokenizer.chat_template:
            raise ValueError(f"{model_dir.name} has no chat template: name a chat model with --model")

    def prompt(self, asked: DraftRequest) -> list[int]:
        """The tokens of the prompt."""
        messages = [{"role": "user", "content": asked.text}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return self._ids(str(text))

    def prediction(self, asked: DraftRequest) -> list[int]:
        """The tokens of the client's guess at the answer."""
        return self._ids(asked.prediction)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


class Side:
    """An engine with drafts or without."""

    def __init__(self, model_dir: Path, speculation: str, settings: dict[str, Any]) -> None:
        from worker.config import WorkerConfig
        from worker.engine.engine import Engine

        config = WorkerConfig.model_validate({**settings, "speculation": speculation})
        self.engine: Engine = Engine(model_dir, config)

    def add(self, run: SideRun, prompts: Sequence[list[int]], predictions: Sequence[list[int]], sampling: Any) -> None:
        """Runs requests at once, from an empty cache, and adds them to `run`. Raises RuntimeError if one fails."""
        self.engine.reset_cache()
        before, begun_s = self.engine.load(), time.perf_counter()
        finished = self.engine.generate(list(prompts), list(sampling), predictions=predictions)
        run.seconds += time.perf_counter() - begun_s
        after = self.engine.load()
        if failed := next((each.failure for each in finished if each.failure is not None), None):
            raise RuntimeError(f"a request failed: {failed.message}")
        run.outputs += [each.token_ids for each in finished]
        run.tokens += sum(len(each.token_ids) for each in finished)
        run.steps += after.steps - before.steps
        for counted, old, new in (
            (run.drafted, before.drafted, after.drafted),
            (run.accepted, before.accepted, after.accepted),
        ):
            for name, number in new.items():
                counted[name] = counted.get(name, 0) + number - old.get(name, 0)


def sampling_of(asked: DraftRequest, seed: int) -> "SamplingParams":
    """The sampling parameters of a request."""
    from worker.messages import Grammar, SamplingParams

    grammar = None if asked.schema is None else Grammar("json_schema", json.dumps(asked.schema))
    return SamplingParams(
        max_tokens=asked.max_tokens, temperature=asked.temperature, top_p=asked.top_p, seed=seed, grammar=grammar
    )


class Comparison:
    """Runs workloads on both sides."""

    def __init__(self, sides: dict[str, Side], chat: Chat) -> None:
        self._sides, self._chat = sides, chat
        self.rounds: dict[str, list[dict[str, SideRun]]] = {}
        """By figure, the rounds that count."""
        self.num_different = 0
        """Outputs that differ, of all rounds."""

    def compare(self, workload: DraftWorkload, rounds: int) -> None:
        """Runs the rounds of a workload, after one that does not count."""
        found = self.rounds[workload.figure] = []
        for number in range(rounds + 1):
            runs = self._round(workload, number)
            different = differences(runs)
            self.num_different += len(different)
            print(f"  {workload.figure:26s} {line(runs)}{'' if number else '  (warm-up)'}", flush=True)
            for place, token in different:
                print(f"  the output of request {place} differs from token {token} on", flush=True)
            if number:
                found.append(runs)

    def ratio(self, figure: str) -> float:
        """Seconds without drafts divided by those with them, the median of the rounds."""
        return statistics.median(runs["off"].seconds / runs["auto"].seconds for runs in self.rounds[figure])

    def figures(self, name: str) -> Iterator[Figure]:
        """The figures, their names prefixed with `name`."""
        for figure in self.rounds:
            yield Figure(f"{name}.{figure}", self.ratio(figure), "ratio", True)
        edits = [figure for figure in self.rounds if figure.startswith("edit.")]
        if edits:
            yield Figure(f"{name}.edit.vs_off", min(self.ratio(figure) for figure in edits), "ratio", True)

    def raw(self) -> dict[str, Any]:
        """All measurements without the outputs, for the result file."""
        return {
            figure: [{side: _without_outputs(run) for side, run in runs.items()} for runs in rounds]
            for figure, rounds in self.rounds.items()
        }

    def _round(self, workload: DraftWorkload, number: int) -> dict[str, SideRun]:
        asked = workload.requests(number)
        prompts = [self._chat.prompt(each) for each in asked]
        predictions = [self._chat.prediction(each) for each in asked]
        sampling = [sampling_of(each, seed) for seed, each in enumerate(asked)]
        runs = {side: SideRun() for side in SIDES}
        groups = [slice(None)] if workload.at_once else [slice(i, i + 1) for i in range(len(asked))]
        for turn, group in enumerate(groups, number):
            for side in SIDES if turn % 2 else SIDES[::-1]:
                self._sides[side].add(runs[side], prompts[group], predictions[group], sampling[group])
        return runs


def line(runs: dict[str, SideRun]) -> str:
    """A round for the terminal."""
    off, auto = runs["off"], runs["auto"]
    drafts = ", ".join(f"{name} {auto.accepted[name]}/{auto.drafted[name]}" for name in auto.drafted)
    return (
        f"off {off.seconds:6.2f} s, auto {auto.seconds:6.2f} s: x{off.seconds / auto.seconds:.2f}; {auto.tokens} "
        f"tokens in {off.steps} and {auto.steps} steps; drafts right: {drafts or 'none'}"
    )


def differences(runs: dict[str, SideRun]) -> list[tuple[int, int]]:
    """The outputs that differ, by number, and the first token of each that does."""
    found = []
    for place, both in enumerate(zip(*(runs[side].outputs for side in SIDES), strict=True)):
        if both[0] != both[1]:
            alike = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
            found.append((place, alike))
    return found


def _without_outputs(run: SideRun) -> dict[str, Any]:
    return {name: value for name, value in asdict(run).items() if name != "outputs"}


def parser() -> Parser:
    p = Parser("shoal bench drafts", __doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name, a folder, a .gguf file, or a hub id")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of weights and KV cache")
    p.add_argument("--workloads", default=",".join(WORKLOADS), help=f"default {','.join(WORKLOADS)}")
    p.add_argument("--rounds", type=count, default=2, help="rounds of each workload that count (default 2)")
    p.add_argument("--kv-tokens", type=count, default=16384, help="KV cache of each engine, in tokens (default 16384)")
    results.add_options(p, "drafts.cpu")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs the workloads, writes the result file. Returns the exit code."""
    options = parser()
    args = options.parse_args(argv)
    names = args.workloads.split(",")
    if unknown := [name for name in names if name not in WORKLOADS]:
        options.error(f"--workloads {unknown[0]}: there are {', '.join(WORKLOADS)}")
    from cluster.models import ModelError, resolve

    try:
        model_dir = resolve(args.model)
        chat = Chat(model_dir)
    except (ModelError, ValueError) as error:
        print(f"shoal bench drafts: {error}", file=sys.stderr)
        return 1
    import torch

    settings = {"dtype": args.dtype, "kv_tokens": args.kv_tokens, "max_running": AT_ONCE}
    comparison = Comparison({side: Side(model_dir, side, settings) for side in SIDES}, chat)
    try:
        for name in names:
            for workload in WORKLOADS[name]:
                comparison.compare(workload, args.rounds)
    except ModuleNotFoundError as error:  # of a package with schemas
        print(
            f"shoal bench drafts: {error}: install the `dev` extra, or leave out schemas (--workloads)", file=sys.stderr
        )
        return 1
    raw = {
        "rounds": comparison.raw(),
        "different_outputs": comparison.num_different,
        "threads": torch.get_num_threads(),
        **settings,
    }
    figures = list(comparison.figures(args.name))
    path = results.write(args.name, figures, raw, folder=args.out)
    print_table(figures, path)
    different = comparison.num_different
    print(f"{different} outputs differ" if different else "all outputs are equal, token for token")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
