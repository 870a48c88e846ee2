"""Triton's interpreter, in which kernels run where there is no GPU, for about two thirds of its time."""

from functools import cache
from types import SimpleNamespace

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Makes the interpreter of this process do once what it does again in every function that a kernel calls, and for
    every array. What kernels compute stays the same."""
    if not isinstance(interpreter._patch_lang, _Language):
        interpreter._patch_lang = _Language()
        interpreter._get_np_dtype = _numpy_dtype


class _Language:
    """Changes `triton.language` into what the interpreter runs, and back when a kernel has ended. The interpreter looks
    for what there is to change in each function that a kernel calls."""

    def __init__(self) -> None:
        everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
        changes = interpreter._patch_lang(everything)._changes
        self._changes = [(place, name, getattr(place, name), original) for place, name, original in changes]
        self._is_changed = True
        self.restore()

    def __call__(self, function: object) -> "_Language":
        if not self._is_changed:
            self._is_changed = True
            for place, name, value, _ in self._changes:
                setattr(place, name, value)
        return self

    def restore(self) -> None:
        self._is_changed = False
        for place, name, _, original in reversed(self._changes):
            if original is interpreter._MISSING:
                delattr(place, name)
            else:
                setattr(place, name, original)


_dtype_of = cache(interpreter._get_np_dtype)


def _numpy_dtype(of: tl.dtype) -> np.dtype:
    """As the interpreter's, which makes a table of all dtypes each time. Types of blocks and pointers have no hash."""
    return _dtype_of(tl.uint64 if isinstance(of.scalar, tl.pointer_type) else of.scalar)
