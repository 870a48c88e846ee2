"""Autotuning of the grouped products of experts: times tiles at start, and takes the fastest for each number of tokens.

Numbers of tokens are powers of two up to the largest step; a step uses the tiles of the next larger one. All of a
layer's experts are timed, for every number of rows of a block that suits the number of tokens: first with each tile of
the first product, then with each tile of the second. Triton compiles a tile at its first use, which takes longer than
timing it: a second or more. So choices are kept on disk, and where time runs out, the defaults of
`kernels.experts.tiles` remain.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kernels.choice_cache import ChoiceCache
from kernels.experts.experts import Experts
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile, TunedTiles
from kernels.linear.gemm_autotune import Call, Times, gpu_times

logger = logging.getLogger(__name__)

LIMIT_S = 60.0
"""Seconds after which timing stops; sizes that have not been timed by then have default tiles."""

VERSION = 2  # of the kernels: choices for another version are not used
_LAYERS = 4  # layers whose weights a run reads, one after the other
_ROUNDS = 5

_ROWS = (16, 32, 64, 128)
# The tiles that are timed, by the rows of a block.
_FEW_ROWS_GATE_UP = (
    ProductTile(32, 128, 4, 4),
    ProductTile(64, 128, 4, 3),
    ProductTile(64, 64, 4, 4),
    ProductTile(128, 64, 4, 3),
)
_GATE_UP = {
    EACH_PAIR: (
        ProductTile(6, 2048, 2, 1),
        ProductTile(6, 2048, 4, 1),
        ProductTile(12, 1024, 4, 1),
        ProductTile(12, 2048, 4, 1),
        ProductTile(24, 2048, 4, 1),
    ),
    16: _FEW_ROWS_GATE_UP,
    32: _FEW_ROWS_GATE_UP,
    64: (ProductTile(64, 64, 4, 4), ProductTile(64, 128, 4, 3), ProductTile(128, 64, 4, 3), ProductTile(128, 64, 8, 3)),
    128: (ProductTile(64, 64, 4, 4), ProductTile(64, 64, 8, 4), ProductTile(128, 64, 8, 3), ProductTile(128, 64, 8, 4)),
}
_DOWN = {
    EACH_PAIR: (
        ProductTile(1, 256, 1, 12),
        ProductTile(2, 1024, 2, 2),
        ProductTile(2, 1024, 4, 4),
        ProductTile(4, 1024, 4, 4),
    ),
    16: (
        ProductTile(64, 128, 4, 4),
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 128, 4, 3),
        ProductTile(64, 256, 4, 3),
    ),
    32: (
        ProductTile(64, 128, 4, 4),
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 128, 4, 3),
        ProductTile(256, 64, 8, 4),
    ),
    64: (
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 128, 4, 3),
        ProductTile(256, 64, 4, 4),
        ProductTile(256, 64, 8, 4),
    ),
    128: (
        ProductTile(128, 64, 4, 4),
        ProductTile(128, 64, 8, 4),
        ProductTile(256, 64, 8, 3),
        ProductTile(256, 64, 8, 4),
    ),
}
# The same for weights in MXFP4, of which kernels read 128 columns at a time.
_MXFP4_GATE_UP = {
    EACH_PAIR: (ProductTile(16, 128, 4, 1), ProductTile(8, 128, 4, 2), ProductTile(16, 128, 2, 1)),
    16: (ProductTile(32, 128, 4, 4), ProductTile(64, 128, 8, 4), ProductTile(64, 128, 8, 6)),
    32: (ProductTile(32, 128, 4, 4), ProductTile(64, 128, 8, 3), ProductTile(64, 128, 8, 4)),
    64: (ProductTile(64, 128, 8, 3), ProductTile(64, 128, 8, 4), ProductTile(128, 128, 8, 3)),
    128: (ProductTile(64, 128, 8, 3), ProductTile(64, 128, 8, 4), ProductTile(128, 128, 8, 3)),
}
_MXFP4_DOWN = {
    EACH_PAIR: (ProductTile(16, 128, 8, 1), ProductTile(16, 128, 8, 5), ProductTile(16, 128, 16, 2)),
    16: (ProductTile(64, 128, 4, 6), ProductTile(128, 128, 8, 4), ProductTile(128, 128, 8, 6)),
    32: (ProductTile(64, 128, 4, 4), ProductTile(128, 128, 8, 3), ProductTile(128, 128, 8, 4)),
    64: (ProductTile(128, 128, 8, 3), ProductTile(128, 128, 8, 4), ProductTile(256, 128, 8, 3)),
    128: (ProductTile(128, 128, 8, 3), ProductTile(128, 128, 8, 4), ProductTile(256, 128, 8, 3)),
}
_EACH_PAIR_UP_TO = 16  # tokens: beyond, experts are read several times
_MXFP4_EACH_PAIR_UP_TO = 4  # for each of which a weight is made to a number, too


class TileChoice(NamedTuple):
    """The result of timing one number of tokens: the fastest tiles, and microseconds of a layer's experts with them and
    with the default ones."""

    tiles: ExpertTiles
    chosen_us: float
    default_us: float


def token_counts(most_tokens: int) -> list[int]:
    """The numbers of tokens to time, the most useful first."""
    sizes = [1 << power for power in range((most_tokens - 1).bit_length() + 1)]
    return sorted(sizes, key=lambda size: (size not in (1, 64, 256, 2048), size > 512, -size))


def autotune(
    layers: Sequence[Experts],
    top_k: int,
    most_tokens: int,
    folder: Path | None = None,
    times: Times | None = None,
    clock: Callable[[], float] = time.monotonic,
    limit_s: float = LIMIT_S,
) -> dict[int, TileChoice]:
    """Times tiles for all numbers of tokens of steps up to `most_tokens`, and sets the fastest in the layers' `tuned`.

    layers: the experts of all layers, of one shape, on a GPU. folder: where choices are kept; None keeps none. Returns
    what was chosen by the number of tokens, also if it was kept from an earlier start.
    """
    began_s = clock()
    cache = TileCache(folder, _identity(layers[0], top_k))
    choices: dict[int, TileChoice] = {}
    untimed = []
    for tokens in token_counts(most_tokens):
        choice = cache.find(tokens)
        if choice is None and clock() - began_s < limit_s:
            choice = _fastest(layers[:_LAYERS], top_k, tokens, times or graph_times)
            cache.add(tokens, choice)
        if choice is None:
            untimed.append(tokens)
        else:
            choices[tokens] = choice
    if untimed:
        logger.warning(
            "It takes too long: experts of %s tokens have default tiles", ", ".join(map(str, sorted(untimed)))
        )
    cache.save()
    tiles = {tokens: layers[0].default_tiles(tokens, top_k) for tokens in untimed}
    tuned = TunedTiles(tiles | {tokens: choice.tiles for tokens, choice in choices.items()})
    for layer in layers:
        layer.tuned = tuned
    logger.info("Chose tiles of experts in %.1f s", clock() - began_s)
    return dict(sorted(choices.items()))


def routes(
    tokens: int, top_k: int, experts: int, count: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`count` random choices of experts with their weights, evenly spread, as `kernels.experts.routing.route` returns
    them."""
    generator = torch.Generator(device).manual_seed(tokens)
    found = []
    for _ in range(count):
        scores = torch.rand(tokens, experts, generator=generator, device=device)
        found.append((scores.topk(top_k)[1].int(), torch.full((tokens, top_k), 1.0 / top_k, device=device)))
    return found


