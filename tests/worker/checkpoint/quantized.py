"""Writers of quantized checkpoints. Each quantizes the matrices of a small model's layers, and says which weights these
are: the model's folder in the format, and the same weights multiplied out in float32."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.worker.conftest import make_tiny

Tensors = dict[str, torch.Tensor]
Quantizer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""The tensors of a matrix by the names within its module, and its weights in float32."""

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(base: Path, name: str, quantizer: Quantizer, said: Mapping[str, Any], **sizes: int) -> tuple[Path, Path]:
    """The folder in the format, and the one with its weights multiplied out. `said`: the `quantization_config`."""
    base.mkdir(exist_ok=True)
    plain = make_tiny(name, base / "plain", layers=2, **(SIZES | sizes))
    folder = base / "quantized"
    folder.mkdir()
    tensors, stored = load_file(plain / "model.safetensors"), {}
    for key, tensor in tensors.items():
        module = key.removesuffix(".weight")
        if tensor.ndim == 2 and ".layers." in key and "norm" not in key and not module.endswith(".gate"):
            own, tensors[key] = quantizer(tensor)
            stored |= {f"{module}.{part}": value.contiguous() for part, value in own.items()}
        else:
            stored[key] = tensor
    save_file({key: value.contiguous() for key, value in tensors.items()}, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": dict(said)}))
    return folder, plain


# ---------------------------------------------------------------- 8 bits

FP8 = {"quant_method": "fp8", "fmt": "e4m3"}


def compressed(kind: str, **weights: object) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}


def e4m3(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight in 8 bits, and what it is worth. scales: that of each element, or of each row."""
    values = (weight / scales).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values, values.float() * scales


def in_blocks(part: str, size: int = 128) -> Quantizer:
    def quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -columns % size, 0, -rows % size))
        most = padded.abs().view(len(padded) // size, size, -1, size).amax((1, 3)) / 448
        scales = most.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
        values, whole = e4m3(weight, scales)
        return {"weight": values, part: most}, whole

    return quantized


def by_row(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values, whole = e4m3(weight, scales.float())
    return {"weight": values, "weight_scale": scales}, whole


def by_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().amax() / 448
    values, whole = e4m3(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.3)}, whole


def int8_by_row(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, values.float() * scales


# ---------------------------------------------------------------- integers in words


def pack(values: torch.Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Integers without signs as int32, several along `dim` in a word, in an order from the low bits on."""
    count = 32 // bits
    missing = -values.shape[dim] % count
    if missing:
        values = torch.cat(
            (values, values.new_zeros([missing if i == dim else n for i, n in enumerate(values.shape)])), dim
        )
    parts = values.long().unflatten(dim, (-1, count)).unbind(dim + 1)
    words = torch.zeros_like(parts[0])
    for place, element in enumerate(order or range(count)):
        words |= parts[element] << bits * place
    return torch.where(words < 1 << 31, words, words - (1 << 32)).to(torch.int32)


def integers(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, symmetric: bool, kind: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers `[rows, columns]`, scales and zeros `[rows, groups]`, and the weights that they are. groups: that of
    each column."""
    most, largest = int(groups.max()) + 1, 2**bits - 1
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(most)], 1)
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(most)], 1)
    if symmetric:
        scales = (2 * torch.maximum(high, -low) / largest).to(kind)
        zeros = torch.full_like(scales, 2 ** (bits - 1), dtype=torch.int64)
    else:
        scales = ((high.clamp(min=0) - low.clamp(max=0)) / largest).to(kind)
        zeros = (-low.clamp(max=0) / scales.float()).round().clamp(0, largest).long()
    own = scales.float()[:, groups]
    values = ((weight / own).round() + zeros[:, groups]).clamp(0, largest).long()
    return values, scales, zeros, (values - zeros[:, groups]) * own


def neighbours(columns: int, group: int | None) -> torch.Tensor:
    return torch.arange(columns) // (group or columns)


def awq(group: int) -> Quantizer:
    def quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, scales, zeros, whole = integers(weight, 4, neighbours(weight.shape[1], group), False)
        own = {"qweight": pack(values.t(), 4, 1, AWQ_ORDER), "qzeros": pack(zeros.t(), 4, 1, AWQ_ORDER)}
        return own | {"scales": scales.t()}, whole

    return quantized


def gptq(bits: int, group: int | None, symmetric: bool, is_v2: bool = False, in_order: bool = True) -> Quantizer:
    def quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = neighbours(weight.shape[1], group)
        if not in_order:
            groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(1))]
        values, scales, zeros, whole = integers(weight, bits, groups, symmetric)
        words = pack(zeros.t(), bits, 1).long()
        if not is_v2:
            words -= sum(1 << shift for shift in range(0, 32, bits))
        words = (words + (1 << 31)) % (1 << 32) - (1 << 31)
        own = {"qweight": pack(values.t(), bits, 0), "qzeros": words.to(torch.int32), "scales": scales.t()}
        return own | {"g_idx": groups.int()}, whole

    return quantized


def packed(bits: int, group: int | None, symmetric: bool, in_order: bool = True) -> Quantizer:
    def quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = neighbours(weight.shape[1], group)
        if not in_order:
            groups = groups.flip(0)
        values, scales, zeros, whole = integers(weight, bits, groups, symmetric, torch.bfloat16)
        own = {
            "weight_packed": pack(values, bits, 1),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            own["weight_zero_point"] = pack(zeros, bits, 0)
        if not in_order:
            own["weight_g_idx"] = groups.int()
        return own, whole

    return quantized


# ---------------------------------------------------------------- numbers of 4 bits

E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))


def nvfp4(packed: str, factor: str) -> Quantizer:
    """`packed`, `factor`: names of the bytes and of what is the same for a matrix."""

    def quantized(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        groups = weight.unflatten(1, (-1, 16))
        said = weight.abs().max() / (6 * 448)
        if factor == "weight_global_scale":
            said = 1.0 / said
        whole = 1.0 / float(said) if factor == "weight_global_scale" else float(said)
        scales = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)
        worth = scales.float() * whole
        codes = ((groups / worth[..., None]).abs()[..., None] - E2M1).abs().argmin(-1)
        numbers = E2M1[codes] * groups.sign() * worth[..., None]
        codes = (codes + 8 * (groups < 0)).flatten(1).to(torch.uint8)
        tensors = {packed: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales, factor: said.reshape(())}
        return tensors | {"input_scale": torch.ones(())}, numbers.flatten(1)

    return quantized
