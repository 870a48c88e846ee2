"""A GGUF file as it is on a CPU, against its float32 copy: decode speed, disk, memory.

    python -m bench.replica.gguf --model SmolLM2-135M-Instruct

decode.vs_float32  output tokens/s of one sequence, divided by those from the float32 copy, in turns
disk.vs_float32    bytes of the model's folder, with the file, divided by those of the float32 copy's
memory.vs_float32  memory that loading takes, KV cache excluded, divided by the same of the float32 copy
"""

import gc
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

from bench import results
from bench.results import Figure

PROMPT = list(range(100, 132))


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def main(argv: list[str] | None = None) -> int:
    """Measures both, prints a table, writes the result file. Returns the exit code."""
    parser = ArgumentParser("python -m bench.replica.gguf", description=__doc__)
    parser.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name or a .gguf file")
    parser.add_argument("--tokens", type=int, default=32, help="output tokens of a run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the result")
    args = parser.parse_args(argv)
    from cluster.models import ModelError, model_name, resolve
    from worker.config import WorkerConfig
    from worker.engine.engine import Engine
    from worker.messages import SamplingParams

    try:
        folders = {"gguf": resolve(args.model), "float32": resolve(args.model, dequantize=True)}
    except ModelError as error:
        print(f"bench.replica.gguf: {error}", file=sys.stderr)
        return 1

    def engine(folder: Path) -> Engine:
        return Engine(folder, WorkerConfig.model_validate({"device": "cpu", "kv_tokens": 1024}))

    engine(folders["gguf"]).close()  # what is imported and compiled once counts for neither
    memory, engines = {}, {}
    for name, folder in folders.items():
        gc.collect()
        before = anonymous_bytes()
        engines[name] = engine(folder)
        gc.collect()
        memory[name] = anonymous_bytes() - before
    times: dict[str, list[float]] = {name: [] for name in folders}
    for _ in range(args.runs):
        for name, one in engines.items():
            took = []
            for tokens in (1, 1, 1 + args.tokens):  # the first fills the prefix cache
                begin = time.perf_counter()
                one.generate([PROMPT], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
                took.append(time.perf_counter() - begin)
            times[name].append((took[2] - took[1]) / args.tokens)
    for one in engines.values():
        one.close()
    speed = {name: 1 / sorted(each)[len(each) // 2] for name, each in times.items()}
    disk = {name: disk_bytes(folder) for name, folder in folders.items()}
    for name in folders:
        print(f"{name:8s} {speed[name]:7.1f} tokens/s  {disk[name] / 1e6:6.0f} MB disk  {memory[name] / 1e6:6.0f} MB")
    figures = [
        Figure("models.cpu.gguf.decode_tok_s", speed["gguf"], "tokens/s", True),
        Figure("models.cpu.gguf.decode.vs_float32", speed["gguf"] / speed["float32"], "ratio", True),
        Figure("models.cpu.gguf.disk.vs_float32", disk["gguf"] / disk["float32"], "ratio", False),
        Figure("models.cpu.gguf.memory.vs_float32", memory["gguf"] / memory["float32"], "ratio", False),
    ]
    print(
        f"written: {results.write('models.cpu.gguf', figures, {'model': model_name(args.model)}, folder=args.out).name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
