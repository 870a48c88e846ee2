"""Products of adapters for batches whose tokens have different ones: against a loop over tokens in float64, also the
kernels, interpreted on a CPU."""

import numpy as np
import pytest
import torch

from kernels.lora.lora_weights import ColumnPart, LoraWeights
from kernels.lora.segments import TILE, Segments, Tiles, most_tiles
from tests.kernels.covering import covering

PARTS = [ColumnPart(0, range(24)), ColumnPart(1, range(24, 40)), ColumnPart(2, range(40, 56))]
GATED = [ColumnPart(0, range(16)), ColumnPart(0, range(40, 56)), ColumnPart(1, range(16, 40))]
SLOTS, RANK, IN, OUT = 3, 20, 200, 56


def filled(parts: list[ColumnPart]) -> LoraWeights:
    """Weights with adapters of ranks 20 and 4 in slots 0 and 2, the last written over a larger one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    used = torch.zeros(SLOTS, dtype=torch.int32, device=device)
    weights = LoraWeights(parts, SLOTS, RANK, IN, OUT, torch.float32, used)
    random = torch.Generator().manual_seed(0)
    for slot, rank in ((0, RANK), (2, RANK), (2, 4)):
        a = torch.randn(weights.num_parts, rank, IN, generator=random)
        weights.write(slot, a, torch.randn(OUT, rank, generator=random))
        used[slot] = 1
    weights.write(1, None, None)
    return weights


def by_token(weights: LoraWeights, x: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
    out = torch.zeros(len(x), OUT, dtype=torch.float64)
    for token, slot in enumerate(slots.tolist()):
        if slot < 0 or not weights.used[slot]:
            continue
        for part, columns in weights.parts:
            a = weights.a[slot, part * RANK : (part + 1) * RANK].double().cpu()
            b = weights.b[slot, columns.start : columns.stop].double().cpu()
            out[token, columns.start : columns.stop] = b @ (a @ x[token].double().cpu())
    return out


@covering(
    {
        "parts": [PARTS, GATED],
        "slots": [[2], [0] * 5, [-1, 2, 0, 2, 1, -1, 0], [0] * 17 + [2] * 16 + [-1] * 3, [-1, 1]],
        "way": ["reference", "kernels", "replacing kernels", "few programs"],
    }
)
def test_each_token_has_its_own_adapter(
    parts: list[ColumnPart], slots: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, owners = filled(parts), np.array(slots)
    x = torch.randn(len(slots), IN, generator=torch.Generator().manual_seed(1)).to(weights.a.device)
    y = torch.full((len(slots), OUT), 0.0 if way != "replacing kernels" else torch.nan, device=x.device)
    if way == "reference":
        for slot in {0, 2} & set(slots):
            weights._add_group(x, y, slot, torch.from_numpy(np.flatnonzero(owners == slot)).to(x.device))
    else:
        from kernels.lora import segmented_kernels

        if way == "few programs":
            monkeypatch.setattr(segmented_kernels, "_PROGRAMS", 2 * len(slots))
            monkeypatch.setattr(segmented_kernels, "_MOST_ROWS", 16)
        segmented_kernels.add_segmented(
            weights, x, y, HostSegments(owners, x.device), replaces=way == "replacing kernels"
        )
    torch.testing.assert_close(y.cpu().double(), by_token(weights, x, owners), atol=1e-4, rtol=1e-4)


class HostSegments(Segments):
    """Segments whose tiles are where the kernels run, also without a GPU; padded as for a CUDA graph."""

    def __init__(self, slots: np.ndarray, device: torch.device) -> None:
        self.num_tiles = most_tiles(len(slots), SLOTS)
        self._fields = {}
        for name, values in Tiles.of(slots)._asdict().items():
            room = np.zeros(max(self.num_tiles, len(slots)), dtype=np.int32)
            room[: len(values)] = values
            self._fields[name] = torch.from_numpy(room).to(device)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._fields[name]


@pytest.mark.parametrize("seed", range(5))
def test_tiles_have_every_token_once(seed: int) -> None:
    random = np.random.default_rng(seed)
    slots = random.integers(-1, SLOTS, size=random.integers(1, 100))
    tiles = Tiles.of(slots)
    assert len(tiles.slots) <= most_tiles(len(slots), SLOTS)
    found = []
    for slot, first, count in zip(tiles.slots, tiles.firsts, tiles.counts, strict=True):
        own = tiles.order[first : first + count]
        assert 0 < count <= TILE
        assert (slots[own] == slot).all()
        found += own.tolist()
    assert sorted(found) == list(range(len(slots)))
