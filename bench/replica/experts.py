"""Time of a layer's experts on a GPU, by the number of tokens, with the tiles that are the fastest there.

    python -m bench.replica.experts --shape qwen3-30b-a3b --tokens 1,8,64,256,1024,4096 --out experts.json
    python -m bench.replica.experts --shape gpt-oss-20b --mxfp4

Results are first compared with PyTorch's, in float32. The last table has for each number of tokens the microseconds of
a layer with the default and with the chosen tiles, of its parts, and of the floor: reading the experts that are chosen,
or the arithmetic, whichever takes longer at the rates of `--bytes-per-s` and `--flops`.
"""

import argparse
import json
import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.experts import grouped, mxfp4_weight
from kernels.experts.autotune import TileChoice, autotune, graph_times, routes
from kernels.experts.choice import Routing, choose
from kernels.experts.experts import Experts
from kernels.experts.routing import route
from kernels.experts.tiles import EACH_PAIR, ExpertTiles
from kernels.experts.weights import ExpertWeight, ExpertWeights
from kernels.ops.activation import relu2, silu_and_mul

LAYERS = 4  # so that no run finds its weights in the L2 cache
ROUNDS = 20
TOLERANCE = 0.02  # relative error of bfloat16 against float32


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of a layer's experts. Without a gate they are activated by the square of the relu."""

    count: int
    top_k: int
    hidden: int
    size: int
    is_gated: bool = True


SHAPES = {
    "qwen3-30b-a3b": ExpertShape(128, 8, 2048, 768),
    "qwen3-30b-a3b-tp2": ExpertShape(128, 8, 2048, 384),
    "mixtral-8x7b": ExpertShape(8, 2, 4096, 14336),
    "olmoe": ExpertShape(64, 8, 2048, 1024),
    "nemotron-3-nano-30b-a3b": ExpertShape(128, 6, 2688, 1856, is_gated=False),
    "gpt-oss-20b": ExpertShape(32, 4, 2880, 2880),
    "gpt-oss-120b": ExpertShape(128, 4, 2880, 2880),
    "tiny": ExpertShape(8, 2, 64, 32),
}


