"""Where the quantized matrices of a GGUF file stand, by Hugging Face's names, and its other tensors.

What the names stand for, and in which order a file has the rows of a matrix, is told by `transformers`' own reader.
"""

from pathlib import Path
from typing import Any

import msgspec

from worker.checkpoint.gguf_layout import INDEX, Index, Matrix


def write(path: Path, config: Any, folder: Path) -> None:
    """Writes `gguf.json` and, with the tensors that are not quantized, `model.safetensors` into `folder`. `config` is
    the model's Hugging Face configuration.

    Raises ValueError for an architecture whose GGUF files have weights other than the model's, as hybrids' do, and for
    quantized tensors in a format that is not in `KEPT_FORMATS`, or that are no matrices.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import (
        TENSOR_PROCESSORS,
        TensorProcessor,
        get_gguf_hf_weights_map,
    )

    reader = gguf.GGUFReader(str(path))
    architecture = str(reader.fields["general.architecture"].contents())
    unlike = f"{path.name} has a {architecture} model, whose matrices cannot be kept as they are: {_ADVICE}"
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    try:
        with torch.device("meta"):
            names = get_gguf_hf_weights_map(AutoModelForCausalLM.from_config(config), processor)
    except NotImplementedError:  # transformers reads it in another way
        raise ValueError(unlike) from None
    _check(path, reader.tensors)
    index = Index({}, [])
    others: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        kind = tensor.tensor_type.name
        if kind not in _PLAIN:
            columns, rows = (int(size) for size in tensor.shape)
            own_rows = np.arange(rows)
            ordered = processor.process(own_rows[:, None], tensor.name).weights
            if ordered.shape != (rows, 1):  # the model has the transposed matrix
                raise ValueError(unlike)
            order = ordered[:, 0]
            number = None if np.array_equal(order, own_rows) else _number(index.orders, order.tolist())
            index.matrices[names[tensor.name]] = Matrix(kind, (rows, columns), int(tensor.data_offset), number)
            continue
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        processed = torch.from_numpy(np.copy(processor.process(values, tensor.name).weights))
        others[names[tensor.name]] = processed.to(getattr(torch, _PLAIN[kind])).contiguous()
    save_file(others, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / INDEX).write_bytes(msgspec.json.encode(index))


_ADVICE = "set dequantize to convert the file to float32"
_PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def _check(path: Path, tensors: list[Any]) -> None:
    from worker.checkpoint.gguf_file import KEPT_FORMATS  # with torch

    quantized = [tensor for tensor in tensors if tensor.tensor_type.name not in _PLAIN]
    unknown = sorted({tensor.tensor_type.name for tensor in quantized} - set(KEPT_FORMATS))
    if unknown:
        kept = ", ".join(KEPT_FORMATS)
        raise ValueError(f"{path.name} has matrices in {', '.join(unknown)}, which are not among {kept}: {_ADVICE}")
    if experts := [tensor.name for tensor in quantized if len(tensor.shape) != 2]:
        what = f"{path.name} has quantized experts, as {experts[0]}"
        raise ValueError(f"{what}, which cannot be kept as they are: {_ADVICE}")


def _number(orders: list[list[int]], order: list[int]) -> int:
    """The number of an order, which is added if it is new."""
    if order not in orders:
        orders.append(order)
    return orders.index(order)
