"""Random models of gpt-oss in MXFP4, as they are published."""

import json
from pathlib import Path

import torch

from worker.checkpoint.e2m1 import NUMBERS

GROUP = 32  # numbers that share a scale
_E2M1 = NUMBERS[:8]  # those that are not negative


def publish(folder: Path) -> None:
    """Rounds the experts' matrices of a model to MXFP4, and writes them as blocks and scales in place of numbers.

    folder: a Hugging Face folder with one file of weights.
    """
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = rounded(tensor.transpose(1, 2))
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    # `dequantize` is for `transformers`, which then computes with the same numbers in any dtype.
    said["quantization_config"] = {"quant_method": "mxfp4", "dequantize": True}
    (folder / "config.json").write_text(json.dumps(said))


def rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest numbers in MXFP4 to `[experts, rows, columns]`: uint8 blocks `[experts, rows, groups, 16]`, two
    numbers a byte, the first in the low bits, and exponents `[experts, rows, groups]`, with a bias of 127."""
    groups = matrix.float().unflatten(2, (-1, GROUP))
    largest = groups.abs().amax(3).clamp(min=2.0**-100)
    exponents = torch.ceil(torch.log2(largest / _E2M1[-1]))
    scaled = torch.ldexp(groups, -exponents[..., None])
    codes = (scaled.abs()[..., None] - _E2M1).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = codes.to(torch.uint8).unflatten(3, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8)
