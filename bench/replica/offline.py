"""Throughput of the engine without a server, compared with `transformers` on the same machine, model and prompts.

    shoal bench offline --vs transformers
    shoal bench offline --vs none             # Shoal alone

Two workloads, with greedy sampling and fixed output lengths:

varied  prompts of varied lengths, in groups that share a prefix
one     a single request

Two other systems, in turns with Shoal:

generate             left-padded batches of prompts sorted by output length, the best of several batch sizes
continuous batching  that of `transformers`, with its prefix sharing

The figures are Shoal's output tokens per second in the best round, and these divided by those of the best other system.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench import results
from bench.load.options import count
from bench.load.workload import Lengths, Vocabulary, shared_prefix, unrelated
from bench.results import Figure
from pipeline.schedule import POLICIES
from shoal.help import Parser

Tokens = list[list[int]]
Job = tuple[Tokens, list[int]]  # prompts and the output length of each


def varied(prompts: int, seed: int) -> Job:
    """`prompts` prompts in groups of 8. A group shares a prefix of 64 to 256 tokens. Each prompt has 16 to 128 tokens
    of its own, and 8 to 96 output tokens. All lengths are uniform."""
    rng = np.random.default_rng(seed)
    spread = Lengths.parse
    sessions = shared_prefix(
        rng, -(-prompts // 8), 8, spread("uniform:64:256"), spread("uniform:16:128"), spread("uniform:8:96")
    )[:prompts]
    return _job([session.turns[0] for session in sessions], seed)


def one(seed: int) -> Job:
    """A single prompt of 128 tokens, 64 output tokens."""
    sessions = unrelated(np.random.default_rng(seed), 1, Lengths.parse("128"), Lengths.parse("64"))
    return _job([sessions[0].turns[0]], seed)


def _job(turns: Sequence[Any], seed: int) -> Job:
    vocabulary = Vocabulary(seed)
    return [vocabulary.ids(turn.spans) for turn in turns], [turn.output_tokens for turn in turns]


# ---------------------------------------------------------------- systems


class Shoal:
    """Shoal's engine. Every round begins with an empty cache."""

    def __init__(self, model_dir: Path, settings: dict[str, Any]) -> None:
        from worker.config import WorkerConfig
        from worker.engine.engine import Engine

        self.engine = Engine(model_dir, WorkerConfig.model_validate(settings))

    def __call__(self, job: Job) -> Tokens:
        from worker.messages import SamplingParams

        self.engine.reset_cache()
        sampling = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in job[1]]
        return [finished.token_ids for finished in self.engine.generate(job[0], sampling)]

    def close(self) -> None:
        self.engine.close()


class HuggingFaceGenerate:
    """`model.generate` on left-padded batches of `batch` prompts."""

    def __init__(self, model: Any, batch: int) -> None:
        self.model, self.batch = model, batch

    def __call__(self, job: Job) -> Tokens:
        import torch

        prompts, lengths = job
        done: dict[int, list[int]] = {}
        order = sorted(range(len(prompts)), key=lambda i: lengths[i])
        for start in range(0, len(order), self.batch):
            rows = order[start : start + self.batch]
            width = max(len(prompts[i]) for i in rows)
            ids = torch.tensor([[0] * (width - len(prompts[i])) + prompts[i] for i in rows])
            mask = torch.tensor([[0] * (width - len(prompts[i])) + [1] * len(prompts[i]) for i in rows])
            longest = max(lengths[i] for i in rows)
            out = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=_greedy(longest, eos_token_id=None)
            )
            for row, i in zip(out[:, width:].tolist(), rows, strict=True):
                done[i] = row[: lengths[i]]
        return [done[i] for i in range(len(prompts))]


class ContinuousBatching:
    """`transformers`' continuous batching with prefix sharing, which needs the requests in sorted order."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, job: Job) -> Tokens:
        from transformers import ContinuousBatchingConfig

        prompts, lengths = job
        settings = ContinuousBatchingConfig(page_size=32, num_blocks=2048, max_batch_tokens=512)
        done: dict[str, list[int]] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=_greedy(max(lengths), eos_token_id=-1), continuous_batching_config=settings
        ) as manager:
            for i in sorted(range(len(prompts)), key=lambda i: prompts[i]):
                manager.add_request(prompts[i], request_id=str(i), max_new_tokens=lengths[i], eos_token_id=-1)
            while len(done) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done[result.request_id] = list(result.generated_tokens)
                elif not manager.is_running():
                    raise RuntimeError("transformers' continuous batching stopped before it had finished")
        return [done[str(i)] for i in range(len(prompts))]


def transformers_systems(model_dir: Path, dtype: str, batches: Sequence[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The systems of `transformers` for many requests, with the batch sizes of `generate` to try, and those for one."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype)).eval()
    continuous = {"transformers continuous batching": ContinuousBatching(model)}
    batched = {f"transformers generate, batch {n}": HuggingFaceGenerate(model, n) for n in batches}
    return {**batched, **continuous}, {"transformers generate": HuggingFaceGenerate(model, 1), **continuous}


def _greedy(max_new_tokens: int, eos_token_id: int | None) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=eos_token_id, pad_token_id=0, use_cache=True
    )


# ---------------------------------------------------------------- measuring


def measure(systems: dict[str, Callable[[Job], Tokens]], job: Job, rounds: int) -> dict[str, dict[str, Any]]:
    """Runs the job `rounds` times on every system, in turns. Returns for each system:

    | key | meaning |
    | --- | --- |
    | `seconds` | duration of each round |
    | `output_tokens_per_s` | in the best round |
    | `same_output` | the share of outputs that equal Shoal's token for token |

    Raises RuntimeError if a system returns an output of the wrong length.
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    outputs: dict[str, Tokens] = {}
    for _ in range(rounds):
        for name, system in systems.items():
            start = time.perf_counter()
            outputs[name] = system(job)
            seconds[name].append(time.perf_counter() - start)
            print(f"  {name:32s} {seconds[name][-1]:8.2f} s", flush=True)
            if [len(row) for row in outputs[name]] != job[1]:
                raise RuntimeError(f"{name} returned outputs of other lengths than asked for")
    ours = outputs["shoal"]
    return {
        name: {
            "seconds": taken,
            "output_tokens_per_s": sum(job[1]) / min(taken),
            "same_output": sum(a == b for a, b in zip(outputs[name], ours, strict=True)) / len(ours),
        }
        for name, taken in seconds.items()
    }


