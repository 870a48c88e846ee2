"""Quality of the cheaper ways to compute a model, measured on text and compared with float32.

    shoal bench quality --model SmolLM2-135M-Instruct --device cpu
    shoal bench quality --model FOLDER --ways float32,fp8 --text book.txt
    shoal bench quality --model FILE.gguf --ways gguf

Text is cut into pieces. Each token has a log probability given the tokens before it in its piece.

perplexity  exponential of the mean negative log probability
difference  mean absolute difference of the log probabilities from float32's, in nats
agreement   share of positions at which the likeliest token is float32's
greedy      share of greedy output tokens before the first that differs from float32's

Greedy outputs continue the beginnings of the pieces. The way gguf computes a GGUF file as it is; all others take its
float32 copy.
"""

import math
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import results
from bench.load.options import count
from bench.results import Figure, number
from shoal.help import Parser

WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "fp8": {"dtype": "bfloat16", "quantization": "fp8"},
    "gguf": {"dtype": "float32"},
}
ROOT = Path(__file__).parents[2]
TEXTS = (ROOT / "README.md", ROOT / "docs" / "DESIGN.md", ROOT / "LICENSE")
PIECE_TOKENS = 512
BEGINNING_TOKENS = 48
OUTPUT_TOKENS = 48


@dataclass(frozen=True)
class Read:
    """Results of one way: log probabilities of all tokens except the first of each piece, the likeliest tokens at the
    same positions, and the greedy outputs."""

    logprobs: list[float]
    likeliest: list[int]
    outputs: list[list[int]]


@dataclass(frozen=True)
class Quality:
    perplexity: float
    difference: float
    agreement: float
    greedy: float


def read(folder: Path, device: str, way: str, pieces: list[list[int]]) -> Read:
    """Runs the pieces through a replica. Raises RuntimeError if a request fails."""
    from worker.config import WorkerConfig
    from worker.engine.engine import Engine
    from worker.messages import SamplingParams

    kv_tokens = 2 * sum(map(len, pieces)) + 64 * len(pieces)
    settings = {"device": device, "kv_tokens": kv_tokens, "token_budget": PIECE_TOKENS, "max_running": 16}
    logprobs: list[float] = []
    likeliest: list[int] = []
    with closing(Engine(folder, WorkerConfig.model_validate(settings | WAYS[way]))) as engine:
        asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, ignore_eos=True)
        for finished in engine.generate(pieces, asked):
            if finished.failure is not None or finished.prompt_logprobs is None:
                raise RuntimeError(f"{way}: {finished.failure}")
            rows = [row for row in finished.prompt_logprobs if row is not None]
            logprobs += [row.logprob for row in rows]
            likeliest += [row.top[0][0] for row in rows]
        beginnings = [piece[:BEGINNING_TOKENS] for piece in pieces]
        outputs = engine.generate(beginnings, SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, ignore_eos=True))
    return Read(logprobs, likeliest, [finished.token_ids for finished in outputs])


def judge(own: Read, exact: Read) -> Quality:
    """The quality of one way, compared with float32."""
    count = len(exact.logprobs)
    distances = (abs(a - b) for a, b in zip(own.logprobs, exact.logprobs, strict=True))
    same = sum(a == b for a, b in zip(own.likeliest, exact.likeliest, strict=True))
    kept = sum(_common(a, b) for a, b in zip(own.outputs, exact.outputs, strict=True))
    return Quality(
        math.exp(-sum(own.logprobs) / count),
        sum(distances) / count,
        same / count,
        kept / sum(map(len, exact.outputs)),
    )


def _common(own: list[int], exact: list[int]) -> int:
    """The number of tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(own, exact, strict=True)) if a != b), len(exact))


def pieces_of(folder: Path, texts: list[Path], most: int) -> list[list[int]]:
    """Pieces of tokens. Each text gives `most` divided by the number of texts, at least 1, or fewer if it is short."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    share = max(1, most // len(texts))
    pieces = []
    for text in texts:
        ids = tokenizer(text.read_text(), add_special_tokens=False)["input_ids"]
        cut = [ids[i : i + PIECE_TOKENS] for i in range(0, len(ids), PIECE_TOKENS)]
        pieces += [piece for piece in cut if len(piece) > BEGINNING_TOKENS][:share]
    return pieces


def parser() -> Parser:
    """The command line."""
    p = Parser("shoal bench quality", __doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="a known name, a folder or a hub id")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    p.add_argument(
        "--ways", default="bfloat16,fp8", metavar="A,B", help=f"compared with float32, among {', '.join(WAYS)}"
    )
    p.add_argument(
        "--text",
        type=Path,
        nargs="+",
        default=list(TEXTS),
        metavar="FILE",
        help="text files (default: Shoal's own pages)",
    )
    p.add_argument(
        "--pieces", type=count, default=9, help=f"number of pieces of up to {PIECE_TOKENS} tokens (default %(default)s)"
    )
    results.add_options(p, None, "DEVICE.quality")
    return p


def main(argv: list[str] | None = None) -> int:
    """Computes the text in every way, prints a table, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    ways = [way for way in args.ways.split(",") if way != "float32"]
    if unknown := [way for way in ways if way not in WAYS]:
        parser().error(f"no way {unknown[0]}: there are {', '.join(WAYS)}")
    from cluster.models import ModelError, resolve

    try:
        folders = {way: resolve(args.model, dequantize=way != "gguf") for way in ("float32", *ways)}
        folder = folders["float32"]
        pieces = pieces_of(folder, args.text, args.pieces)
    except (ModelError, OSError) as error:
        print(f"shoal bench quality: {error}", file=sys.stderr)
        return 1
    kind = "gpu" if args.device == "cuda" else "cpu"
    figures: list[Figure] = []
    raw: dict[str, Any] = {"model": args.model, "pieces": len(pieces), "tokens": sum(map(len, pieces))}
    exact: Read | None = None
    print(f"{'':10s} {'perplexity':>10s} {'difference':>10s} {'agreement':>10s} {'greedy':>10s}", flush=True)
    for way in ("float32", *ways):
        own = read(folders[way], args.device, way, pieces)
        exact = exact or own
        found = judge(own, exact)
        row = (found.perplexity, found.difference, found.agreement, found.greedy)
        print(f"{way:10s} {' '.join(f'{number(value):>10s}' for value in row)}", flush=True)
        figures += _figures(f"{kind}.quality.{way}", found, is_exact=way == "float32")
    path = results.write(args.name or f"{kind}.quality", figures, raw, folder=args.out)
    print(f"written: {path.name}")
    return 0


def _figures(name: str, found: Quality, is_exact: bool) -> list[Figure]:
    perplexity = Figure(f"{name}.perplexity", found.perplexity, "ratio", False)
    if is_exact:
        return [perplexity]
    return [
        perplexity,
        Figure(f"{name}.difference", found.difference, "nats", False),
        Figure(f"{name}.agreement", found.agreement, "ratio", True),
        Figure(f"{name}.greedy", found.greedy, "ratio", True),
    ]


if __name__ == "__main__":
    sys.exit(main())
