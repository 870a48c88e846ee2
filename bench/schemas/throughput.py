"""Throughput of answers to schemas, next to the same tokens as free text.

    python -m bench.schemas.throughput --write answers.json
    python -m bench.schemas.throughput --answers answers.json --model llama-8b --device cuda

1. --write picks schemas of the corpus that are accepted, and valid instances of each as its answers.
2. The other call needs no corpus and no tokenizer of a real model: weights are random, and each output is replaced by
   an answer when its tokens have come to the host. Everything else is as in a replica: masks, steps, sampling.
   Schemas are compiled before; those that the machine refuses are left out and counted.
3. Rounds with grammars and without alternate, after one of each that does not count. Prompts and outputs are the same.

| figure | meaning |
| --- | --- |
| `schemas.gpu.throughput_vs_text` | tokens per second with grammars over those without, the median of the rounds |
| `schemas.gpu.output_tok_s` | tokens per second with grammars |
"""

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.load.options import count
from bench.replica import dummy_models
from bench.replica.offline_workloads import fresh
from bench.results import Figure, add_options, publish
from cluster.models import resolve
from shoal.help import Parser
from worker.config import WorkerConfig
from worker.folders import cache_folder
from worker.messages import Grammar, SamplingParams

if TYPE_CHECKING:
    from worker.engine.engine import Engine
    from worker.structured_output import GrammarCompiler

PROMPT_TOKENS = 128
# Of an answer. Long ones would leave few of the requests, and a replica whose slots are empty at the end.
MIN_BYTES, MAX_BYTES = 64, 512
ANSWERS_A_SCHEMA = 8
ATTEMPTS = 3  # to compile a schema


@dataclass(frozen=True)
class Answers:
    """The answers to a schema, as texts."""

    schema: str
    texts: list[str]


def pick(corpus: Path, model: str, schemas: int) -> list[Answers]:
    """Accepted schemas with some of their valid instances that their grammars allow, by chance."""
    from bench.schemas import gather
    from bench.schemas.command import TIMEOUT_S, Corpus, allows
    from bench.schemas.instances import instances
    from worker.structured_output import GrammarCompiler

    published = gather.corpus(corpus)
    random.Random(0).shuffle(published)
    found, picked = Corpus([], resolve(model)), list[Answers]()
    compiler = GrammarCompiler(found.model_dir, found.vocab_size, TIMEOUT_S, found.end_ids)
    try:
        for each in published:
            valid = instances(each.schema, each.name, ANSWERS_A_SCHEMA, 0).valid
            if not (texts := [text for text in valid if MIN_BYTES <= len(text.encode()) <= MAX_BYTES]):
                continue
            future = compiler.submit(Grammar("json_schema", each.text))
            if future.exception() is not None:
                continue
            if allowed := [text for text in texts if allows(future.result(), found.tokens(text))]:
                picked.append(Answers(each.text, allowed))
                if len(picked) == schemas:
                    return picked
    finally:
        compiler.close()
    raise ValueError(f"the corpus has {len(picked)} such schemas, not {schemas}")


