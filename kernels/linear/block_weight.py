"""Weights of 4 and 8 bits with scales for groups of columns, in the layout of the CPU's products.

Rows are taken in tiles of `LANES`, so that each element of a vector register has another row. Formats of checkpoints
become this layout as they are loaded (`kernels.linear.ggml_blocks`), with every weight as it was.
"""

from dataclasses import dataclass

import torch

from kernels.linear.block_instructions import LANES


@dataclass(frozen=True)
class Blocks:
    """A matrix as its format has it, before it is arranged in tiles.

    | field | shape, dtype | meaning |
    | --- | --- | --- |
    | `values` | uint8 `[rows, columns]` | integers of `bits` bits, 4 or 8 |
    | `zero` | | the integer that stands for 0 |
    | `group` | | columns that have a scale in common: 32, or 16 with 8 bits |
    | `scales` | float16 or float32 `[rows, columns / (group * share)]` | |
    | `least` | as `scales`, or None | added to the weights of a group |
    | `sub_scales`, `sub_least` | int8, uint8 `[rows, columns / group]`, or None | factors of `scales` and `least` |

    A weight is `scales * sub_scales * (value - zero) + least * sub_least`.
    """

    values: torch.Tensor
    bits: int
    group: int
    scales: torch.Tensor
    least: torch.Tensor | None = None
    sub_scales: torch.Tensor | None = None
    sub_least: torch.Tensor | None = None
    zero: int = 0

    @property
    def share(self) -> int:
        """Groups for each element of `scales`."""
        return self.values.shape[1] // self.group // self.scales.shape[1]

    def rows(self, index: torch.Tensor) -> "Blocks":
        """The rows of an index, int64."""
        return self._with([part if part is None else part[index] for part in self._parts])

    def padded(self, rows: int, columns: int) -> "Blocks":
        """The matrix with zeros below and to the right, `[rows, columns]`. `columns` are whole elements of `scales`."""
        own = self.values.shape[1]
        if (rows, columns) == self.values.shape:
            return self
        parts: list[torch.Tensor | None] = []
        for part in self._parts:
            if part is not None:
                larger = part.new_zeros(rows, part.shape[1] * columns // own)
                larger[: len(part), : part.shape[1]] = part
                part = larger
            parts.append(part)
        return self._with(parts)

    @property
    def _parts(self) -> list[torch.Tensor | None]:
        return [self.values, self.scales, self.least, self.sub_scales, self.sub_least]

    def _with(self, parts: list[torch.Tensor | None]) -> "Blocks":
        values, scales, least, sub_scales, sub_least = parts
        assert values is not None and scales is not None
        return Blocks(values, self.bits, self.group, scales, least, sub_scales, sub_least, self.zero)


@dataclass(frozen=True)
class BlockWeight:
    """A matrix `[rows, columns]` in tiles: the fields of `Blocks`, with the rows of a tile as the last dimension.

    `quants` is uint8 `[tiles, columns / group, fours, LANES, 4]`, so that four columns of a row are together. With 4
    bits, byte k of a group has columns k (its low half) and `k + group / 2`. The rows after the last one, in the last
    tile, are zeros.
    """

    rows: int
    columns: int
    bits: int
    group: int
    share: int
    zero: int
    quants: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor | None
    sub_scales: torch.Tensor | None
    sub_least: torch.Tensor | None

    @classmethod
    def of(cls, blocks: Blocks) -> "BlockWeight":
        """Arranges a matrix in tiles."""
        rows, columns = blocks.values.shape
        values = blocks.values.unflatten(1, (-1, blocks.group))
        if blocks.bits == 4:
            low, high = values.split(blocks.group // 2, dim=2)
            values = low | (high << 4)
        fours = values.flatten(1).contiguous().view(torch.int32)
        quants = _tiles(fours).view(torch.uint8).unflatten(1, (columns // blocks.group, -1)).unflatten(-1, (LANES, 4))
        return cls(
            rows,
            columns,
            blocks.bits,
            blocks.group,
            blocks.share,
            blocks.zero,
            quants,
            _tiles(blocks.scales),
            *(None if each is None else _tiles(each) for each in (blocks.least, blocks.sub_scales, blocks.sub_least)),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        parts = (self.quants, self.scales, self.least, self.sub_scales, self.sub_least)
        return sum(part.nbytes for part in parts if part is not None)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Some of the rows, float32 `[n, columns]`. rows: int64 `[n]`."""
        tiles, lanes = rows // LANES, rows % LANES
        quants = self.quants[tiles, :, :, lanes].flatten(2)
        if self.bits == 4:
            quants = torch.cat((quants & 15, quants >> 4), dim=2)
        values = quants.float().sub_(self.zero)
        values.mul_(self._gathered(self.scales, self.sub_scales, tiles, lanes)[..., None])
        if self.least is not None:
            values.add_(self._gathered(self.least, self.sub_least, tiles, lanes)[..., None])
        return values.flatten(1)

    def _gathered(
        self, numbers: torch.Tensor, factors: torch.Tensor | None, tiles: torch.Tensor, lanes: torch.Tensor
    ) -> torch.Tensor:
        """Numbers of the groups of some rows, float32 `[n, groups]`."""
        own = numbers[tiles, :, lanes].float().repeat_interleave(self.share, dim=1)[:, : self.columns // self.group]
        return own if factors is None else own * factors[tiles, :, lanes].float()


@dataclass(frozen=True)
class BlockMatrix:
    """A matrix on a CPU whose rows are those of `parts`, one below the other: its formats may differ by rows."""

    parts: tuple[BlockWeight, ...]

    @classmethod
    def of(cls, blocks: list[Blocks]) -> "BlockMatrix":
        """Puts matrices with the same columns, one below the other, into as few parts as possible."""
        stacked: list[Blocks] = []
        for each in blocks:
            stacked = [*stacked[:-1], *(_stacked(stacked[-1], each) if stacked else [each])]
        return cls(tuple(BlockWeight.of(each) for each in stacked))

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].quants.device

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(part.nbytes for part in self.parts)

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Some of the rows, float32 `[n, columns]`. rows: int64 `[n]`."""
        if len(self.parts) == 1:
            return self.parts[0].gather(rows)
        out = torch.empty(len(rows), self.parts[0].columns)
        begin = 0
        for part in self.parts:
            own = (rows >= begin) & (rows < begin + part.rows)
            out[own] = part.gather(rows[own] - begin)
            begin += part.rows
        return out


def _stacked(above: Blocks, below: Blocks) -> list[Blocks]:
    """Two matrices as one, if they are of one kind."""
    if _kind(above) != _kind(below):
        return [above, below]
    pairs = zip(above._parts, below._parts, strict=True)
    return [above._with([None if a is None or b is None else torch.cat((a, b)) for a, b in pairs])]


def _kind(blocks: Blocks) -> tuple[object, ...]:
    absent = (part is None for part in blocks._parts)
    return (blocks.bits, blocks.group, blocks.share, blocks.zero, blocks.scales.dtype, *absent)


def _tiles(x: torch.Tensor) -> torch.Tensor:
    """Rows of a tile as the last dimension: `[rows, size]` to `[tiles, size, LANES]`, filled up with zeros."""
    missing = -len(x) % LANES
    if missing:
        x = torch.cat((x, x.new_zeros(missing, x.shape[1])))
    return x.unflatten(0, (-1, LANES)).transpose(1, 2).contiguous()
