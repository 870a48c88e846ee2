"""Time of decode attention on a GPU, within the chain of kernels of a layer, for few sequences.

    python -m bench.replica.decode_attention --out decode_attention.json

Each kernel's outputs are first compared with PyTorch's in float32. Then CUDA graphs of all layers are timed, in turn:
for one sequence a layer is the products before and after attention, and the kernels between; for more, a norm stands
for each product. The table has for each batch the microseconds of a layer without attention, and what each kernel adds.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.attention import flashinfer_backend
from kernels.attention.interface import AttentionBatch, AttentionShape, SharedPrefixes
from kernels.attention.torch_backend import TorchAttention
from kernels.experts.autotune import gpu_times

PAGE_SIZE = 16
HIDDEN = 2048
ROUNDS = 40
TOLERANCE = 0.02  # relative error of bfloat16 against float32
BATCHES = (1, 300), (1, 1300), (1, 8000), (1, 32000), (4, 1300), (4, 8000), (8, 1300)  # sequences, and tokens of each


class Heads(NamedTuple):
    """The attention of a model."""

    query: int
    kv: int
    dim: int
    windows: tuple[int | None, ...]
    has_sinks: bool = False

    def shape(self, layers: int) -> AttentionShape:
        windows = (self.windows * layers)[:layers]
        return AttentionShape(self.query, self.kv, self.dim, self.dim**-0.5, windows, has_sinks=self.has_sinks)


MODELS = {
    "qwen3-30b-a3b": Heads(32, 4, 128, (None,)),
    "llama-8b": Heads(32, 8, 128, (None,)),
    "gpt-oss-20b": Heads(64, 8, 64, (128, None), has_sinks=True),
    "gemma3-12b": Heads(16, 8, 256, (1024, 1024, 1024, 1024, 1024, None)),
}


class DecodeCase:
    """A step of decodes over random pages."""

    def __init__(self, heads: Heads, sequences: int, tokens: int, layers: int, device: torch.device) -> None:
        self.heads, self.sequences, self.layers, self.device = heads, sequences, layers, device
        self.shape = heads.shape(layers)
        pages = -(-tokens // PAGE_SIZE)
        self.num_pages = sequences * pages
        numbers = np.random.default_rng(0).permutation(self.num_pages).astype(np.int32)
        tables, rows = numbers.reshape(sequences, pages), np.arange(sequences, dtype=np.int32)
        self.batch = AttentionBatch(tables, rows, np.full(sequences, tokens - 1, np.int32), np.ones_like(rows))
        torch.manual_seed(0)
        size = layers, 2, self.num_pages + 1, heads.kv, PAGE_SIZE, heads.dim
        self.kv = torch.randn(size, device=device, dtype=torch.bfloat16)
        self.sinks = torch.randn(layers, heads.query, device=device) if heads.has_sinks else None
        width = (heads.query + 2 * heads.kv) * heads.dim
        self.qkv = torch.randn(sequences, width, device=device).bfloat16()
        self.q = torch.randn(sequences, heads.query, heads.dim, device=device).bfloat16()
        self.x = torch.randn(sequences, HIDDEN, device=device).bfloat16()
        self.norm = torch.ones(HIDDEN, device=device).bfloat16()
        self.out_norm = torch.ones(heads.query * heads.dim, device=device).bfloat16()
        self.head_norm = torch.ones(heads.dim, device=device).bfloat16()
        self.angles = torch.rand(tokens, heads.dim, device=device)
        self.positions = torch.full((sequences,), tokens - 1, device=device)
        if sequences == 1:
            self.weights = [
                (
                    torch.randn(width, HIDDEN, device=device).bfloat16() * HIDDEN**-0.5,
                    torch.randn(HIDDEN, heads.query * heads.dim, device=device).bfloat16() * 0.01,
                )
                for _ in range(layers)
            ]

    def chain(self, attention: Any) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """All layers, with the given attention or none. Returns the last layer's queries and outputs."""
        from kernels.linear.gemv import gemv
        from kernels.ops.fused import add_rms_norm, rms_norm, rotate_and_store

        n = self.sequences
        slots = torch.arange(n, device=self.device) if attention is None else attention.slots
        out = torch.empty_like(self.q)

        def run() -> tuple[torch.Tensor, torch.Tensor]:
            x = q = self.x
            for layer in range(self.layers):
                if n == 1:
                    qkv = gemv(x, self.weights[layer][0], norm=self.norm, eps=1e-6)
                else:
                    add_rms_norm(x, x, self.norm, 1e-6)
                    qkv = self.qkv
                q = rotate_and_store(
                    qkv,
                    self.heads.query,
                    self.angles,
                    self.positions,
                    slots,
                    self.kv[layer],
                    self.head_norm,
                    self.head_norm,
                    1e-6,
                )
                if attention is not None:
                    attention.attend_into(layer, q, out)
                attended = (q if attention is None else out).flatten(1)
                if n == 1:
                    gemv(attended, self.weights[layer][1], residual=x, out=x)
                else:
                    rms_norm(attended, self.out_norm, 1e-6)
            return q, out

        return run

    def error(self, queries: torch.Tensor, out: torch.Tensor) -> float:
        """Relative error of the last layer's outputs."""
        last = self.layers - 1
        sinks = None if self.sinks is None else self.sinks[last:]
        shape = replace(self.shape, windows=self.shape.windows[last:])
        reference = TorchAttention(self.kv[last:].float(), shape, sinks)
        reference.plan(self.batch)
        wanted = reference.attend(0, queries.float())
        return float((out.float() - wanted).norm() / wanted.norm())

    def measure(self, kernels: dict[str, Any]) -> tuple[list[float], list[float]]:
        """Microseconds of a layer without attention, then with each of the kernels, and errors of those."""
        graphs, ends = [], []
        for attention in (None, *kernels.values()):
            call = self.chain(attention)
            call()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                end = call()
            graphs.append([graph.replay])
            ends.append(end)
        times = [us / self.layers for us in gpu_times(graphs, ROUNDS)]
        errors = []
        for (replay,), end in list(zip(graphs, ends, strict=True))[1:]:
            replay()
            torch.cuda.synchronize()
            errors.append(self.error(*end))
        return times, errors

    def kernels(self) -> dict[str, Any]:
        """The kernels to compare, planned: FlashInfer's, the ranges of `split_kv_plan`, and those for few sequences."""
        from kernels.attention.split_kv_decode import SplitKVDecode
        from kernels.attention.triton_backend import TritonAttention, multiprocessors

        n, sizes = self.sequences, (16, self.num_pages + 16)
        flashinfer = flashinfer_backend.FlashInferAttention(self.kv, self.shape, *sizes, 16, self.sinks)
        flashinfer._few = None  # FlashInfer's kernel whatever the backend would choose
        flashinfer.plan_graph(self.batch, n, None)
        ranges = TritonAttention(self.kv, self.shape, *sizes, 16, self.sinks)
        ranges.plan_graph(self.batch, n, SharedPrefixes.none())
        ours = SplitKVDecode(self.kv, self.shape, *sizes, multiprocessors(self.device), self.sinks)
        ours.plan_graph(self.batch, n)
        return {"flashinfer": flashinfer, "ranges": ranges, "split_kv": ours}


