"""Which part of a model each rank holds: its stage's layers, and of these its share.

Attention is cut by heads, the MLP by its intermediate size, embedding and head by rows of the vocabulary. Norms are on
every rank. What does not divide is padded with heads, rows and columns of zeros, which add exactly nothing, so that all
ranks have the same shapes; KV heads that are fewer than the ranks are kept by several.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.stages import contiguous, split_layers
from worker.models.config import DecoderConfig


@dataclass(frozen=True)
class Shard:
    """The part of rank `rank` of `size` in stage `stage` of `stages` of the model `whole`. Ranges are in elements of
    the whole model; the rank's own sizes, in `config`, may be larger than its ranges, by the padding. `cut`: the layers
    of each stage, if they are not to be shared out by cost. Raises ValueError for ranks without a head, stages without
    a layer, or a cut of another number of layers."""

    whole: DecoderConfig
    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1
    cut: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.size > self.whole.num_heads:
            raise ValueError(
                f"tp={self.size} is more than the model's {self.whole.num_heads} attention heads: lower tp"
            )
        if self.stages > self.whole.num_layers:
            raise ValueError(f"pp={self.stages} is more than the model's {self.whole.num_layers} layers: lower pp")
        if self.cut is not None and sum(self.cut) != self.whole.num_layers:
            said = ",".join(map(str, self.cut))
            raise ValueError(f"stage_layers={said} are {sum(self.cut)} layers: the model has {self.whole.num_layers}")

    @cached_property
    def config(self) -> DecoderConfig:
        """The decoder that every rank of this size runs in this stage."""
        whole = self.whole
        if self.stages > 1:
            layers = slice(self.layers.start, self.layers.stop)
            whole = replace(
                whole,
                num_layers=len(self.layers),
                windows=whole.windows[layers],
                ropes=whole.ropes[layers],
                is_first=self.stage == 0,
                is_last=self.stage == self.stages - 1,
            )
        if self.size == 1:
            return whole
        return replace(
            whole,
            num_heads=self._heads_per_rank,
            num_kv_heads=self._kv_heads_per_rank,
            intermediate_size=_share(self.whole.intermediate_size, self.size),
            ranks=self.size,
        )

    @cached_property
    def layers(self) -> range:
        """Those of the stage. Of the embedding a step reads next to nothing, so it counts on none."""
        whole = self.whole
        if self.cut is not None:
            return contiguous(self.cut)[self.stage]
        attention = 2 * (whole.num_heads + whole.num_kv_heads) * whole.head_dim
        # Weights for each number of a token's hidden state.
        head = whole.vocab_size / (attention + 3 * whole.intermediate_size)
        return split_layers(whole.num_layers, self.stages, head)[self.stage]

    @property
    def heads(self) -> range:
        """Query heads: those that read `kv_heads`, or this rank's share of them."""
        kv_heads = self.kv_heads
        if self._copies == 1:
            return range(kv_heads.start * self._group, kv_heads.stop * self._group)
        first = kv_heads.start * self._group
        part = _part(self._group, self.rank % self._copies, self._heads_per_rank)
        return range(first + part.start, first + part.stop) if kv_heads else range(0)

    @property
    def kv_heads(self) -> range:
        """KV heads: this rank's alone, or one that several ranks keep."""
        return _part(self.whole.num_kv_heads, self.rank // self._copies, self._kv_heads_per_rank)

    @property
    def intermediate(self) -> range:
        """Of the MLP's inner state."""
        return _part(self.whole.intermediate_size, self.rank, self.config.intermediate_size)

    @property
    def vocabulary(self) -> range:
        """Rows of the embedding and of the head; none where all of a rank's are padding."""
        return _part(self.whole.vocab_size, self.rank, self.config.vocab_rows)

    @property
    def _group(self) -> int:
        """Query heads that read one KV head."""
        return self.whole.num_heads // self.whole.num_kv_heads

    @property
    def _copies(self) -> int:
        """Ranks that keep the same KV head."""
        return min(max(1, self.size // self.whole.num_kv_heads), self._group)

    @property
    def _heads_per_rank(self) -> int:
        return self._kv_heads_per_rank * _share(self._group, self._copies)

    @property
    def _kv_heads_per_rank(self) -> int:
        return _share(self.whole.num_kv_heads, self.size // self._copies)


def _share(total: int, parts: int) -> int:
    return -(-total // parts)


def _part(total: int, index: int, share: int) -> range:
    return range(min(total, index * share), min(total, (index + 1) * share))