def graph_times(runs: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    """`gpu_times` of runs as CUDA graphs: the host would take longer than the GPU to launch the kernels of few tokens
    one by one."""
    graphs = []
    for calls in runs:
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        graphs.append([graph.replay])
    return gpu_times(graphs, rounds)


def _rows(tokens: int, top_k: int, experts: int, each_pair_up_to: int) -> list[int]:
    """The rows of blocks that suit a number of tokens, and `EACH_PAIR` for few."""
    mean = max(1.0, tokens * top_k / experts)
    suiting = [rows for rows in _ROWS if rows < 8 * mean or rows == _ROWS[0]]
    suiting = [rows for rows in suiting if rows * 4 > mean or rows == _ROWS[-1]]
    return [EACH_PAIR, *suiting] if tokens <= each_pair_up_to else suiting


def _fastest(layers: Sequence[Experts], top_k: int, tokens: int, times: Times) -> TileChoice:
    """Times all tiles that suit a number of tokens."""
    own = layers[0]
    routed = routes(tokens, top_k, own.total, len(layers), own.weights.down.device)
    default = own.default_tiles(tokens, top_k)
    all_gate_ups, all_downs = (_MXFP4_GATE_UP, _MXFP4_DOWN) if own.weights.is_mxfp4 else (_GATE_UP, _DOWN)
    found: list[tuple[float, ExpertTiles]] = []
    each_pair_up_to = _MXFP4_EACH_PAIR_UP_TO if own.weights.is_mxfp4 else _EACH_PAIR_UP_TO
    for rows in _rows(tokens, top_k, own.total, each_pair_up_to):
        gate_ups = {default.gate_up, *all_gate_ups[rows]} if default.rows == rows else set(all_gate_ups[rows])
        downs = {default.down, *all_downs[rows]} if default.rows == rows else set(all_downs[rows])
        candidates = [ExpertTiles(rows, gate, next(iter(downs))) for gate in sorted(gate_ups)]
        best = _best(layers, routed, candidates, times)
        if best is not None:
            candidates = [best[1]._replace(down=tile) for tile in sorted(downs)]
            best = _best(layers, routed, candidates, times)
        if best is not None:
            found.append(best)
    default_us = _best(layers, routed, [default], times)
    best_us, tiles = min(found, default=(0.0, default))
    return TileChoice(tiles, best_us, default_us[0] if default_us is not None else best_us)


def _best(
    layers: Sequence[Experts], routed: Sequence[Any], candidates: Iterable[ExpertTiles], times: Times
) -> tuple[float, ExpertTiles] | None:
    """The candidate with the least time, in microseconds of one layer; None if none of them runs."""
    usable, runs = [], []
    hidden = layers[0].weights.sizes[1]
    x = torch.randn(len(routed[0][0]), hidden, device=routed[0][0].device).to(layers[0].weights.dtype)
    for tiles in candidates:
        calls: list[Call] = [
            partial(_run, layer, x, chosen, shares, tiles)
            for layer, (chosen, shares) in zip(layers, routed, strict=True)
        ]
        if _compiles(calls[0]):
            usable.append(tiles)
            runs.append(calls)
    if not usable:
        return None
    taken = times(runs, _ROUNDS)
    best = min(range(len(usable)), key=taken.__getitem__)
    return taken[best] / len(layers), usable[best]


def _run(layer: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, tiles: ExpertTiles) -> None:
    from kernels.experts import grouped

    grouped.experts(layer.weights, x, chosen, shares, tiles)


def _compiles(call: Call) -> bool:
    """Whether a tile fits the GPU: one that needs too much shared memory does not."""
    try:
        call()
    except Exception as error:  # Triton's errors have no common class
        logger.debug("%s", error)
        return False
    return True


def _identity(own: Experts, top_k: int) -> str:
    import triton

    count, hidden, size = own.weights.sizes
    dtype = str(own.weights.down.dtype).removeprefix("torch.")
    if own.weights.is_mxfp4:
        dtype = "mxfp4"
    elif (scales := own.weights.down_scales) is not None:
        dtype = f"e4m3-{scales.factors.shape[1]}"
    device = torch.cuda.get_device_name(own.weights.down.device) if own.weights.down.is_cuda else "cpu"
    shape = f"{count}x{hidden}x{size}" if own.total == count else f"{count}of{own.total}x{hidden}x{size}"
    shape += "" if own.weights.is_gated else "-plain"
    return f"experts-{VERSION}-{device}-triton{triton.__version__}-{shape}-top{top_k}-{dtype}"


class TileCache(ChoiceCache[TileChoice]):
    """The choices for one shape on one kind of GPU."""

    what = "tiles"

    def find(self, tokens: int) -> TileChoice | None:
        """The choice for a number of tokens; None if it has not been timed."""
        return self._found(str(tokens))

    def add(self, tokens: int, choice: TileChoice) -> None:
        """Keeps the choice for a number of tokens."""
        self._add(str(tokens), choice)

    @staticmethod
    def _saved(choice: TileChoice) -> Any:
        return choice  # named tuples are lists in JSON

    @staticmethod
    def _restored(saved: Any) -> TileChoice:
        (rows, gate_up, down), chosen_us, default_us = saved
        tiles = ExpertTiles(int(rows), ProductTile(*map(int, gate_up)), ProductTile(*map(int, down)))
        return TileChoice(tiles, float(chosen_us), float(default_us))
