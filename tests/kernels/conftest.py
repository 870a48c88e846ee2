"""Triton's kernels run on a GPU where there is one, and else in Triton's interpreter, which must be asked for before
anything imports them."""

import os
from importlib.util import find_spec

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if find_spec("triton") is not None:
        from tests.interpreter import hasten

        hasten()
