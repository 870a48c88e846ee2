"""The decoder, one for all architectures: embedding, layers, norm, output head.

`worker.models.layer` states a layer. `Decoder` runs the layers of a rank in one of five ways, with the same parts:

| way | when | what it gives |
| --- | --- | --- |
| whole batch (`Decoder.forward`) | always possible | every kernel runs once for all tokens |
| two halves (`_forward_in_halves`) | long steps of several ranks | all-reduces overlap matrix products |
| one token (`_forward_one_token`) | one sequence decodes, on a GPU | GEMV kernels that include norms and residuals |
| adapted (`_forward_adapted`) | some sequence has an adapter | products of adapters, by `AdaptedLayers` |
| pieces (`piece`, `finish`) | long steps of one stage, on a GPU | CUDA graphs between attentions |
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention.interface import AttentionBackend
from kernels.linear.block_linear import BlockLinear
from kernels.linear.block_weight import BlockMatrix
from kernels.linear.gemm_autotune import Epilogue, TuneResult, autotune
from kernels.linear.linear import Linear
from kernels.ops.norm import normalise
from kernels.recurrent.states import RecurrentStates
from worker.models.config import DecoderConfig
from worker.models.experts import ExpertMLP
from worker.models.forward_context import ForwardContext
from worker.models.latent_attention import LatentAttention
from worker.models.layer import DecoderLayer, SelfAttention
from worker.models.layer_inputs import LayerInputs
from worker.models.parameters import pop_layer
from worker.models.residual_stream import (
    EMBEDDING_BUFFER,
    FirstSum,
    HalfBatchStream,
    OneTokenStream,
    ResidualStream,
)
from worker.parallel.communicator import Communicator

HALVES_FROM_TOKENS = 2048
"""Steps of at least this many tokens are computed in two halves with tensor parallelism."""

_WARM_UP_STRIDE = 8  # between sizes that `warm_up` runs: a size in between uses the kernels of one of its neighbours


@dataclass
class PieceBuffers:
    """Tensors that pieces and attention read and write, at addresses that CUDA graphs can hold. Implements
    `kernels.attention.interface.KVSlots`.

    | field | shape | meaning |
    | --- | --- | --- |
    | `token_ids`, `positions` | int64 `[n]` | input of the step |
    | `slots` | int64 `[n]` each | by pool, slots of `kv` for the tokens' keys and values |
    | `kv` | | by pool, the KV cache |
    | `layout` | | as in `AttentionBackend` |
    | `hidden` | `[n, hidden_size]` | hidden states from one piece to the next |
    | `queries` | `[n, num_heads, query_size]` | input of the attention between two pieces |
    | `attended` | `[n, num_heads, output_size]` | its output |
    | `gates` | `[n, gates]` | the gates of that output (`DecoderConfig.output_gate`), from one piece to the next |
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: Sequence[torch.Tensor]
    kv: Sequence[torch.Tensor]
    layout: Sequence[tuple[int, int]]
    hidden: torch.Tensor
    queries: torch.Tensor
    attended: torch.Tensor
    gates: torch.Tensor

    def first(self, n: int) -> "PieceBuffers":
        """The part for the first n tokens."""
        return PieceBuffers(
            self.token_ids[:n],
            self.positions[:n],
            [slots[:n] for slots in self.slots],
            self.kv,
            self.layout,
            self.hidden[:n],
            self.queries[:n],
            self.attended[:n],
            self.gates[:n],
        )

    def place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVSlots.place`."""
        pool, index = self.layout[layer]
        return self.slots[pool], self.kv[pool][index]


class Decoder:
    """Decoder, or the part of one that a rank holds.

    - Tensor parallelism: `config` and `parameters` are this rank's part. All ranks of `group` call the same methods
      with the same tokens.
    - Pipeline parallelism: a stage that is not the first takes the output of the stage before. A stage that is not the
      last has no logits.
    """

    def __init__(
        self, config: DecoderConfig, parameters: dict[str, Any], dtype: torch.dtype, group: Communicator | None = None
    ) -> None:
        """`parameters` are those of `parameter_shapes(config)`, all on one device. Matrices of layers may be
        `Fp8Weight`s, and matrices on a CPU `BlockMatrix`es. The parameters are removed from the dictionary, so that a
        weight and its rearranged copy are in memory together for one layer at a time. `dtype` is that of the
        activations."""
        self.config, self.dtype = config, dtype
        self.communicator = group or Communicator.single()
        some = next(value for name, value in parameters.items() if name.startswith("layers."))
        self.device = some.device if isinstance(some, BlockMatrix) else some[0].device
        self.embedding: torch.Tensor | BlockMatrix | None = parameters.pop("embedding", None)
        self.positions: torch.Tensor | None = parameters.pop("positions", None)
        self.layer_inputs, self._inputs_embedding = self._make_layer_inputs(parameters)
        if config.is_last:
            self.norm = parameters.pop("norm")
            head = self.embedding if config.tied_embeddings else parameters.pop("head")
            bias = parameters.pop("head_bias", None)
            self.head = BlockLinear(head) if isinstance(head, BlockMatrix) else Linear(head, bias)
        self.expert_load = self._make_expert_load()
        self.layers = [
            DecoderLayer.from_parameters(config, index, self._pop_layer(parameters, index))
            for index in range(config.num_layers)
        ]
        # The last layer with attention: what follows it needs no other token. 0 on a stage without attention.
        self._last = max((i for i, layer in enumerate(self.layers) if layer.attention is not None), default=0)
        sums = [layer.sums for layer in self.layers]
        # Of a stream that begins with layer i.
        self._first_sums = [FirstSum.of(sum(sums[i:]), config.is_first or i > 0) for i in range(config.num_layers)]
        # The scale is rounded to the embedding's dtype: Gemma was trained so.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.is_on_gpu = self.device.type == "cuda"
        # Float32 keeps to the products of large batches.
        self._has_one_token_path = (
            self.is_on_gpu
            and not (config.sandwich_norms or config.layer_norms or config.head_bias)
            and dtype in (torch.bfloat16, torch.float16)
        )

    def _make_layer_inputs(self, parameters: dict[str, Any]) -> tuple[LayerInputs | None, torch.Tensor | None]:
        """Maker of the inputs of all layers, and their embedding, on the first stage of a model that has any."""
        config = self.config
        if config.layer_inputs is None or not config.is_first:
            return None, None
        projection, norm = (parameters.pop(f"layer_inputs_{name}") for name in ("projection", "norm"))
        inputs = LayerInputs(config.layer_inputs, Linear(projection), norm, config.norm_eps)
        return inputs, parameters.pop("layer_inputs_embedding")

    @property
    def has_pieces(self) -> bool:
        """Whether `piece` supports the model: all layers have the same sizes and sublayers, attention, and no inputs of
        their own."""
        config = self.config
        others = (config.recurrent, config.own_sizes, config.layer_inputs, config.sublayers)
        return all(each is None for each in others)

    def _make_expert_load(self) -> torch.Tensor | None:
        """Counts of the tokens of each layer and expert so far, int64 `[num_layers, experts]`, with expert
        parallelism."""
        experts = self.config.experts
        if experts is None or experts.held is None:
            return None
        return torch.zeros(self.config.num_layers, experts.count, dtype=torch.int64, device=self.device)

    def _pop_layer(self, parameters: dict[str, Any], index: int) -> dict[str, Any]:
        own = pop_layer(parameters, index, self.dtype)
        return own if self.expert_load is None else own | {"expert_load": self.expert_load[index]}

    @property
    def latent_weights(self) -> list[torch.Tensor]:
        """Matrices of each layer that `kernels.attention.latent` multiplies with; none without latent attention."""
        attentions = (layer.attention for layer in self.layers)
        return [attention.kv_b for attention in attentions if isinstance(attention, LatentAttention)]

    @property
    def sinks(self) -> torch.Tensor | None:
        """The sinks of all layers, as an attention backend takes them; None for a model without."""
        attentions = (layer.attention for layer in self.layers)
        own = [each.sinks for each in attentions if isinstance(each, SelfAttention) and each.sinks is not None]
        return torch.stack(own) if own else None

    def build_rope_tables(self, context_length: int) -> None:
        """Makes the tables of rotary angles for positions below `context_length`. On a GPU, call before `forward`."""
        tables = {rope: rope.table(context_length, self.device) for rope in set(self.config.ropes)}
        for layer in self.layers:
            if isinstance(layer.attention, SelfAttention | LatentAttention):
                layer.attention.rope_table = tables[layer.attention.rope]

    @torch.inference_mode()
    def autotune_gemms(
        self, step_sizes: Sequence[int], max_tokens: int, folder: Path | None = None
    ) -> list[TuneResult]:
        """Runs `kernels.linear.gemm_autotune.autotune` for the sizes, in tokens, that steps will have; `folder` keeps
        its choices. On a GPU, call before CUDA graphs are captured."""
        adds = self.communicator.size == 1 and not self.config.sandwich_norms
        last = Epilogue.ADDED if adds else Epilogue.PLAIN
        uses = [(self.head, Epilogue.FLOAT32)] if self.config.is_last and isinstance(self.head, Linear) else []
        for layer in self.layers:
            own = layer.linears
            uses += [(each, last if adds else Epilogue.PLAIN) for each, adds in own if isinstance(each, Linear)]
        return autotune(uses, step_sizes, max_tokens, folder=folder)

    @torch.inference_mode()
    def autotune_experts(self, max_tokens: int, folder: Path | None = None) -> None:
        """Chooses the tiles of experts for steps of up to `max_tokens` tokens (`kernels.experts.autotune`); `folder`
        keeps the choices. On a GPU, call before CUDA graphs are captured. Nothing to do for a model without experts."""
        mlps = [layer.mlp for layer in self.layers if isinstance(layer.mlp, ExpertMLP)]
        if mlps and self.is_on_gpu:
            from kernels.experts import autotune as tiles

            tiles.autotune([mlp.experts for mlp in mlps], mlps[0].experts_of_token, max_tokens, folder)

    @torch.inference_mode()
    def warm_up(self, max_logits: int) -> None:
        """Runs the part of a step after the last attention for up to `max_logits` tokens, as steps without CUDA graphs
        do.

        The driver loads a kernel at its first launch, and may then wait for all work that the device has queued. With
        pipeline parallelism, that includes receives of what other stages have yet to send.
        """
        config = self.config
        for n in range(_WARM_UP_STRIDE, max_logits + 1, _WARM_UP_STRIDE) if config.is_last else ():
            x = torch.ones(n, config.hidden_size, dtype=self.dtype, device=self.device)
            own = config.layer_inputs
            inputs = None if own is None else x.new_ones(n, own.layers, own.size)
            attention = self.layers[self._last].attention
            attended = None if attention is None else x.new_ones(n, attention.attended_size)
            self.logits(self.finish(x, attended, layer_inputs=inputs))

    def forward(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        logit_indices: torch.Tensor | None = None,
        states: RecurrentStates | None = None,
        adapted: Sequence[DecoderLayer] | None = None,
    ) -> torch.Tensor:
        """Runs all layers for the chunks that `attention` has planned, in their order, as have `states`, where the
        model has recurrent layers.

        - `inputs`: token ids, int64 `[n]`. After another stage: its output, `[n, config.received_size]`, which is
          overwritten.
        - `positions`: int64 `[n]`.
        - `logit_indices`: indices of the tokens whose output is returned, int64 `[m]`, in any order. None: all tokens.
        - `adapted`: layers with adapters, which run in place of the decoder's own (`worker.models.adapted_layers`).

        Returns the last layer's output before the final norm, `[m, hidden_size]`; before another stage
        `[m, config.sent_size]`.
        """
        x, layer_inputs = self._begin(inputs, positions)
        ropes = () if self.is_on_gpu else set(self.config.ropes)
        angles = {rope: rope.angles(positions, x.dtype) for rope in ropes}
        context = ForwardContext(positions, attention, None if self.is_on_gpu else angles, states)
        if adapted is not None:
            x = self._forward_adapted(adapted, x, context, layer_inputs)
            return self._end(x if logit_indices is None else x[logit_indices], layer_inputs)
        if self._has_one_token_path and len(x) == 1:
            x = self._forward_one_token(x, context)
            return x if logit_indices is None else x[logit_indices]
        layers, last = self.layers[: self._last], self.layers[self._last]
        stream = self._stream(x, layer_inputs)
        if self.communicator.size > 1 and len(x) >= HALVES_FROM_TOKENS and not self.config.sandwich_norms:
            # The last attention, and what follows it, is not run in halves: few tokens are left then.
            self._forward_in_halves(layers, x, context)
        else:
            for layer in layers:
                layer.forward(stream, context)
        attended = None
        if last.attention is not None:
            attended = last.attention.forward(last.attention.project(stream), context)
        x = self.finish(x, attended, logit_indices, layer_inputs)
        return self._end(x, layer_inputs)

    def piece(self, index: int, buffers: PieceBuffers, adapted: Sequence[DecoderLayer] | None = None) -> None:
        """The part of `forward` between two calls of attention, on a GPU: from layer `index - 1`'s to layer `index`'s.
        With `index` equal to the number of layers, the part after the last one's. `adapted`: as for `forward`.

        Reads `buffers.attended` and `gates`, the first piece `token_ids` instead. Updates `hidden`, writes `queries`,
        `gates` and the keys and values of layer `index`. In a CUDA graph, a piece is launched at once
        (`worker.executor.piecewise_graphs`).
        """
        layers = self.layers if adapted is None else adapted
        if index == 0:
            buffers.hidden.copy_(self._embed(buffers.token_ids, buffers.positions))
        stream = self._stream(buffers.hidden, first=max(0, index - 1))
        if index > 0:
            layers[index - 1].post_attention(stream, self.gated(buffers))
        if index == len(layers):
            stream.complete()
            return
        attention = layers[index].attention
        assert isinstance(attention, SelfAttention | LatentAttention), "`has_pieces` says which models have pieces"
        projected = attention.project(stream)
        attention.rotate_and_store(projected, buffers.positions, buffers, buffers.queries)
        if isinstance(attention, SelfAttention) and (gates := attention.gates(projected)) is not None:
            buffers.gates.copy_(gates)

    def gated(self, buffers: PieceBuffers) -> torch.Tensor:
        """The output of attention between two pieces, `[n, num_heads * output_size]`, times its gates if the model has
        any."""
        gate, attended = self.config.output_gate, buffers.attended
        return (attended if gate is None else gate.apply(attended, buffers.gates)).flatten(1)

    def finish(
        self,
        x: torch.Tensor,
        attended: torch.Tensor | None,
        logit_indices: torch.Tensor | None = None,
        layer_inputs: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The rest of `forward`, after the last attention, which was given x and returned `attended`; None on a stage
        without attention."""
        if logit_indices is not None:
            # The other tokens are needed only for their keys and values, which are in the pages now.
            x, attended = x[logit_indices], None if attended is None else attended[logit_indices]
            layer_inputs = None if layer_inputs is None else layer_inputs[logit_indices]
        stream = self._stream(x, layer_inputs, self._last)
        last, *others = self.layers[self._last :]
        last.post_attention(stream, attended)
        for layer in others:
            layer.post_attention(stream, None)
        return stream.complete()

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the next token for tokens of `forward`'s output: float32 `[n, vocab_size]`, in `out` if given."""
        if self._has_one_token_path and len(hidden) == 1:
            scores = self._logits_of_one(hidden, out)
        else:
            normalised = normalise(hidden, self.norm, self.config.norm_eps)
            scores = self.head.in_float32(normalised, out if self.communicator.size == 1 else None)
        if self.communicator.size > 1:
            scores = self.communicator.all_gather(scores)[:, : self.config.vocab_size]
            scores = scores.contiguous() if out is None else out.copy_(scores)
        if self.config.logit_scale != 1.0:
            scores.mul_(self.config.logit_scale)
        if (cap := self.config.logit_softcap) is not None:
            scores.div_(cap).tanh_().mul_(cap)
        return scores

    def normalised(self, hidden: torch.Tensor) -> torch.Tensor:
        """`forward`'s output after the final norm, float32 `[n, hidden_size]`."""
        return normalise(hidden, self.norm, self.config.norm_eps).float()

    def _stream(self, x: torch.Tensor, layer_inputs: torch.Tensor | None = None, first: int = 0) -> ResidualStream:
        """The stream that layers from `first` on read and add to."""
        return ResidualStream(x, self.communicator, self.config.norm_eps, layer_inputs, self._first_sums[first])

    def _begin(self, inputs: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states before the first layer, and the inputs of all layers from there on, `[n, layers, size]`, if the
        model has any. `inputs`, `positions`: as in `forward`."""
        own, hidden = self.config.layer_inputs, self.config.hidden_size
        if not self.config.is_first:
            if own is None:
                return inputs, None
            return inputs[:, :hidden].contiguous(), inputs[:, hidden:].unflatten(1, (own.layers, own.size))
        x = self._embed(inputs, positions)
        if self.layer_inputs is None:
            return x, None
        assert self._inputs_embedding is not None
        rows, absent = self._own_rows(inputs, self._inputs_embedding)
        if absent is not None:
            rows = self.communicator.all_reduce(rows.masked_fill_(absent, 0))
        return x, self.layer_inputs(rows, x)

    def _end(self, x: torch.Tensor, layer_inputs: torch.Tensor | None) -> torch.Tensor:
        """Result of `forward`: before another stage with the inputs of later layers."""
        if layer_inputs is None or self.config.is_last:
            return x
        return torch.cat((x, layer_inputs[:, self.config.num_layers :].flatten(1)), dim=1)

    def _embed(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeds tokens, and their positions if the model does that. Each rank looks up the tokens of its part of the
        vocabulary and takes zeros for the others; the parts are summed."""
        assert self.embedding is not None
        x, absent = self._own_rows(token_ids, self.embedding)
        if absent is not None:
            own = x.masked_fill_(absent, 0)
            buffer = self.communicator.reduce_buffer(len(own), own.shape[1], own.dtype, EMBEDDING_BUFFER)
            x = self.communicator.all_reduce(own if buffer is None else buffer.copy_(own))
        x = x if self.embedding_scale == 1.0 else x * self.embedding_scale
        return x if self.positions is None else x + F.embedding(positions, self.positions)

    def _own_rows(
        self, ids: torch.Tensor, embedding: torch.Tensor | BlockMatrix
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows of this rank's part of an embedding. With several ranks also which tokens are others', bool `[n, 1]`:
        their rows are arbitrary."""
        absent = None
        if self.communicator.size > 1:
            ids = ids - self.communicator.rank * self.config.vocab_rows
            absent = (ids < 0) | (ids >= self.config.vocab_rows)
            ids, absent = ids.masked_fill(absent, 0), absent[:, None]
        if isinstance(embedding, BlockMatrix):
            return embedding.gather(ids).to(self.dtype), absent
        return F.embedding(ids, embedding), absent

    def _forward_in_halves(self, layers: list[DecoderLayer], x: torch.Tensor, context: ForwardContext) -> None:
        """Runs `layers`, in place in x, with the tokens cut into halves: while one half is summed over the ranks, the
        other is computed (`HalfBatchStream`). Only attention needs both halves."""
        halves = (slice(0, len(x) // 2), slice(len(x) // 2, len(x)))
        streams = [HalfBatchStream(x[half], self.communicator, self.config.norm_eps) for half in halves]
        for layer in layers:
            if (attention := layer.attention) is not None:
                qkv = x.new_empty(len(x), attention.projected_size)
                for half, stream in zip(halves, streams, strict=True):
                    attention.project(stream, qkv[half])
                attended = attention.forward(qkv, context)
                for half, stream in zip(halves, streams, strict=True):
                    if layer.is_parallel:
                        layer.post_attention(stream, attended[half])
                    else:
                        attention.add_output(stream, attended[half])
            if layer.mlp is not None and not layer.is_parallel:
                for stream in streams:
                    layer.mlp.forward(stream)
        for stream in streams:
            stream.complete()

    def _forward_adapted(
        self,
        layers: Sequence[DecoderLayer],
        x: torch.Tensor,
        context: ForwardContext,
        layer_inputs: torch.Tensor | None,
    ) -> torch.Tensor:
        """Runs layers with adapters for all tokens: which adapter is whose is said once, for the whole batch."""
        stream = self._stream(x, layer_inputs)
        for layer in layers:
            layer.forward(stream, context)
        return stream.complete()

    def _forward_one_token(self, x: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Runs all layers for one token (`OneTokenStream`)."""
        stream = OneTokenStream(x, self.communicator, self.config.norm_eps, first_sum=self._first_sums[0])
        for layer in self.layers:
            layer.forward(stream, context)
        return stream.complete()

    def _logits_of_one(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        from kernels.linear.gemv import gemv

        weight = self.head.weight
        assert isinstance(weight, torch.Tensor), "weights on a GPU have no blocks"
        if out is None or self.communicator.size > 1:
            out = hidden.new_empty(1, len(weight), dtype=torch.float32)
        return gemv(hidden, weight, norm=self.norm, eps=self.config.norm_eps, out=out)