def figures(raw: dict[str, dict[str, dict[str, Any]]]) -> Iterator[Figure]:
    """Shoal's rates in both workloads, and these divided by those of the best other system, if there is one."""
    for name, prefix in (("varied", "cpu.offline"), ("one", "cpu.offline.one_request")):
        yield Figure(f"{prefix}.tok_s", raw[name]["shoal"]["output_tokens_per_s"], "tokens/s", True)
        if len(raw[name]) > 1:
            yield Figure(f"{prefix}.vs_transformers", ratio(raw[name]), "ratio", True)


def ratio(measured: dict[str, dict[str, Any]]) -> float:
    """Shoal's output tokens per second divided by those of the best other system."""
    rates = {name: row["output_tokens_per_s"] for name, row in measured.items()}
    return rates.pop("shoal") / max(rates.values())


def parser() -> Parser:
    p = Parser("shoal bench offline", __doc__)
    p.add_argument("--vs", choices=["transformers", "none"], default="transformers", help="the system to compare with")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name, a folder, a .gguf file, or a hub id")
    p.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="dtype of weights and KV cache, in all systems",
    )
    p.add_argument("--tp", type=count, default=1, help="Shoal: ranks per stage (default 1)")
    p.add_argument("--pp", type=count, default=1, help="Shoal: stages (default 1)")
    p.add_argument("--schedule", choices=sorted(POLICIES), help="Shoal: schedule (default: as for a server)")
    p.add_argument("--prompts", type=count, default=64, help="prompts of the varied workload (default 64)")
    p.add_argument("--rounds", type=count, default=2, help="rounds of each system and workload (default 2)")
    p.add_argument("--batch", type=count, nargs="+", default=[16, 32, 64], help="batch sizes of generate to try")
    p.add_argument("--seed", type=int, default=0, help="seed of the prompts (default 0)")
    p.add_argument("--trace", type=Path, metavar="FILE", help="write Shoal's latest steps there, for ui.perfetto.dev")
    results.add_options(p, "cpu.offline")
    return p


def main(argv: list[str] | None = None) -> int:
    """Runs both workloads, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    from cluster.models import ModelError, resolve

    try:
        model_dir = resolve(args.model)
    except ModelError as error:
        print(f"shoal bench offline: {error}", file=sys.stderr)
        return 1
    import torch

    settings = {"dtype": args.dtype, "tp": args.tp, "pp": args.pp, "schedule": args.schedule}
    shoal = Shoal(model_dir, settings)
    many, single = transformers_systems(model_dir, args.dtype, args.batch) if args.vs == "transformers" else ({}, {})
    raw = {}
    for name, job, others in (("varied", varied(args.prompts, args.seed), many), ("one", one(args.seed), single)):
        print(f"{name}: {len(job[0])} prompts, {sum(map(len, job[0]))} tokens in, {sum(job[1])} out", flush=True)
        raw[name] = measure({"shoal": shoal, **others}, job, args.rounds)
    if args.trace is not None:
        args.trace.write_text(shoal.engine.trace())
    shoal.close()
    print_table(raw)
    path = results.write(
        args.name,
        list(figures(raw)),
        {"workloads": raw, "threads": torch.get_num_threads(), **settings},
        folder=args.out,
    )
    print(f"written: {path}")
    return 0


def print_table(raw: dict[str, dict[str, dict[str, Any]]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("workload", "system", "best s", "output tokens/s", "same output as Shoal")
    for workload, measured in raw.items():
        for name, row in measured.items():
            rate, same = f"{row['output_tokens_per_s']:.1f}", f"{row['same_output']:.0%}"
            table.add_row(workload, name, f"{min(row['seconds']):.2f}", rate, same)
        table.add_section()
    console = Console()
    console.print(table)
    for workload, measured in raw.items():
        if len(measured) > 1:
            console.print(f"{workload}: {ratio(measured):.2f} times the best of transformers")


if __name__ == "__main__":
    sys.exit(main())