@dataclass
class Job:
    """Requests, and the tokens with which they are answered, the end token last."""

    prompts: list[list[int]]
    outputs: list[list[int]]
    grammars: list[Grammar]

    @classmethod
    def of(cls, answers: list[Answers], folder: Path, requests: int) -> "Job":
        """Requests for all schemas in turn, in the tokens of a dummy model."""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        end_id = json.loads((folder / "config.json").read_text())["eos_token_id"]
        job = cls([], [], [])
        for number, each in zip(range(requests), itertools.cycle(answers), strict=False):
            text = each.texts[number // len(answers) % len(each.texts)]
            job.prompts.append(fresh(PROMPT_TOKENS, number))
            job.outputs.append([*tokenizer.encode(text, add_special_tokens=False).ids, end_id])
            job.grammars.append(Grammar("json_schema", each.schema))
        return job

    def sampling(self, guided: bool) -> list[SamplingParams]:
        """Parameters of each request. A guided one ends with its end token, another one with as many tokens."""
        return [
            SamplingParams(
                max_tokens=len(output),
                temperature=1.0,
                seed=1,
                ignore_eos=not guided,
                grammar=grammar if guided else None,
            )
            for output, grammar in zip(self.outputs, self.grammars, strict=True)
        ]

    def without(self, refused: set[Grammar]) -> "Job":
        """The requests whose grammars are not among these."""
        kept = [i for i, grammar in enumerate(self.grammars) if grammar not in refused]
        prompts, outputs = [self.prompts[i] for i in kept], [self.outputs[i] for i in kept]
        return Job(prompts, outputs, [self.grammars[i] for i in kept])

    @property
    def padded_outputs(self) -> list[list[int]]:
        """All of the same length, the last token repeated."""
        longest = max(map(len, self.outputs))
        return [output + output[-1:] * (longest - len(output)) for output in self.outputs]


def measure(folder: Path, config: WorkerConfig, whole: Job, rounds: int) -> tuple[Job, dict[str, list[float]]]:
    """The requests whose schemas compile, and tokens per second of each round, by kind. Raises RuntimeError if an
    output is not the expected one."""
    from bench.replica import replica
    from bench.replica.synthetic_drafts import RecordedOutputs, ReplayingSampler
    from worker.engine.engine import Components, Engine

    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    rates: dict[str, list[float]] = {"text": [], "schemas": []}
    with replica.started(folder, config) as engine:
        job = whole.without(refused(engine.grammars, whole.grammars))
        recording = RecordedOutputs(job.prompts, job.padded_outputs, (), vocab_size)
        tokens = sum(map(len, job.outputs))
        executor = engine.executor
        sampler = ReplayingSampler(
            recording, config.max_running, executor.vocab_size, executor.device, executor.last_tokens
        )
        parts = Components(executor, sampler, engine.grammars, engine.costs)
        replaying = Engine(folder, config, load=lambda *_: parts)
        for number in range(-1, rounds):
            for kind in ("text", "schemas") if number % 2 else ("schemas", "text"):
                rate = tokens / _seconds(replaying, job, kind == "schemas")
                print(f"  {kind:8} {rate:10,.0f} tokens/s{'' if number >= 0 else '  (warm-up)'}", flush=True)
                if number >= 0:
                    rates[kind].append(rate)
        replaying.check_integrity()
    return job, rates


def refused(compiler: "GrammarCompiler", grammars: list[Grammar]) -> set[Grammar]:
    """The grammars that do not compile in ATTEMPTS attempts: with all the others, then with those left."""
    left = set(grammars)
    for _ in range(ATTEMPTS):
        errors = {grammar: future.exception() for grammar, future in [(each, compiler.submit(each)) for each in left]}
        left = {grammar for grammar, error in errors.items() if error is not None}
    for grammar in left:
        print(f"  left out: {errors[grammar]}", flush=True)
    return left


def _seconds(engine: "Engine", job: Job, guided: bool) -> float:
    """The time for the whole job, from an empty cache."""
    asked = job.sampling(guided)
    engine.reset_cache()
    began_s = time.perf_counter()
    finished = engine.generate(job.prompts, asked)
    took_s = time.perf_counter() - began_s
    for done, output in zip(finished, job.outputs, strict=True):
        if done.failure is not None:
            raise RuntimeError(f"a request failed: {done.failure.message}")
        if done.token_ids != output:
            raise RuntimeError(f"an output of {len(done.token_ids)} tokens is not its answer of {len(output)}")
    return took_s


def parser() -> Parser:
    """The command line."""
    p = Parser("python -m bench.schemas.throughput", __doc__)
    p.add_argument("--write", type=Path, metavar="FILE", help="write schemas and answers there, and end")
    p.add_argument("--answers", type=Path, metavar="FILE", help="schemas and answers that --write wrote")
    p.add_argument("--corpus", type=Path, metavar="DIR", help="of --write; default: in the cache")
    p.add_argument("--schemas", type=count, default=64, metavar="N", help="of --write; default: %(default)s")
    p.add_argument("--model", choices=sorted(dummy_models.SHAPES), default="llama-8b", help="default: %(default)s")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="default: %(default)s")
    p.add_argument("--max-running", type=count, default=256, metavar="N", help="default: %(default)s")
    p.add_argument("--requests", type=count, default=1536, metavar="N", help="default: %(default)s")
    p.add_argument("--rounds", type=count, default=3, metavar="N", help="default: %(default)s")
    add_options(p, "schemas.gpu")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result. Returns the exit code."""
    args = parser().parse_args(argv)
    if args.write is not None:
        picked = pick(args.corpus or cache_folder() / "schemas", "SmolLM2-135M-Instruct", args.schemas)
        args.write.write_text(json.dumps([vars(each) for each in picked]))
        print(f"written: {args.write}, {len(picked)} schemas, {sum(len(each.texts) for each in picked)} answers")
        return 0
    if args.answers is None:
        parser().error("--answers FILE is missing, or --write FILE to make one")
    answers = [Answers(**each) for each in json.loads(args.answers.read_text())]
    return run(args, answers)


def run(args: argparse.Namespace, answers: list[Answers]) -> int:
    """Measures these answers. Returns the exit code."""
    with dummy_models.written(args.model) as folder:
        job = Job.of(answers, folder, args.requests)
        settings: dict[str, Any] = {
            "load_format": "dummy",
            "device": args.device,
            "dtype": "bfloat16" if args.device == "cuda" else "float32",
            "max_running": args.max_running,
        }
        job, rates = measure(folder, WorkerConfig.model_validate(settings), job, args.rounds)
    ratios = [ours / text for ours, text in zip(rates["schemas"], rates["text"], strict=True)]
    figures = [
        Figure("schemas.gpu.throughput_vs_text", statistics.median(ratios), "ratio", True),
        Figure("schemas.gpu.output_tok_s", statistics.median(rates["schemas"]), "tokens/s", True),
    ]
    about = {
        "rates": rates,
        "schemas": len(set(job.grammars)),
        "schemas_left_out": len({each.schema for each in answers}) - len(set(job.grammars)),
        "requests": len(job.prompts),
        "tokens": sum(map(len, job.outputs)),
        "max_running": args.max_running,
        "model": args.model,
    }
    publish(args.name, figures, about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
