"""The attention backend of a rank: its choice, with the reason if a faster one is missing on its machine, and its
construction."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kernels.attention import flashinfer_backend, latent_flashinfer
from kernels.attention.interface import AttentionBackend, AttentionShape
from kernels.attention.latent import TorchLatentAttention
from kernels.attention.torch_backend import TorchAttention
from kernels.attention.window_pages import of_windows

_SLOWER = "attention runs on Triton's kernels, which are slower"
_SLOWER_LATENT = "attention runs on PyTorch's operators, which are slower, without CUDA graphs"
_INSTALL = "In the folder of Shoal's source: pip install --require-hashes --no-deps -r requirements.gpu.lock"


class AttentionChoice(NamedTuple):
    """The attention backend of a rank. `name`: flashinfer, triton, numba or torch. `problem`: why a faster backend is
    missing and how to get it, in one line; empty if there is no faster one."""

    name: str
    problem: str = ""


class AttentionLimits(NamedTuple):
    """The largest batches that a backend allocates for: sequences; pages of all of them together; tokens of a CUDA
    graph."""

    max_sequences: int
    max_pages: int
    max_tokens: int


def choose_attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    build: Callable[[AttentionShape, torch.dtype, torch.device], object] | None = None,
) -> AttentionChoice:
    """Chooses FlashInfer if it has a kernel for this attention and works on this machine, else Triton, or torch for
    latent heads; on a CPU numba, or torch for a dtype that numba has no kernel for.

    `build` prepares FlashInfer, by default all kernels that it has for this attention. It raises ImportError if
    FlashInfer is not installed, and OSError or RuntimeError if it cannot be compiled.
    """
    if device.type == "cpu":
        return AttentionChoice("numba" if dtype in (torch.float32, torch.bfloat16) else "torch")
    kernels, other, slower = flashinfer_backend.has_kernel, "triton", _SLOWER
    if shape.latent is not None:
        kernels, other, slower = latent_flashinfer.has_kernel, "torch", _SLOWER_LATENT
    shapes = [shape]
    if shape.full_heads is not None or shape.in_chunks:
        shapes = [of_windows(shape, has_window)[0] for has_window in (True, False)]
    if not all(kernels(each, dtype) for each in shapes):
        return AttentionChoice(other)
    if build is None:
        build = flashinfer_backend.modules if shape.latent is None else latent_flashinfer.modules
    try:
        for each in shapes:
            build(each, dtype, device)
    except ImportError:
        problem = f"FlashInfer is not installed: {slower}. {_INSTALL}"
    except (OSError, RuntimeError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0][:100]
        problem = f"FlashInfer cannot be compiled here ({why}): {slower}. It needs nvcc, of CUDA's toolkit"
    else:
        return AttentionChoice("flashinfer")
    return AttentionChoice(other, problem)


def build_attention(
    choice: AttentionChoice,
    kv: torch.Tensor,
    shape: AttentionShape,
    limits: AttentionLimits,
    sinks: torch.Tensor | None = None,
    latent_weights: Sequence[torch.Tensor] = (),
) -> AttentionBackend:
    """Builds the chosen backend over the pages `kv`, in the layout of `kernels.attention.interface`. Backends of a CPU
    have no limits. sinks: as for `AttentionBackend`. `latent_weights`: for latent heads, as for
    `kernels.attention.latent.LatentProjections`."""
    if shape.latent is not None:
        if choice.name == "flashinfer":
            return latent_flashinfer.FlashInferLatentAttention(kv, shape, latent_weights, *limits)
        return TorchLatentAttention(kv, shape, latent_weights, partial(build_attention, choice, limits=limits))
    # Modules that not every machine can import are imported where they are used: numba on CPUs, Triton on GPUs.
    if choice.name == "flashinfer":
        return flashinfer_backend.FlashInferAttention(kv, shape, *limits, sinks)
    if choice.name == "triton":
        from kernels.attention.triton_backend import TritonAttention

        return TritonAttention(kv, shape, *limits, sinks)
    if choice.name == "numba":
        from kernels.attention.cpu.numba_backend import NumbaAttention

        return NumbaAttention(kv, shape, sinks)
    return TorchAttention(kv, shape, sinks)
