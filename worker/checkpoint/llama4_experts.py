"""The experts in Llama 4's checkpoints, given as those of other families: matrices `[experts, out, in]`, gates first.

The files have them as `[experts, in, out]`, gates first too.
"""

from collections.abc import Iterable, Iterator
from functools import partial

import torch

from worker.checkpoint.tensors import ModelTensor, Read, StoredTensor

_MATRICES = (".feed_forward.experts.gate_up_proj", ".feed_forward.experts.down_proj")


def arranged(tensors: Iterable[StoredTensor]) -> Iterator[ModelTensor]:
    """The tensors of a checkpoint, with experts as in other families' checkpoints."""
    for name, shape, _, read in tensors:
        if name.endswith(_MATRICES):
            experts, inputs, outputs = shape
            yield ModelTensor(name, (experts, outputs, inputs), partial(_turned, read))
        else:
            yield ModelTensor(name, shape, read)


def _turned(read: Read, dim: int, part: range) -> torch.Tensor:
    return read((0, 2, 1)[dim], part).transpose(1, 2)
