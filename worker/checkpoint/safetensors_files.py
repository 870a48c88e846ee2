"""The tensors in the safetensors files of a folder."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from worker.checkpoint.tensors import StoredTensor, cut


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """All tensors of a folder. Their numbers are read later, part by part. Raises ValueError if a file is missing or
    cannot be read."""
    return [tensor for path in _files(folder) for tensor in _tensors(path)]


def _tensors(path: Path) -> list[StoredTensor]:
    try:
        path.open("rb").close()  # of a file that this user may not read, safetensors says that there is none
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in list(file.keys())}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    return [_stored(name, tensor, file) for name, tensor in slices.items()]


def _stored(name: str, tensor: Any, file: Any) -> StoredTensor:
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if not shape:
        return StoredTensor(name, shape, dtype, partial(_scalar, file, name))
    if name.endswith("moe_statics.e_score_correction_bias"):  # of one group of experts
        shape, tensor = shape[1:], tensor[0]
    return StoredTensor(name, shape, dtype, partial(cut, tensor))


def _scalar(file: Any, name: str, dim: int, part: range) -> torch.Tensor:
    number: torch.Tensor = file.get_tensor(name)
    return number


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    paths = [folder / name for name in names]
    if absent := [path.name for path in paths if not path.exists()]:
        raise ValueError(f"{folder} lacks the weights {', '.join(absent)}")
    return paths
