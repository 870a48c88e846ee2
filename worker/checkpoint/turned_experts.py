"""Experts that a checkpoint has as `[experts, in, out]`, given as those of other families: `[experts, out, in]`.

Gates come before ups either way. Llama 4's are so, and Qwen3-VL's as they were published; `transformers` 5 writes those
of Qwen3-VL as other families'.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from worker.checkpoint.tensors import ModelTensor, Read, StoredTensor

FAMILIES = ("llama4_text", "qwen3_vl_moe_text")
_FIRST, _LAST = (".experts.gate_up_proj", ".experts.down_proj")


def arranged(tensors: Iterable[StoredTensor], model_type: str, hidden_size: int) -> Iterator[ModelTensor]:
    """The tensors of a checkpoint, with experts as in other families' checkpoints. Of Qwen3-VL, matrices whose sizes
    are those of other families' stay."""
    for name, shape, _, read in tensors:
        if not name.endswith((_FIRST, _LAST)):
            yield ModelTensor(name, shape, read)
            continue
        experts, inputs, outputs = shape
        if model_type != "llama4_text" and hidden_size == (outputs if name.endswith(_FIRST) else inputs):
            yield ModelTensor(name, shape, read)
        else:
            yield ModelTensor(name, (experts, outputs, inputs), partial(_turned, read))


def _turned(read: Read, dim: int, part: range) -> torch.Tensor:
    return read((0, 2, 1)[dim], part).transpose(1, 2)
