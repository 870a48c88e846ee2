"""The decoder, one for all architectures: embedding, layers of attention and gated MLP, norm, output head."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from kernels.attention.interface import AttentionBackend, KVSlots
from kernels.linear.fp8_linear import Fp8Linear, Fp8Weight
from kernels.linear.gemm_autotune import Epilogue, TuneResult, autotune
from kernels.linear.linear import Linear
from kernels.ops.activation import gelu_tanh_and_mul, silu_and_mul
from kernels.ops.norm import add_rms_norm, rms_norm
from kernels.ops.rotary import Rope, rotate
from worker.models.config import DecoderConfig
from worker.parallel.communicator import Communicator

# Turns of `Communicator.reduce_buffer`. Consecutive sums have different turns, also from one step to the next.
_ATTENTION_TURN, _MLP_TURN, _EMBEDDING_TURN = range(3)
_ROWS_APART = 8  # between sizes that `warm` runs: a size in between uses the kernels of one of its neighbours

HALVES_FROM_TOKENS = 2048
"""Steps of at least this many tokens are computed in two halves with tensor parallelism."""


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the decoder's parameters, by name. Matrices are `[out, in]`. The rows of `qkv` and `gate_up` are
    stacked in the order that the names say."""
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, qkv_rows = config.num_heads * head_dim, (config.num_heads + 2 * config.num_kv_heads) * head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_norm": (hidden,),
        "qkv": (qkv_rows, hidden),
        "out": (hidden, q_rows),
        "mlp_norm": (hidden,),
        "gate_up": (2 * config.intermediate_size, hidden),
        "down": (hidden, config.intermediate_size),
    }
    if config.qkv_bias:
        layer["qkv_bias"] = (qkv_rows,)
    if config.out_bias:
        layer["out_bias"] = (hidden,)
    if config.mlp_bias:
        layer |= {"gate_up_bias": (2 * config.intermediate_size,), "down_bias": (hidden,)}
    if config.qk_norm:
        layer |= {"q_norm": (head_dim,), "k_norm": (head_dim,)}
    if config.sandwich_norms:
        layer |= {"attention_out_norm": (hidden,), "mlp_out_norm": (hidden,)}
    shapes: dict[str, tuple[int, ...]] = {}
    if config.has_embedding:
        shapes["embedding"] = (config.vocab_rows, hidden)
    if config.is_last:
        shapes["norm"] = (hidden,)
        if not config.tied_embeddings:
            shapes["head"] = (config.vocab_rows, hidden)
    return shapes | {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}


@dataclass(frozen=True)
class _Layer:
    """Parameters of a layer, named as in `parameter_shapes`."""

    input_norm: torch.Tensor
    qkv: Linear | Fp8Linear
    out: Linear | Fp8Linear
    mlp_norm: torch.Tensor
    gate_up: Linear | Fp8Linear
    down: Linear | Fp8Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


def _take_layer(parameters: dict[str, Any], index: int, dtype: torch.dtype) -> _Layer:
    prefix = f"layers.{index}."
    parts = {name.removeprefix(prefix): parameters.pop(name) for name in list(parameters) if name.startswith(prefix)}
    for name in ("qkv", "out", "gate_up", "down"):
        weight, bias = parts[name], parts.pop(f"{name}_bias", None)
        parts[name] = Fp8Linear(weight, bias, dtype) if isinstance(weight, Fp8Weight) else Linear(weight, bias)
    return _Layer(**parts)


