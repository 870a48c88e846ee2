"""Random adapters in PEFT's format, and the models that one gets by merging them into the base weights."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    base: Path,
    seed: int,
    rank: int = 4,
    targets: Iterable[str] = ALL,
    layers: Iterable[int] | None = None,
    **settings: object,
) -> Path:
    """Writes an adapter of the model in `base` that changes `targets` in `layers`, by default in all, enough to change
    its tokens. `settings` go into its configuration. Returns `folder`."""
    folder.mkdir(parents=True)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not name.endswith(".weight") or module.rpartition(".")[2] not in set(targets):
            continue
        if layers is not None and int(module.split(".")[2]) not in set(layers):
            continue
        key = f"base_model.model.{module}"
        tensors[f"{key}.lora_A.weight"] = 0.2 * torch.randn(rank, weight.shape[1], generator=random)
        tensors[f"{key}.lora_B.weight"] = 0.2 * torch.randn(weight.shape[0], rank, generator=random)
    assert tensors
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, "target_modules": sorted(targets), **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(folder: Path, base: Path, adapter: Path) -> Path:
    """Writes the model in `base` with each weight W of an adapter as W + scale * B @ A to `folder`, and returns it."""
    shutil.copytree(base, folder)
    config = json.loads((adapter / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"])
    weights, tensors = load_file(base / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for key, low in tensors.items():
        if ".lora_A." in key:
            name = f"{key.removeprefix('base_model.model.').removesuffix('.lora_A.weight')}.weight"
            weights[name] = weights[name] + scale * tensors[key.replace(".lora_A.", ".lora_B.")] @ low
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