def make_layers(shape: ExpertShape, device: torch.device, dtype: torch.dtype, in_mxfp4: bool = False) -> list[Experts]:
    """Experts of LAYERS layers with random weights, such that outputs are about as large as inputs. `in_mxfp4`: random
    bits in MXFP4."""
    generator = torch.Generator(device).manual_seed(1)

    def random(*sizes: int, has_gates: bool = False) -> ExpertWeight:
        if in_mxfp4:
            groups = sizes[2] // mxfp4_weight.GROUP
            blocks = torch.randint(
                256,
                (*sizes[:2], groups, mxfp4_weight.GROUP // 2),
                dtype=torch.uint8,
                device=device,
                generator=generator,
            )
            exponents = torch.full(blocks.shape[:3], 127, dtype=torch.uint8, device=device)
            exponents += round(math.log2(sizes[-1] ** -0.5 / mxfp4_weight.E2M1_SIZE))
            return mxfp4_weight.of_blocks(blocks, exponents, has_gates)
        made = torch.empty(sizes, device=device, dtype=dtype)
        return made.normal_(0.0, sizes[-1] ** -0.5, generator=generator)

    count, hidden, size = shape.count, shape.hidden, shape.size
    rows, activation = (2 * size, silu_and_mul) if shape.is_gated else (size, relu2)
    return [
        Experts(random(count, rows, hidden, has_gates=shape.is_gated), random(count, hidden, size), activation)
        for _ in range(LAYERS)
    ]


def reference(experts: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The output of experts on a GPU by PyTorch's operators, in float32."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        tokens, number = torch.where(chosen == expert)
        gate_up, down = _numbers(experts.weights, expert)
        first = x[tokens].float() @ gate_up.t()
        if experts.weights.is_gated:
            gate, up = first.chunk(2, dim=1)
            activated = torch.nn.functional.silu(gate) * up
        else:
            activated = first.relu().square()
        product = activated @ down.t()
        total.index_add_(0, tokens, product * shares[tokens, number, None])
    return total


def _numbers(weights: ExpertWeights, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An expert's weights, float32, gates first."""
    if weights.gate_up_scales is None or weights.down_scales is None:
        return weights.gate_up[expert].float(), weights.down[expert].float()
    (_, hidden, size), own = weights.sizes, slice(expert, expert + 1)
    first = mxfp4_weight.Mxfp4Weight(weights.gate_up[own], weights.gate_up_scales.factors[own])
    last = mxfp4_weight.Mxfp4Weight(weights.down[own], weights.down_scales.factors[own])
    return (
        mxfp4_weight.multiplied_out(first, hidden, has_gates=weights.is_gated)[0],
        mxfp4_weight.multiplied_out(last, size, has_gates=False)[0],
    )


def _part(weights: ExpertWeights, own: slice, first: int) -> ExpertWeights:
    """Some of the experts."""
    scales = weights.gate_up_scales, weights.down_scales
    parts = (None if each is None else each._replace(factors=each.factors[own]) for each in scales)
    first_scales, last_scales = parts
    return weights._replace(
        gate_up=weights.gate_up[own],
        down=weights.down[own],
        first=first,
        gate_up_scales=first_scales,
        down_scales=last_scales,
    )


def error(experts: Experts, shape: ExpertShape, tokens: int, tiles: ExpertTiles) -> float:
    """The relative error of experts with some tiles, also where a part of the experts is elsewhere."""
    weights = experts.weights
    chosen, shares = routes(tokens, shape.top_k, shape.count, 1, weights.down.device)[0]
    x = torch.randn(tokens, shape.hidden, device=weights.down.device).to(weights.dtype)
    wanted = reference(experts, x, chosen, shares)
    got = grouped.experts(weights, x, chosen, shares, tiles)
    first = shape.count // 2
    halves = [_part(weights, slice(first), 0), _part(weights, slice(first, None), first)]
    of_halves = sum(grouped.experts(half, x, chosen, shares, tiles).float() for half in halves)
    return max(float((each - wanted).norm() / wanted.norm()) for each in (got.float(), of_halves))


def routing_errors(shape: ExpertShape, device: torch.device) -> int:
    """Number of tokens whose experts differ from PyTorch's choice."""
    logits = torch.randn(512, shape.count, device=device)
    wrong = 0
    for routing in (Routing(shape.top_k), Routing(shape.top_k, "sigmoid", scale=2.5, added_to_sum=1e-20)):
        bias = torch.rand(shape.count, device=device) if routing.scores == "sigmoid" else None
        (got, got_shares), (wanted, wanted_shares) = route(logits, routing, bias), choose(logits, routing, bias)
        wrong += int((got != wanted).any(1).sum())
        wrong += int(((got_shares - wanted_shares).abs() > 1e-5).any(1).sum())
    return wrong


def floor_us(shape: ExpertShape, tokens: int, bytes_per_s: float, flops: float, weight_bytes: float = 2.0) -> float:
    """Microseconds of a layer's experts at a device's rates."""
    hit = shape.count * (1 - (1 - shape.top_k / shape.count) ** tokens)
    weights = (3 if shape.is_gated else 2) * shape.hidden * shape.size
    return 1e6 * max(hit * weights * weight_bytes / bytes_per_s, 2 * weights * tokens * shape.top_k / flops)


def parts_us(layers: list[Experts], shape: ExpertShape, tokens: int, tiles: ExpertTiles) -> dict[str, float]:
    """Microseconds of a layer's parts, each by itself as one CUDA graph of all layers."""
    device = layers[0].weights.down.device
    routed = routes(tokens, shape.top_k, shape.count, len(layers), device)
    x = torch.randn(tokens, shape.hidden, device=device).to(layers[0].weights.dtype)
    logits = torch.randn(tokens, shape.count, device=device)
    runs: dict[str, list[Any]] = {"route": [partial(route, logits, Routing(shape.top_k)) for _ in layers]}
    if tiles.rows != EACH_PAIR:
        per_layer: dict[str, list[Any]] = {"sort": [], "gate_up": [], "down": [], "combine": []}
        for layer, (chosen, shares) in zip(layers, routed, strict=True):
            weights = layer.weights
            sort = partial(grouped.sort_pairs, chosen, 0, shape.count, tiles.rows)
            blocks = sort()
            gate_up = partial(grouped.gate_up, weights, x, shape.top_k, blocks, tiles)
            down = partial(grouped.down, weights, gate_up(), shares, blocks, tiles)
            per_layer["sort"].append(sort)
            per_layer["gate_up"].append(gate_up)
            per_layer["down"].append(down)
            per_layer["combine"].append(partial(grouped.combine, down(), chosen, 0, shape.count))
        runs |= per_layer
    taken = graph_times(list(runs.values()), ROUNDS)
    return {name: us / len(layers) for name, us in zip(runs, taken, strict=True)}


def whole_us(layers: list[Experts], shape: ExpertShape, tokens: int, tiles: ExpertTiles) -> float:
    """Microseconds of a layer's experts, without the router."""
    routed = routes(tokens, shape.top_k, shape.count, len(layers), layers[0].weights.down.device)
    x = torch.randn(tokens, shape.hidden, device=layers[0].weights.down.device).to(layers[0].weights.dtype)
    run = [
        partial(grouped.experts, layer.weights, x, chosen, shares, tiles)
        for layer, (chosen, shares) in zip(layers, routed, strict=True)
    ]
    return graph_times([run], ROUNDS)[0] / len(layers)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.replica.experts", description=__doc__.split("\n\n")[0])
    p.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b", help="default: %(default)s")
    p.add_argument("--mxfp4", action="store_true", help="weights in MXFP4, and not in bfloat16")
    p.add_argument("--tokens", default="1,8,64,256,1024,4096", help="numbers of tokens; default: %(default)s")
    p.add_argument("--limit-s", type=float, default=300.0, help="seconds of timing tiles; default: %(default)s")
    p.add_argument("--bytes-per-s", type=float, default=2.5e12, help="for the floor; default: %(default)s, of an H100")
    p.add_argument("--flops", type=float, default=670e12, help="for the floor; default: %(default)s, of an H100")
    p.add_argument("--cache", type=Path, help="folder that keeps the chosen tiles")
    p.add_argument("--out", type=Path, help="file for the results, as JSON")
    return p


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        print("experts: needs a GPU", file=sys.stderr)
        return 1
    device, shape = torch.device("cuda"), SHAPES[args.shape]
    tokens = [int(n) for n in args.tokens.split(",")]
    layers = make_layers(shape, device, torch.bfloat16, args.mxfp4)
    weight_bytes = mxfp4_weight.BYTES if args.mxfp4 else 2.0
    print(f"{args.shape} on {torch.cuda.get_device_name()}: {routing_errors(shape, device)} tokens routed otherwise")
    failed = routing_errors(shape, device) > 0
    for n in tokens:
        wrong = error(layers[0], shape, n, layers[0].default_tiles(n, shape.top_k))
        print(f"{n} tokens, default tiles: relative error {wrong:.4f}", flush=True)
        failed |= not wrong < TOLERANCE
    chosen: dict[int, TileChoice] = autotune(layers, shape.top_k, max(tokens), args.cache, limit_s=args.limit_s)
    for n, choice in chosen.items():
        print(f"{n} tokens: {choice.default_us:.1f} -> {choice.chosen_us:.1f} us, {choice.tiles}", flush=True)
    rows = []
    for n in tokens:
        tiles = layers[0].tiles(n, shape.top_k)
        wrong = error(layers[0], shape, n, tiles)
        failed |= not wrong < TOLERANCE
        row: dict[str, Any] = {"tokens": n, "floor": floor_us(shape, n, args.bytes_per_s, args.flops, weight_bytes)}
        row["default"] = whole_us(layers, shape, n, layers[0].default_tiles(n, shape.top_k))
        row["chosen"] = whole_us(layers, shape, n, tiles)
        row |= parts_us(layers, shape, n, tiles)
        rows.append(row | {"error": wrong, "rows": tiles.rows, "gate_up_tile": tiles.gate_up, "down_tile": tiles.down})
    columns = ("tokens", "floor", "default", "chosen", "route", "sort", "gate_up", "down", "combine", "error", "rows")
    print(" ".join(f"{name:>8}" for name in columns))
    for row in rows:
        print(" ".join(f"{_shown(row.get(name, math.nan)):>8}" for name in columns))
    if args.out is not None:
        found = {"device": torch.cuda.get_device_name(), "shape": asdict(shape), "us": rows, "choices": chosen}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed)


def _shown(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4f}" if value < 1 else f"{value:.1f}"


if __name__ == "__main__":
    sys.exit(main())
