"""Part of a model that each rank holds: its share of the layers of its stage.

- Attention is cut by heads, the MLP and each expert by its intermediate size, embedding and head by rows of the
  vocabulary. Every rank has all norms and routers.
- With expert parallelism each rank has some experts of every layer, whole, in place of a part of each.
- Recurrent layers are cut by key heads. With fewer groups of Mamba2 than ranks, several ranks hold the keys of a group
  and some of its heads each.
- Sizes that cannot be divided are padded with heads, rows and columns of zeros. These add exactly nothing, and all
  ranks have the same shapes.
- With fewer KV heads than ranks, several ranks hold the same KV head. Latent attention has one: all ranks hold all
  latents, and the matrices that make them.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.stages import contiguous, split_costs
from worker.models.config import DecoderConfig
from worker.models.experts import ExpertsConfig
from worker.models.layer_sizes import LayerSizes
from worker.models.layer_specs import layer_specs


@dataclass(frozen=True)
class Shard:
    """Part of a model that one rank holds.

    | field | meaning |
    | --- | --- |
    | `whole` | the whole model |
    | `rank`, `size` | this rank among the ranks of its stage |
    | `stage`, `stages` | its stage |
    | `cut` | number of layers of each stage; None: divided by cost |
    | `expert_parallel` | experts are divided among the ranks of a stage, and not cut |

    Ranges are in elements of the whole model. The rank's own sizes, in `config`, include padding and may be larger.

    Raises ValueError for ranks without a head, stages without a layer, or a cut with another number of layers, and for
    expert parallelism of a model without experts or with fewer than ranks.
    """

    whole: DecoderConfig
    rank: int = 0
    size: int = 1
    stage: int = 0
    stages: int = 1
    cut: tuple[int, ...] | None = None
    expert_parallel: bool = False

    def __post_init__(self) -> None:
        if self.size > self.whole.num_heads:
            raise ValueError(
                f"tp={self.size} is more than the model's {self.whole.num_heads} attention heads: lower tp"
            )
        if self.stages > (most := len(self._blocks)):
            joined = "" if most == self.whole.num_layers else " that can be parted: others share keys and values"
            raise ValueError(f"pp={self.stages} is more than the model's {most} layers{joined}: lower pp")
        if self.expert_parallel and self.whole.experts is None:
            raise ValueError(
                f"enable_expert_parallel is set, and a {self.whole.model_type} model has no experts: leave it out"
            )
        if self.expert_parallel and self.whole.experts is not None and self.size > self.whole.experts.count:
            raise ValueError(f"tp={self.size} is more than the model's {self.whole.experts.count} experts: lower tp")
        if self.cut is not None and sum(self.cut) != self.whole.num_layers:
            said = ",".join(map(str, self.cut))
            raise ValueError(f"stage_layers={said} are {sum(self.cut)} layers: the model has {self.whole.num_layers}")
        if self.cut is not None and not {part.start for part in contiguous(self.cut)} <= {
            block.start for block in self._blocks
        }:
            said = ",".join(map(str, self.cut))
            raise ValueError(
                f"stage_layers={said} parts layers that share keys and values: those from layer "
                f"{self._blocks[-1].start} on belong to one stage"
            )

    @cached_property
    def config(self) -> DecoderConfig:
        """Configuration of the decoder that every rank of this stage runs."""
        whole = self.whole
        if self.stages > 1:
            layers = slice(self.layers.start, self.layers.stop)
            experts, inputs = whole.experts, whole.layer_inputs
            whole = replace(
                whole,
                num_layers=len(self.layers),
                windows=whole.windows[layers],
                ropes=whole.ropes[layers],
                own_sizes=None if whole.own_sizes is None else whole.own_sizes[layers],
                layer_inputs=None if inputs is None else replace(inputs, layers=inputs.layers - layers.start),
                experts=None if experts is None else replace(experts, layers=experts.layers[layers]),
                recurrent=None if (own := whole.recurrent) is None else replace(own, layers=own.layers[layers]),
                sublayers=None if whole.sublayers is None else whole.sublayers[layers],
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
            own_sizes=None if whole.own_sizes is None else tuple(map(self._own_sizes, self.layers)),
            experts=None if whole.experts is None else self._own_experts(whole.experts),
            recurrent=None if whole.recurrent is None else whole.recurrent.of_rank(self.rank, self.size),
            qk_norm_sizes=(whole.qk_norm_sizes[0], whole.qk_norm_sizes[1] * self._copies),
            ranks=self.size,
        )

    @cached_property
    def layers(self) -> range:
        """Layers of this stage. The head's cost counts for the last stage. The embedding's does not count for the
        first, since a step reads next to nothing of it."""
        return self._cuts[self.stage]

    @cached_property
    def _cuts(self) -> list[range]:
        """Layers of each stage."""
        if self.cut is not None:
            return contiguous(self.cut)
        blocks, layers = self._blocks, layer_specs(self.whole)
        read = [float(sum(layer.all_weights for layer in layers[block.start : block.stop])) for block in blocks]
        multiplied = [float(sum(layer.multiplied for layer in layers[block.start : block.stop])) for block in blocks]
        parts = split_costs(read, multiplied, self.stages, float(self.whole.vocab_size * self.whole.hidden_size))
        return [range(blocks[part.start].start, blocks[part.stop - 1].stop) for part in parts]

    @cached_property
    def _blocks(self) -> list[range]:
        """Consecutive layers that belong to one stage: those that read keys and values of earlier ones, with these."""
        whole = self.whole
        own = whole.own_sizes or ()
        joined = min((index - each.kv_before for index, each in enumerate(own) if each.kv_before), default=None)
        if joined is None:
            return [range(index, index + 1) for index in range(whole.num_layers)]
        return [*(range(index, index + 1) for index in range(joined)), range(joined, whole.num_layers)]

    def of_layer(self, index: int) -> "Shard":
        """The same with the sizes of layer `index` of the model for all layers."""
        if self.whole.own_sizes is None:
            return self
        cut = tuple(len(part) for part in self._cuts) if self.stages > 1 else None
        return replace(self, whole=self.whole.of_layer(index), cut=cut)

    def _own_sizes(self, index: int) -> LayerSizes:
        own, config = self.whole.own_sizes, self.of_layer(index).config
        assert own is not None
        return replace(
            own[index],
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            intermediate_size=config.intermediate_size,
        )

    @property
    def heads(self) -> range:
        """Query heads: those that read `kv_heads`, or this rank's share of them where several ranks hold the KV
        head."""
        kv_heads = self.kv_heads
        if self._copies == 1:
            return range(kv_heads.start * self._group, kv_heads.stop * self._group)
        first = kv_heads.start * self._group
        part = _part(self._group, self.rank % self._copies, self._heads_per_rank)
        return range(first + part.start, first + part.stop) if kv_heads else range(0)

    @property
    def kv_heads(self) -> range:
        """KV heads: this rank's own, or one that several ranks hold."""
        return _part(self.whole.num_kv_heads, self.rank // self._copies, self._kv_heads_per_rank)

    @property
    def intermediate(self) -> range:
        """Elements of the MLP's intermediate state."""
        return _part(self.whole.intermediate_size, self.rank, self.config.intermediate_size)

    @property
    def expert_intermediate(self) -> range:
        """Elements of the intermediate state of each expert. Empty without experts."""
        whole, own = self.whole.experts, self.config.experts
        if whole is None or own is None:
            return range(0)
        return _part(whole.intermediate_size, 0 if self.expert_parallel else self.rank, own.intermediate_size)

    @property
    def shared_intermediate(self) -> range:
        """Elements of the intermediate state of the shared experts. Empty without experts."""
        whole, own = self.whole.experts, self.config.experts
        return range(0) if whole is None or own is None else _part(whole.shared_size, self.rank, own.shared_size)

    @property
    def key_heads(self) -> range:
        """Key heads of the recurrent layers: this rank's own, or one that several ranks hold. Empty without such
        layers."""
        whole, own = self.whole.recurrent, self.config.recurrent
        if whole is None or own is None:
            return range(0)
        return _part(whole.states.key_heads, self.rank // whole.copies(self.size), own.states.key_heads)

    @property
    def value_heads(self) -> range:
        """Value heads of the recurrent layers: those that belong to `key_heads`, or this rank's share of them. Empty
        without such layers."""
        whole, own = self.whole.recurrent, self.config.recurrent
        if whole is None or own is None:
            return range(0)
        copies, group = whole.copies(self.size), whole.states.value_heads // whole.states.key_heads
        first = self.key_heads.start * group
        if copies == 1:
            return range(first, self.key_heads.stop * group)
        part = _part(group, self.rank % copies, own.states.value_heads)
        return range(first + part.start, first + part.stop) if self.key_heads else range(0)

    def _own_experts(self, experts: ExpertsConfig) -> ExpertsConfig:
        shared_size = _share(experts.shared_size, self.size)
        if self.expert_parallel:
            first, end = (experts.count * rank // self.size for rank in (self.rank, self.rank + 1))
            return replace(experts, shared_size=shared_size, held=range(first, end))
        size = _share(_share(experts.intermediate_size, self.size), experts.unit) * experts.unit
        return replace(experts, intermediate_size=size, shared_size=shared_size)

    @property
    def vocabulary(self) -> range:
        """Rows of the embedding and of the head. Empty if all rows of this rank are padding."""
        return _part(self.whole.vocab_size, self.rank, self.config.vocab_rows)

    @property
    def _group(self) -> int:
        """Number of query heads that read one KV head."""
        return self.whole.num_heads // self.whole.num_kv_heads

    @property
    def _copies(self) -> int:
        """Number of ranks that hold the same KV head."""
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