def _parts(linear: Linear | Fp8Linear) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Weight, bias and scales, as `kernels.linear.gemv` takes them."""
    return linear.weight, linear.bias, linear.scales


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
        `Fp8Weight`s. The parameters are removed from the dictionary, so that a weight and its rearranged copy are in
        memory together for one layer at a time. `dtype` is that of the activations."""
        self.config, self.dtype = config, dtype
        self.communicator = group or Communicator.single()
        self.device = parameters["layers.0.input_norm"].device
        self.embedding: torch.Tensor | None = parameters.pop("embedding", None)
        if config.is_last:
            self.norm = parameters.pop("norm")
            self.head = Linear(self.embedding if config.tied_embeddings else parameters.pop("head"))
        self.layers = [_take_layer(parameters, index, dtype) for index in range(config.num_layers)]
        self.activate = silu_and_mul if config.activation == "silu" else gelu_tanh_and_mul
        # The scale is rounded to the embedding's dtype: Gemma was trained so.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()
        self.is_on_gpu = self.device.type == "cuda"
        # For one token a GPU only reads weights, so GEMV kernels do. Float32 keeps to the products of large batches.
        self._has_narrow_path = (
            self.is_on_gpu and not config.sandwich_norms and dtype in (torch.bfloat16, torch.float16)
        )
        self._turns: dict[Rope, torch.Tensor] = {}

    def prepare(self, context_length: int) -> None:
        """Makes the tables of rotary angles for positions below `context_length`. On a GPU, call before `hidden`."""
        self._turns = {rope: rope.table(context_length, self.device) for rope in set(self.config.ropes)}

    @torch.inference_mode()
    def choose_products(
        self, step_sizes: Sequence[int], most_tokens: int, folder: Path | None = None
    ) -> list[TuneResult]:
        """Runs `kernels.linear.gemm_autotune.autotune` for the sizes, in tokens, that steps will have; `folder` keeps
        its choices. On a GPU, call before CUDA graphs are captured."""
        one_adds = self.communicator.size == 1 and not self.config.sandwich_norms
        last = Epilogue.ADDED if one_adds else Epilogue.PLAIN
        uses = [(self.head, Epilogue.FLOAT32)] if self.config.is_last else []
        for layer in self.layers:
            its = ((layer.qkv, Epilogue.PLAIN), (layer.out, last), (layer.gate_up, Epilogue.PLAIN), (layer.down, last))
            uses += [(linear, use) for linear, use in its if isinstance(linear, Linear)]
        return autotune(uses, step_sizes, most_tokens, folder=folder)

    @torch.inference_mode()
    def warm(self, most_rows: int) -> None:
        """Runs the part of a step after the last attention for up to `most_rows` rows, as steps without CUDA graphs do.

        The driver loads a kernel at its first launch, and may then wait for all work that the device has queued. With
        pipeline parallelism, that includes receives of what other stages have yet to send.
        """
        config = self.config
        for rows in range(_ROWS_APART, most_rows + 1, _ROWS_APART) if config.is_last else ():
            x = torch.ones(rows, config.hidden_size, dtype=self.dtype, device=self.device)
            added = self._after_attention(self.layers[-1], x.new_ones(rows, config.num_heads * config.head_dim), x)
            self.logits(x if added is None else x.add_(self._summed(added)))

    def hidden(
        self,
        given: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs all layers for the chunks that `attention` has planned, in their order.

        - `given`: token ids, int64 `[n]`. After another stage: its output, `[n, hidden_size]`, which is overwritten.
        - `positions`: int64 `[n]`.
        - `wanted`: places of the tokens whose output is returned, int64 `[m]`, in any order. None: all tokens.

        Returns the last layer's output before the final norm, `[m, hidden_size]`.
        """
        x = self._embed(given) if self.config.is_first else given
        if self._has_narrow_path and len(x) == 1:
            x = self._hidden_of_one(x, positions, attention)
            return x if wanted is None else x[wanted]
        angles = {} if self.is_on_gpu else {rope: rope.angles(positions, x.dtype) for rope in set(self.config.ropes)}
        attended: torch.Tensor | None = None
        # The last layer is not run in halves: after its attention few tokens are left.
        begun = len(self.layers) - 1 if self._goes_in_halves(x) else 0
        if begun:
            self._in_halves(begun, x, positions, angles, attention)
        for index, layer in enumerate(self.layers[begun:], begun):
            qkv = self._to_attention(index, x, attended)
            attended = self._attend(index, layer, qkv, positions, angles, attention)
        assert attended is not None, "there is a layer"
        return self.finish(x, attended, wanted)

    def piece(
        self,
        index: int,
        given: torch.Tensor,
        x: torch.Tensor,
        attended: torch.Tensor,
        positions: torch.Tensor,
        places: KVSlots,
        queries: torch.Tensor,
    ) -> None:
        """The part of `hidden` between two calls of attention, on a GPU: from layer `index - 1`'s to layer `index`'s.

        - `given`: as in `hidden`. Read by the first piece only.
        - `x`: `[n, hidden_size]`, the hidden states from one piece to the next. The first piece overwrites them.
        - `attended`: output of the attention of layer `index - 1`. Not read by the first piece.
        - `places`: where the keys and values of layer `index` are written.
        - `queries`: `[n, num_heads, head_dim]`, receives the queries of layer `index`.
        """
        if index == 0:
            x.copy_(self._embed(given))
        qkv = self._to_attention(index, x, attended if index else None)
        self._stored(index, self.layers[index], qkv, positions, places, queries)

    def finish(self, x: torch.Tensor, attended: torch.Tensor, wanted: torch.Tensor | None) -> torch.Tensor:
        """The rest of `hidden`, after the last layer's attention."""
        if wanted is not None:
            # The other tokens are needed only for their keys and values, which are in the pages now.
            x, attended = x[wanted], attended[wanted]
        added = self._after_attention(self.layers[-1], attended, x)
        return x if added is None else x.add_(self._summed(added))

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits of the next token for rows of `hidden`'s output: float32 `[n, vocab_size]`, in `out` if given."""
        if self._has_narrow_path and len(hidden) == 1:
            scores = self._logits_of_one(hidden, out)
        else:
            scores = self.head.in_float32(self._normed(hidden, self.norm), out if self.communicator.size == 1 else None)
        if self.communicator.size > 1:
            scores = self.communicator.all_gather(scores)[:, : self.config.vocab_size]
            scores = scores.contiguous() if out is None else out.copy_(scores)
        if (cap := self.config.logit_softcap) is not None:
            scores.div_(cap).tanh_().mul_(cap)
        return scores

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeds tokens. Each rank looks up the tokens whose rows it has and takes zeros for the others; the parts are
        summed."""
        assert self.embedding is not None
        if self.communicator.size == 1:
            x = F.embedding(token_ids, self.embedding)
        else:
            rows = token_ids - self.communicator.rank * self.config.vocab_rows
            absent = (rows < 0) | (rows >= self.config.vocab_rows)
            own = F.embedding(rows.masked_fill(absent, 0), self.embedding).masked_fill_(absent[:, None], 0)
            place = self._place(own, _EMBEDDING_TURN)
            x = self.communicator.all_reduce(own if place is None else place.copy_(own))
        return x if self.embedding_scale == 1.0 else x * self.embedding_scale

    def _place(self, x: torch.Tensor, turn: int) -> torch.Tensor | None:
        """Buffer for this rank's part of a sum of the same shape as x (`Communicator.reduce_buffer`)."""
        return self.communicator.reduce_buffer(len(x), self.config.hidden_size, x.dtype, turn)

    def _to_attention(self, index: int, x: torch.Tensor, attended: torch.Tensor | None) -> torch.Tensor:
        """Queries, keys and values of a layer before rotation. x becomes the layer's input. `attended` is the
        attention's output of the layer before, or None if x contains that layer's output already."""
        # `added`: this rank's part of a sublayer's output, which x does not contain yet. None if the product has added
        # it. The next norm adds the sum of all ranks' parts when it reads x.
        added = None if attended is None else self._after_attention(self.layers[index - 1], attended, x)
        layer = self.layers[index]
        return layer.qkv(self._add_and_norm(added, x, layer.input_norm))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionBackend,
    ) -> torch.Tensor:
        """Concatenated outputs of the heads, `[n, num_heads * head_dim]`."""
        if self.is_on_gpu:
            out = attention.attend(index, self._stored(index, layer, qkv, positions, attention))
        else:
            out = attention.run(index, *self._turned(layer, qkv, angles[self.config.ropes[index]]))
        return out.flatten(1)

    def _after_attention(self, layer: _Layer, attended: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """The rest of a layer after its attention. Returns the part still to be added to x, as `_sublayer_out`."""
        added = self._sublayer_out(layer.out, attended, x, layer.attention_out_norm, _ATTENTION_TURN)
        normed = self._add_and_norm(added, x, layer.mlp_norm)
        gated = self.activate(layer.gate_up(normed))
        return self._sublayer_out(layer.down, gated, x, layer.mlp_out_norm, _MLP_TURN)

    def _sublayer_out(
        self, linear: Linear | Fp8Linear, y: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None, turn: int
    ) -> torch.Tensor | None:
        """Output of a sublayer that ends with `linear(y)` and, if it has one, `norm`. Returns this rank's part, the sum
        of which over all ranks is still to be added to x; with `norm`, that sum. None if the product has added it to x
        already, which a single rank's can."""
        if isinstance(linear, Linear) and linear.adds and norm is None and self.communicator.size == 1:
            linear.add_to(x, y)
            return None
        out = linear(y, self._place(x, turn))
        return out if norm is None else self._normed(self.communicator.all_reduce(out), norm)

    def _turned(
        self, layer: _Layer, qkv: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values. Queries and keys are rotated, and normalised before if the model does that."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qk, v = qkv.unflatten(-1, (-1, self.config.head_dim)).split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)), dim=1)
        q, k = rotate(qk, *angles).split((heads, kv_heads), dim=1)
        return q, k, v

    def _stored(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        places: KVSlots,
        queries: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`_turned` on a GPU. Writes keys and values to their pages. Returns the queries, in `queries` if given."""
        from kernels.ops.fused import rotate_and_store

        return rotate_and_store(
            qkv,
            self.config.num_heads,
            self._turns[self.config.ropes[index]],
            positions,
            places.slots,
            places.kv[index],
            layer.q_norm,
            layer.k_norm,
            self.config.norm_eps,
            queries,
        )

    def _goes_in_halves(self, x: torch.Tensor) -> bool:
        return self.communicator.size > 1 and len(x) >= HALVES_FROM_TOKENS and not self.config.sandwich_norms

    def _in_halves(
        self,
        num_layers: int,
        x: torch.Tensor,
        positions: torch.Tensor,
        angles: dict[Rope, tuple[torch.Tensor, torch.Tensor]],
        attention: AttentionBackend,
    ) -> None:
        """Runs the first `num_layers` layers, in place in x.

        With many tokens an all-reduce takes as long as a matrix product. So the tokens are cut into halves, and one
        half is summed while the other is computed. Only attention needs both halves.
        """
        halves = (slice(0, len(x) // 2), slice(len(x) // 2, len(x)))
        eps, size = self.config.norm_eps, (self.config.num_heads + 2 * self.config.num_kv_heads) * self.config.head_dim
        sums: list[Callable[[], torch.Tensor]] = []
        for index, layer in enumerate(self.layers[:num_layers]):
            norm = layer.input_norm
            qkv = x.new_empty(len(x), size)
            for i, half in enumerate(halves):
                normed = add_rms_norm(sums[i](), x[half], norm, eps) if sums else self._normed(x[half], norm)
                layer.qkv(normed, qkv[half])
            attended = self._attend(index, layer, qkv, positions, angles, attention)
            sums = [self.communicator.all_reduce_async(layer.out(attended[half])) for half in halves]
            for i, half in enumerate(halves):
                normed = add_rms_norm(sums[i](), x[half], layer.mlp_norm, eps)
                sums[i] = self.communicator.all_reduce_async(layer.down(self.activate(layer.gate_up(normed))))
        for i, half in enumerate(halves):
            x[half] += sums[i]()

    def _hidden_of_one(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Runs all layers for one token: five kernels a layer, besides attention's."""
        from kernels.linear.gemv import gated_gemv, gemv

        eps, gelu = self.config.norm_eps, self.config.activation != "silu"
        for index, layer in enumerate(self.layers):
            qkv = gemv(x, *_parts(layer.qkv), norm=layer.input_norm, eps=eps)
            attended = attention.attend(index, self._stored(index, layer, qkv, positions, attention)).flatten(1)
            x = self._added(x, attended, layer.out, _ATTENTION_TURN)
            gated = gated_gemv(x, *_parts(layer.gate_up), norm=layer.mlp_norm, eps=eps, gelu=gelu)
            x = self._added(x, gated, layer.down, _MLP_TURN)
        return x

    def _added(self, x: torch.Tensor, y: torch.Tensor, linear: Linear | Fp8Linear, turn: int) -> torch.Tensor:
        """`x + linear(y)` for one token. With several ranks, the first one's part of the sum includes x."""
        from kernels.linear.gemv import gemv

        residual = x if self.communicator.rank == 0 else None
        part = gemv(y, *_parts(linear), residual=residual, out=self._place(x, turn))
        return self.communicator.all_reduce(part)

    def _logits_of_one(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        from kernels.linear.gemv import gemv

        weight = self.head.weight
        if out is None or self.communicator.size > 1:
            out = hidden.new_empty(1, len(weight), dtype=torch.float32)
        return gemv(hidden, weight, norm=self.norm, eps=self.config.norm_eps, out=out)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.norm_eps)

    def _add_and_norm(self, added: torch.Tensor | None, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Adds the sum of all ranks' `added` to x in place, and returns x normalised."""
        if added is None:
            return self._normed(x, weight)
        if self.config.sandwich_norms:
            return add_rms_norm(added, x, weight, self.config.norm_eps)
        return self.communicator.add_rms_norm(added, x, weight, self.config.norm_eps)

    def _summed(self, added: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `added`. With sandwich norms `added` is that sum already."""
        return added if self.config.sandwich_norms else self.communicator.all_reduce(added)
