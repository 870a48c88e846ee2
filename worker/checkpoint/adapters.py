"""Reads LoRA adapters from folders as PEFT writes them: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from kernels.lora.lora_weights import ColumnPart
from worker.checkpoint.destination import Destination
from worker.checkpoint.destinations import destinations
from worker.checkpoint.tensor_names import full_name
from worker.models.adapted_layers import ADAPTED
from worker.models.family import Family
from worker.models.parameters import parameter_shapes
from worker.models.sharding import Shard

LowRank = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""An adapter on one rank: A `[parts, r, in]` and B `[out, r]` by parameter. B includes the scale."""

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.default)?\.weight")
# Settings of PEFT that change what an adapter computes, with the values that mean that they are off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
}


class AdapterLayout:
    """Where the matrices of an adapter go on one rank. A and B are cut as the base layer's weight is: B with its rows,
    A with its columns.

    `parts`: the parts of each parameter that adapters may change, for `LoraWeights`.
    """

    def __init__(self, shard: Shard) -> None:
        self._shapes, self._family = parameter_shapes(shard.config), shard.whole.family
        own = _adaptable(shard)
        # Layers of other stages too, so that an adapter is checked whole. Their parameters are not here.
        self._model = own if shard.stages == 1 else _adaptable(Shard(shard.whole))
        self._own: dict[str, tuple[Destination, int]] = {}
        self.parts: dict[str, list[ColumnPart]] = {}
        for module, to in own.items():
            columns = self.parts.setdefault(to.parameter, [])
            part = 1 + max((known.part for known in columns), default=-1)
            self._own[module] = to, part
            outputs = [range(piece.first, piece.first + len(piece.kept)) for piece in to.pieces]
            if to.dim == 1:
                outputs = [range(to.shape[0])]
            columns += [ColumnPart(part, each) for each in outputs if len(each)]

    def read(self, folder: Path, max_rank: int, dtype: torch.dtype, pin: bool = False) -> LowRank:
        """Reads this rank's part of an adapter, in `dtype`; `pin`: into pinned memory. Raises ValueError, for a person
        who wrote the path, if the folder has none, or one that this model cannot have."""
        scale, rank = _settings(folder, max_rank)
        found = _tensors(folder, self._family)
        self._check(folder, found, rank)
        matrices: LowRank = {}
        for module, (to, part) in self._own.items():
            if module in found:
                self._place(matrices, to, part, found[module], scale, dtype)
        if pin:
            return {name: (a.pin_memory(), b.pin_memory()) for name, (a, b) in matrices.items()}
        return matrices

    def _check(self, folder: Path, found: Mapping[str, Mapping[str, torch.Tensor]], rank: int) -> None:
        for module, both in found.items():
            to = self._model.get(module)
            if to is None:
                known = ", ".join(sorted({name.rpartition(".")[2] for name in self._model}))
                raise ValueError(
                    f"adapter {folder} changes {module}, which is not supported for this model: its layers that "
                    f"adapters may change are {known or 'none'}"
                )
            if both.keys() != {"A", "B"}:
                raise ValueError(f"adapter {folder} lacks lora_A or lora_B of {module}")
            shapes = {"A": (rank, to.shape[1]), "B": (to.shape[0], rank)}
            for name, shape in shapes.items():
                if tuple(both[name].shape) != shape:
                    raise ValueError(
                        f"adapter {folder}: lora_{name} of {module} has shape {tuple(both[name].shape)}, but this "
                        f"model and rank {rank} need {shape}: it was made for another model"
                    )

    def _place(
        self,
        matrices: LowRank,
        to: Destination,
        part: int,
        both: Mapping[str, torch.Tensor],
        scale: float,
        dtype: torch.dtype,
    ) -> None:
        """Writes the matrices of one of the checkpoint's layers to their places in those of a fused layer."""
        out_size, in_size = self._shapes[to.parameter]
        rank = len(both["A"])
        if to.parameter not in matrices:
            count = 1 + max((known.part for known in self.parts[to.parameter]), default=0)
            matrices[to.parameter] = (
                torch.zeros(count, rank, in_size, dtype=dtype),
                torch.zeros(out_size, rank, dtype=dtype),
            )
        a, b = matrices[to.parameter]
        scaled = both["B"].float() * scale
        if to.dim == 1:
            b.copy_(scaled * to.pieces[0].factor)
            for piece in to.pieces:
                kept = both["A"][:, piece.kept.start : piece.kept.stop]
                a[part, :, piece.first : piece.first + len(piece.kept)] = kept.to(dtype)
            return
        a[part] = both["A"].to(dtype)
        for piece in to.pieces:
            rows = scaled[piece.kept.start : piece.kept.stop]
            if piece.row_order is not None:
                rows = rows[piece.row_order]
            b[piece.first : piece.first + len(piece.kept)] = (rows * piece.factor).to(dtype)


def _adaptable(shard: Shard) -> dict[str, Destination]:
    """The layers of a checkpoint that adapters may change, by their names, with their destinations on a rank."""
    config = shard.config
    has_both = config.recurrent is not None and config.recurrent.alongside_attention
    modules = {}
    for tensor, to in destinations(shard, stacked=True).items():
        name = to.parameter.rpartition(".")[2]
        if name not in ADAPTED or not tensor.endswith(".weight"):
            continue
        index = int(to.parameter.split(".")[1])
        if name in ("qkv", "out"):
            # Of two matrices in one `out`, adapters may change attention's: its outputs have one B.
            is_adaptable = config.latent is None and not (name == "out" and has_both and ".self_attn." not in tensor)
        else:
            is_adaptable = config.experts_of(index) is None
        if is_adaptable:
            modules[tensor.removesuffix(".weight")] = to
    return modules


def _settings(folder: Path, max_rank: int) -> tuple[float, int]:
    """Scale and rank that an adapter's configuration says."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except OSError as error:
        raise ValueError(f"{folder} is not an adapter: {path.name} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not as PEFT writes it for LoRA: {error!r}") from None
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"adapter {folder} is of type {config['peft_type']}; only LORA is supported")
    for name, off in _UNSUPPORTED.items():
        if config.get(name) not in off:
            raise ValueError(f"adapter {folder} has {name} {config[name]!r}, which is not supported")
    if not 1 <= rank <= max_rank:
        raise ValueError(f"adapter {folder} has rank {rank}; max_lora_rank is {max_rank}")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), rank


def _tensors(folder: Path, family: Family) -> dict[str, dict[str, torch.Tensor]]:
    """The matrices A and B of an adapter by the names of the model's layers."""
    path = folder / "adapter_model.safetensors"
    found: dict[str, dict[str, torch.Tensor]] = {}
    try:
        path.open("rb").close()  # of a file that this user may not read, safetensors says that there is none
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no dictionary
                match = _KEY.fullmatch(key)
                if match is None:
                    raise ValueError(f"adapter {folder} has the tensor {key}, which is not supported")
                module = full_name(f"{match[1]}.weight", family).removesuffix(".weight")
                found.setdefault(module, {})[match[2]] = file.get_tensor(key)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from None
    if not found:
        raise ValueError(f"{path} has no tensors")
    return found
