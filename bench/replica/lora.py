"""Throughput with LoRA adapters against the base model alone: the same requests in one engine, in turns, without
adapters and spread over them.

    python -m bench.replica.lora --model llama-8b

throughput_vs_base            output tokens/s with adapters that change all linear layers, over those of the base model
attention.throughput_vs_base  the same for adapters of queries and values alone, as PEFT's default has them
first_use.seconds             until all requests have ended where no adapter has been read yet

Weights and adapters are random: speed does not depend on their values. All adapters of a kind are one file with several
names, so reading them is fast, but each has memory of its own on the device.
"""

import json
import random
import sys
import tempfile
import time
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from bench import results
from bench.replica import dummy_models
from bench.results import Figure
from worker.checkpoint.destinations import destinations
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.messages import Adapter, SamplingParams
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {"all": ALL, "attention": ("q_proj", "v_proj")}


def write_adapters(model: Path, folder: Path, count: int, rank: int, targets: tuple[str, ...]) -> list[Adapter]:
    """Writes adapters of the model in `model` that change `targets`."""
    tensors = {}
    for name, to in destinations(Shard(decoder_config(read_config(model))), stacked=True).items():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and module.endswith(targets):
            key = f"base_model.model.{module}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, to.shape[1]).mul_(to.shape[1] ** -0.5).bfloat16()
            tensors[f"{key}.lora_B.weight"] = torch.randn(to.shape[0], rank).mul_(0.01).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return [Adapter(f"{folder.name}-{number}", str(folder), str(number)) for number in range(count)]


def seconds(engine: Engine, prompts: list[list[int]], tokens: int, adapters: list[Adapter | None]) -> float:
    """Time of a batch of requests that begin at once, none of whose prompts is cached."""
    engine.reset_cache()
    begin = time.perf_counter()
    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    failures = {done.failure for done in engine.generate(prompts, sampling, adapters=adapters)}
    if failures != {None}:
        raise RuntimeError(f"requests failed: {failures}")
    return time.perf_counter() - begin


def main(argv: list[str] | None = None) -> int:
    """Measures, prints a table, writes the result file. Returns the exit code."""
    parser = ArgumentParser("python -m bench.replica.lora", description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", default="llama-8b", help="a shape (default %(default)s)")
    parser.add_argument("--adapters", type=int, default=32, help="of each kind (default %(default)s)")
    parser.add_argument("--rank", type=int, default=16, help="(default %(default)s)")
    parser.add_argument("--requests", type=int, default=64, help="(default %(default)s)")
    parser.add_argument("--input", type=int, default=256, help="tokens of a prompt (default %(default)s)")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    results.add_options(parser, "models.lora")
    args = parser.parse_args(argv)
    generator = random.Random(0)
    prompts = [[generator.randrange(10000) for _ in range(args.input)] for _ in range(args.requests)]
    with tempfile.TemporaryDirectory() as folder:
        model = dummy_models.write(args.model, Path(folder) / "model")
        kinds: dict[str, list[Adapter]] = {
            name: write_adapters(model, Path(folder) / name, args.adapters, args.rank, targets)
            for name, targets in KINDS.items()
        }
        limits = {"max_loras": args.adapters, "max_lora_rank": args.rank, "max_running": args.requests}
        config = WorkerConfig.model_validate({"load_format": "dummy", **limits})
        times: dict[str, list[float]] = {"base": [], **{name: [] for name in kinds}}
        first: dict[str, float] = {}
        with closing(Engine(model, config)) as engine:
            own: dict[str, list[Adapter | None]] = {"base": [None] * args.requests}
            for name, adapters in kinds.items():
                own[name] = [adapters[i % args.adapters] for i in range(args.requests)]
            seconds(engine, prompts, 8, own["base"])
            for name in times:
                first[name] = seconds(engine, prompts, args.output, own[name])
                for _ in range(args.rounds):
                    for one in dict.fromkeys(("base", name)):
                        times[one].append(seconds(engine, prompts, args.output, own[one]))
            loads = engine.load().adapter_loads
    rates = {name: args.requests * args.output / median(each) for name, each in times.items()}
    for name, rate in rates.items():
        spread = ", ".join(f"{each:.3f}" for each in sorted(times[name]))
        print(f"{name:10s} {rate:9.1f} output tokens/s  {rate / rates['base']:.3f} of the base  ({spread} s)")
    print(f"{loads} adapters were copied to the device")
    figures = [
        Figure("models.lora.base.output_tok_s", rates["base"], "tokens/s", True),
        Figure("models.lora.throughput_vs_base", rates["all"] / rates["base"], "ratio", True),
        Figure("models.lora.attention.throughput_vs_base", rates["attention"] / rates["base"], "ratio", True),
        Figure("models.lora.first_use.seconds", first["all"], "s", False),
    ]
    raw = {"model": args.model, "adapters": args.adapters, "rank": args.rank, "seconds": times}
    print(f"written: {results.write(args.name, figures, raw, folder=args.out).name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
