"""Multi-head latent attention as a layer has it (https://arxiv.org/abs/2405.04434, section 2.1)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from kernels.attention.interface import KVSlots, LatentHeads
from kernels.linear.any_linear import AnyLinear
from kernels.ops.norm import rms_norm
from kernels.ops.rotary import Rope, rotate
from worker.models.config import DecoderConfig
from worker.models.forward_context import ForwardContext
from worker.models.residual_stream import ResidualStream

NORM_EPS = 1e-6
"""Of the norms of latents, whatever the other norms' is: as `transformers` has it."""


@dataclass
class LatentAttention:
    """Latent attention of layer `index`, over the KV cache. Parameters are named as in `parameter_shapes`.

    Queries are products of the hidden states, or of their own latents if there is `q_b`. `rope_table` is the
    `Rope.table` of this layer, on a GPU. `kv_b`: `[num_heads, latent.up, kv_lora_rank]`, which the backend reads.
    """

    config: DecoderConfig
    heads: LatentHeads
    index: int
    input_norm: torch.Tensor | None
    qkv: AnyLinear
    out: AnyLinear
    kv_a_norm: torch.Tensor
    kv_b: torch.Tensor
    q_a_norm: torch.Tensor | None = None
    q_b: AnyLinear | None = None
    rope_table: torch.Tensor | None = None

    @classmethod
    def from_parameters(
        cls, config: DecoderConfig, heads: LatentHeads, index: int, parameters: dict[str, Any]
    ) -> "LatentAttention":
        """The attention of layer `index`, from its parameters by the names of `parameter_shapes`."""
        return cls(
            config,
            heads,
            index,
            parameters.get("input_norm"),
            parameters["qkv"],
            parameters["out"],
            parameters["kv_a_norm"],
            parameters["kv_b"].unflatten(0, (config.num_heads, heads.up)),
            parameters.get("q_a_norm"),
            parameters.get("q_b"),
        )

    @cached_property
    def kv_layer(self) -> int:
        """Number of the layer among those that have latents."""
        return self.config.attention_layers.index(self.index)

    @property
    def projected_size(self) -> int:
        """Columns of the result of `project`."""
        return self.config.qkv_size

    @property
    def attended_size(self) -> int:
        """Columns of the result of `forward`."""
        return self.config.attended_size

    @property
    def rope(self) -> Rope:
        return self.config.ropes[self.index]

    def project(self, x: ResidualStream, out: torch.Tensor | None = None) -> torch.Tensor:
        """Queries or their latents, then latents and keys before rotation, `[n, projected_size]`, in `out` if given."""
        return x.project(self.input_norm, self.qkv, out)

    def forward(self, qkv: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Concatenated outputs of the heads, `[n, attended_size]`. Latents and rotated keys are in the KV
        cache afterwards."""
        if context.angles is None:
            queries = self.rotate_and_store(qkv, context.positions, context.attention)
            out = context.attention.attend(self.kv_layer, queries)
        else:
            queries, rows = self._rotate(qkv, *context.angles[self.rope])
            out = context.attention.run(self.kv_layer, self._tempered(queries, context.positions), rows, rows)
        return out.flatten(1)

    def add_output(self, x: ResidualStream, attended: torch.Tensor) -> None:
        """Adds the output product of `forward`'s result."""
        x.add(self.out, attended)

    def rotate_and_store(
        self, qkv: torch.Tensor, positions: torch.Tensor, kv_slots: KVSlots, queries: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The part of `forward` before attention on a GPU. Writes latents and rotated keys to `kv_slots`. Returns the
        rotated queries, `[n, num_heads, heads.query]`, in `queries` if given."""
        from kernels.ops.fused_latent import rotate_and_store

        assert self.rope_table is not None, "Decoder.build_rope_tables makes it"
        q, rows = self._queries_and_rows(qkv)
        rotated = rotate_and_store(
            q,
            rows,
            self.config.num_heads,
            self.rope_table,
            positions,
            *kv_slots.place(self.kv_layer),
            self.kv_a_norm,
            NORM_EPS,
            queries,
        )
        return self._tempered(rotated, positions)

    def _tempered(self, queries: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The queries `[n, num_heads, heads.query]` times their temperature, in place, if the model has one."""
        temperature = self.config.query_temperature
        return queries if temperature is None else temperature.apply(queries, positions)

    def _queries_and_rows(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries before rotation, `[n, num_heads * heads.query]`, and the latents before their norm with the keys
        before rotation, `[n, heads.row]`."""
        q, rows = qkv.split((qkv.shape[1] - self.heads.row, self.heads.row), dim=1)
        if self.q_b is not None and self.q_a_norm is not None:
            q = self.q_b(rms_norm(q, self.q_a_norm, NORM_EPS))
        return q, rows

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated queries, and the rows of the KV cache, `[n, 1, heads.row]`."""
        q, rows = self._queries_and_rows(qkv)
        plain, turning = q.unflatten(1, (-1, self.heads.query)).split(
            (self.heads.qk_nope_head_dim, self.heads.qk_rope_head_dim), dim=2
        )
        latents, key = rows[:, None].split((self.heads.kv_lora_rank, self.heads.qk_rope_head_dim), dim=2)
        queries = torch.cat((plain, rotate(turning, cos, sin)), dim=2)
        return queries, torch.cat((rms_norm(latents, self.kv_a_norm, NORM_EPS), rotate(key, cos, sin)), dim=2)