def main(arguments: list[str] | None = None) -> int:
    """Compares, measures, prints a table. Returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m bench.replica.decode_attention", description=__doc__.split("\n\n")[0])
    p.add_argument("--models", default=",".join(MODELS), help="whose heads; default: %(default)s")
    p.add_argument("--layers", type=int, default=48, help="layers, each with KV of its own; default: %(default)s")
    p.add_argument("--out", type=Path, help="file for the results, as JSON")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("decode_attention: needs a GPU", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    for model in args.models.split(","):
        for sequences, tokens in BATCHES:
            case = DecodeCase(MODELS[model], sequences, tokens, args.layers, torch.device("cuda"))
            kernels = case.kernels()
            (without, *times), errors = case.measure(kernels)
            added = {name: us - without for name, us in zip(kernels, times, strict=True)}
            rows.append({"model": model, "sequences": sequences, "tokens": tokens, "without": without, "added": added})
            rows[-1]["errors"] = dict(zip(kernels, errors, strict=True))
            figures = " ".join(f"{name} {us:6.2f} ({rows[-1]['errors'][name]:.2g})" for name, us in added.items())
            print(f"{model:14s} {sequences} x {tokens:5d}: {without:6.2f} + {figures}", flush=True)
            del case, kernels
    if args.out is not None:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "us": rows}, indent=1) + "\n")
    return int(any(not error < TOLERANCE for row in rows for error in row["errors"].values()))


if __name__ == "__main__":
    sys.exit(main())
