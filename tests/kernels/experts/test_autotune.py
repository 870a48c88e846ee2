"""The choice of experts' tiles: the fastest are taken, kept, and read again."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.experts import autotune as module
from kernels.experts.autotune import TileCache, autotune, token_counts
from kernels.experts.experts import Experts
from kernels.experts.mxfp4_weight import Mxfp4Weight
from kernels.experts.tiles import EACH_PAIR, ExpertTiles, ProductTile, TunedTiles, default_tiles
from kernels.experts.weights import ExpertWeights
from kernels.ops.activation import silu_and_mul

pytest.importorskip("triton")


@pytest.fixture
def layers() -> list[Experts]:
    made = [Experts(torch.zeros(4, 16, 8), torch.zeros(4, 8, 8), silu_and_mul) for _ in range(2)]
    for layer in made:
        layer.weights = ExpertWeights(torch.zeros(4, 16, 8), torch.zeros(4, 8, 8), 0, False)
    return made


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[ExpertTiles]:
    """The tiles that were run. Tiles with 128 columns do not fit."""
    seen: list[ExpertTiles] = []

    def run(layer: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, tiles: ExpertTiles) -> None:
        if tiles.gate_up.columns == 128:
            raise RuntimeError("out of shared memory")
        seen.append(tiles)

    monkeypatch.setattr(module, "_run", run)
    return seen


def times(runs: Sequence[Sequence], rounds: int) -> list[float]:
    """Blocks of 32 rows are the fastest, with the deepest tiles."""

    def us(tiles: ExpertTiles) -> float:
        return abs(tiles.rows - 32) + 100.0 / tiles.gate_up.depth + 100.0 / tiles.down.depth

    return [us(run[0].args[-1]) * len(run) for run in runs]


def test_the_fastest_tiles_are_taken_and_kept(layers: list[Experts], timed: list[ExpertTiles], tmp_path: Path) -> None:
    found = autotune(layers, 2, 256, tmp_path, times)
    assert sorted(found) == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    for choice in found.values():
        assert choice.chosen_us <= choice.default_us and choice.tiles.gate_up.columns != 128
    chosen = found[32].tiles
    assert (chosen.rows, chosen.gate_up.depth, chosen.down.depth) == (32, 128, 128)
    assert all(layer.tiles(20, 2) == chosen for layer in layers) and layers[0].tiles(1, 2) == found[1].tiles
    timed.clear()
    assert autotune(layers, 2, 256, tmp_path, times) == found and timed == []
    assert autotune(layers, 2, 512, tmp_path, times).keys() - found.keys() == {512} and timed


def test_weights_in_mxfp4_have_tiles_of_their_own(timed: list[ExpertTiles], tmp_path: Path) -> None:
    words = torch.zeros(4, 1, 32, 16, dtype=torch.int32)
    weight = Mxfp4Weight(words, words[..., 0])
    layers = [Experts(weight, weight, silu_and_mul)]
    found = autotune(layers, 2, 64, tmp_path, times)
    assert {tiles.gate_up.depth for tiles in timed} == {128} and found[64].tiles.rows == 32
    (file,) = tmp_path.glob("*.json")
    assert file.name.endswith("_4x32x16_top2_mxfp4.json")


def test_time_runs_out(layers: list[Experts], timed: list[ExpertTiles], caplog: pytest.LogCaptureFixture) -> None:
    clock = iter(range(100))
    found = autotune(layers, 2, 64, None, times, lambda: float(next(clock)), limit_s=2.5)
    assert list(found) == [1, 64] and "have default tiles" in caplog.text
    assert layers[0].tiles(16, 2) == default_tiles(16, 2, 4)


def test_the_most_useful_sizes_come_first() -> None:
    assert token_counts(4000)[:4] == [256, 64, 1, 2048] and sorted(token_counts(4000))[-1] == 4096


@pytest.mark.parametrize("content", ["", "[]", '{"1": 3}', '{"1": [[16, [1], [2]], 1, 2]}'])
def test_a_damaged_file_counts_as_empty(content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.json").write_text(content)
    assert TileCache(tmp_path, "a").find(1) is None and "is ignored" in caplog.text


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = TileCache(tmp_path / "file", "a")
    cache.add(1, module.TileChoice(default_tiles(1, 8, 128), 1.0, 2.0))
    cache.save()
    assert "not kept" in caplog.text


def test_other_numbers_of_tokens_have_the_next_larger_tiles() -> None:
    tiles = {n: ExpertTiles(n, ProductTile(16, 16, 4, 2), ProductTile(16, 16, 4, 2)) for n in (16, 64)}
    tuned = TunedTiles(tiles)
    assert [tuned.find(n).rows for n in (1, 16, 17, 64, 65)] == [16, 16, 64, 64, 64]


@pytest.mark.parametrize(("tokens", "rows"), [(1, EACH_PAIR), (64, 16), (600, 32), (2048, 64), (8192, 128)])
def test_default_tiles(tokens: int, rows: int) -> None:
    assert default_tiles(tokens, 8, 128).rows == rows


def test_what_is_kept_is_plain_json(layers: list[Experts], timed: list[ExpertTiles], tmp_path: Path) -> None:
    autotune(layers, 2, 1, tmp_path, times)
    (file,) = tmp_path.glob("*.json")
    assert file.name.startswith("experts_") and "top2_float32" in file.name
    assert list(json.loads(file.read_text())) == ["1"]
