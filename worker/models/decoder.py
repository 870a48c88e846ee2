"""The decoder: embedding, layers of attention and gated MLP, norm, output head. One for all architectures."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kernels.activation import gelu_tanh_and_mul, silu_and_mul
from kernels.attention import AttentionBackend
from kernels.linear import Linear
from kernels.norm import rms_norm
from kernels.rotary import rotate
from worker.models.config import DecoderConfig
from worker.parallel import Group


def parameter_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """The decoder's parameters by name. Matrices are `[out, in]`; `qkv` and `gate_up` are stacked in that order."""
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
    shapes = {"embedding": (config.vocab_rows, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_rows, hidden)
    return shapes | {f"layers.{i}.{name}": shape for i in range(config.num_layers) for name, shape in layer.items()}


@dataclass(frozen=True)
class _Layer:
    """One layer, its parts named as in `parameter_shapes`."""

    input_norm: torch.Tensor
    qkv: Linear
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    attention_out_norm: torch.Tensor | None = None
    mlp_out_norm: torch.Tensor | None = None


def _take_layer(parameters: dict[str, torch.Tensor], index: int) -> _Layer:
    prefix = f"layers.{index}."
    parts: dict[str, Any] = {
        name.removeprefix(prefix): parameters.pop(name) for name in list(parameters) if name.startswith(prefix)
    }
    for name in ("qkv", "out", "gate_up", "down"):
        parts[name] = Linear(parts[name], parts.pop(f"{name}_bias", None))
    return _Layer(**parts)


class Decoder:
    """`parameters` are those of `parameter_shapes(config)`, all on one device; they are taken out of the dictionary, so
    that a weight and its rearranged copy stand in memory together for one layer at a time. With several ranks `config`
    and `parameters` are this rank's part, and all ranks of `group` call the same methods with the same tokens."""

    def __init__(self, config: DecoderConfig, parameters: dict[str, torch.Tensor], group: Group | None = None) -> None:
        self.config = config
        self.group = group or Group.single()
        self.embedding = parameters.pop("embedding")
        self.norm = parameters.pop("norm")
        self.head = Linear(self.embedding if config.tied_embeddings else parameters.pop("head"))
        self.layers = [_take_layer(parameters, index) for index in range(config.num_layers)]
        self.activate = silu_and_mul if config.activation == "silu" else gelu_tanh_and_mul
        # The scale is rounded as the embedding is: Gemma was trained with it so.
        self.embedding_scale = torch.tensor(config.embedding_scale, dtype=self.embedding.dtype).item()

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """Run all layers. token_ids and positions: int64 `[n]`, of the chunks that `attention` has planned, in order.

        Returns the last layer's output `[n, hidden_size]`, before the final norm.
        """
        x = self._embed(token_ids)
        if self.embedding_scale != 1.0:
            x = x * self.embedding_scale
        angles = {rope: rope.angles(positions, x.dtype) for rope in dict.fromkeys(self.config.ropes)}
        for index, layer in enumerate(self.layers):
            x += self._attend(index, layer, x, angles[self.config.ropes[index]], attention)
            x += self._mlp(layer, x)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores of the next token for rows of `hidden`'s output: float32 `[n, vocab_size]`."""
        scores = self.head(self._normed(hidden, self.norm))
        if self.group.size > 1:
            scores = self.group.all_gather(scores)[:, : self.config.vocab_size].contiguous()
        if (cap := self.config.logit_softcap) is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores.float()

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each rank looks up the tokens whose rows it has; the others' are zero there."""
        if self.group.size == 1:
            return F.embedding(token_ids, self.embedding)
        rows = token_ids - self.group.rank * self.config.vocab_rows
        absent = (rows < 0) | (rows >= self.config.vocab_rows)
        x = F.embedding(rows.masked_fill(absent, 0), self.embedding)
        return self.group.all_reduce(x.masked_fill_(absent[:, None], 0))

    def _attend(
        self,
        index: int,
        layer: _Layer,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        attention: AttentionBackend,
    ) -> torch.Tensor:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._normed(x, layer.input_norm)).unflatten(-1, (-1, self.config.head_dim))
        qk, v = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split((heads, kv_heads), dim=1)
            qk = torch.cat((self._normed(q, layer.q_norm), self._normed(k, layer.k_norm)), dim=1)
        q, k = rotate(qk, *angles).split((heads, kv_heads), dim=1)
        out = attention.run(index, q, k, v)
        out = self.group.all_reduce(layer.out(out.flatten(1)))
        return out if layer.attention_out_norm is None else self._normed(out, layer.attention_out_norm)

    def _mlp(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._normed(x, layer.mlp_norm))
        out = self.group.all_reduce(layer.down(self.activate(gate_up)))
        return out if layer.mlp_out_norm is None else self._normed(out, layer.mlp_out_norm)

    def _normed(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, self.config.norm_eps)
