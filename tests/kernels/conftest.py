"""Triton's kernels run on a GPU where there is one, and else in Triton's interpreter, which must be asked for before
anything imports them."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
