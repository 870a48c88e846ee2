"""Time of a gated delta rule's kernels on a GPU, for a layer of Qwen3-Next.

    python -m bench.replica.delta_rule --out delta_rule.json

Outputs and states are first compared with PyTorch's in float32. The table has for each batch the microseconds of the
convolution and of the rule, and of their floor: reading and writing the states once, at the rate of `--bytes-per-s`.
For chunks the floor is that of their inputs and outputs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kernels.delta_rule.gates import TokenGates
from kernels.delta_rule.rule import DeltaRule
from kernels.experts.autotune import graph_times
from kernels.recurrent.shape import StateShape
from kernels.recurrent.states import RecurrentStates, StateBatch
from kernels.recurrent.torch_states import TorchStates

SHAPE = StateShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
LAYERS = 4  # so that no run finds its states in the L2 cache
ROUNDS = 10
TOLERANCE = 0.02  # relative error of bfloat16 against float32
BATCHES: dict[str, Sequence[int]] = {
    "1 decode": [1],
    "32 decodes": [1] * 32,
    "256 decodes": [1] * 256,
    "chunk of 1,024": [1024],
    "8 chunks of 1,024": [1024] * 8,
    "chunk of 8,192": [8192],
    "64 decodes, 3 chunks": [1] * 64 + [100, 700, 333],
}


class Case:
    """A step with random states and inputs, in bfloat16 and, for the reference, in float32."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        from kernels.recurrent.triton_states import TritonStates

        count, tokens, shape = len(lengths), sum(lengths), SHAPE
        heads = (shape.value_heads, shape.value_dim, shape.key_dim)
        recurrent = torch.randn(LAYERS, count, *heads, device=device)
        inputs = torch.randn(LAYERS, count, shape.channels, shape.width - 1, device=device).bfloat16()
        self.states: RecurrentStates = TritonStates(recurrent, inputs, shape)
        self.reference: RecurrentStates = TorchStates(recurrent.clone(), inputs.float(), shape)
        rows = np.arange(count, dtype=np.int32)
        self.batch = StateBatch(rows, np.full(count, 7, np.int32), np.array(lengths, np.int32))
        width = shape.channels + 2 * shape.value_heads
        self.columns = torch.randn(tokens, width, device=device).bfloat16()
        self.weight = (0.5 * torch.randn(shape.channels, shape.width, device=device)).bfloat16()
        self.of_layer = torch.randn(shape.value_heads, device=device), torch.randn(shape.value_heads, device=device)

    def run(self, states: RecurrentStates, layer: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """A layer's convolution and rule."""
        return states.update(layer, DeltaRule(self.convolve(states, layer, dtype), SHAPE, self._gates(dtype)))

    def convolve(self, states: RecurrentStates, layer: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        x = self.columns.to(dtype)[:, : SHAPE.channels]
        return states.convolve(layer, x, self.weight.to(dtype))

    def errors(self) -> tuple[float, float]:
        """Relative errors of the outputs and of the states after the step."""
        self.reference.plan(self.batch)
        wanted = self.run(self.reference, dtype=torch.float32)
        self.states.plan(self.batch)
        got = self.run(self.states).float()
        pairs = (got, wanted), (self.states.recurrent[0], self.reference.recurrent[0])
        first, second = (float((each - right).norm() / right.norm()) for each, right in pairs)
        return first, second

    def times(self) -> tuple[float, float]:
        """Microseconds of a layer's convolution, and of convolution and rule."""
        self.states.plan(self.batch)
        runs: list[list[Any]] = [
            [lambda layer=layer: self.convolve(self.states, layer) for layer in range(LAYERS)],
            [lambda layer=layer: self.run(self.states, layer) for layer in range(LAYERS)],
        ]
        convolution, both = (us / LAYERS for us in graph_times(runs, ROUNDS))
        return convolution, both

    def floor_us(self, bytes_per_s: float) -> float:
        states = 2 * len(self.batch.rows) * SHAPE.row_bytes(torch.bfloat16)
        moved = 2 * len(self.columns) * (2 * SHAPE.channels + SHAPE.value_heads * SHAPE.value_dim)
        return 1e6 * (states + moved) / bytes_per_s

    def _gates(self, dtype: torch.dtype) -> TokenGates:
        strength, decay = self.columns.to(dtype)[:, SHAPE.channels :].chunk(2, 1)
        return TokenGates(decay, strength, *self.of_layer)


def main(arguments: list[str] | None = None) -> int:
    """Compares, measures, prints a table. Returns the exit code."""
    p = argparse.ArgumentParser(prog="python -m bench.replica.delta_rule", description=__doc__.split("\n\n")[0])
    p.add_argument("--bytes-per-s", type=float, default=3.6e12, help="for the floor; default: %(default)s, of an H200")
    p.add_argument("--out", type=Path, help="file for the results, as JSON")
    args = p.parse_args(arguments)
    if not torch.cuda.is_available():
        print("delta_rule: needs a GPU", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    columns = ("floor", "convolution", "rule", "error", "of_states")
    print(f"{'':22s}" + " ".join(f"{name:>11}" for name in columns))
    for name, lengths in BATCHES.items():
        case = Case(lengths, torch.device("cuda"))
        error, of_states = case.errors()
        convolution, both = case.times()
        values = case.floor_us(args.bytes_per_s), convolution, both - convolution, error, of_states
        rows.append({"batch": name} | dict(zip(columns, values, strict=True)))
        print(f"{name:22s}" + " ".join(f"{value:11.4g}" for value in values), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "us": rows}, indent=1) + "\n")
    return int(any(not max(row["error"], row["of_states"]) < TOLERANCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
