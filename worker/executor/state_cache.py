"""Memory of recurrent states. Row s is the state of the running sequence in slot s. The row after those of the slots is
for padding of a batch to a CUDA graph's size. The rows after it are checkpoints: copies of states that later sequences
go on from."""

import torch

from kernels.recurrent.states import RecurrentStates
from kernels.recurrent.torch_states import TorchStates
from worker.executor import kv_cache
from worker.models.config import DecoderConfig

# Bytes of checkpoints by default, for each byte of KV. A row of Qwen3.5-35B-A3B (63 MB) takes as much as the KV of
# 3,000 tokens, and a prompt of a few thousand tokens gets one or two.
BYTES_PER_KV_BYTE = 1.0
# Tokens of KV for each checkpoint, at least, by default. Rows of short convolutions are as small as the KV of 7 tokens
# (LFM2-1.2B), and few prompts are so short that more checkpoints would have a use.
TOKENS_PER_CHECKPOINT = 64


def row_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one sequence's states in all layers of a rank; 0 without recurrent layers."""
    recurrent = config.recurrent
    return 0 if recurrent is None else recurrent.num_layers * recurrent.states.row_bytes(dtype)


def num_checkpoints(whole: DecoderConfig, dtype: torch.dtype, kv_tokens: int, configured: int | None) -> int:
    """Returns the number of checkpoints next to a KV cache of `kv_tokens`: the configured one, or as many as take the
    bytes of the KV cache, and at most one for `TOKENS_PER_CHECKPOINT`. `whole`: the model without any cut, so that all
    ranks have the same number."""
    row = row_bytes(whole, dtype)
    if not row:
        return 0
    if configured is not None:
        return configured
    return int(kv_tokens * _bytes_per_token(whole, dtype)) // row


def checkpoint_bytes(config: DecoderConfig, whole: DecoderConfig, dtype: torch.dtype) -> float:
    """Returns the bytes of checkpoints on a rank, for each token of KV, where their number is not configured."""
    row = row_bytes(whole, dtype)
    return _bytes_per_token(whole, dtype) * row_bytes(config, dtype) / row if row else 0.0


def _bytes_per_token(whole: DecoderConfig, dtype: torch.dtype) -> float:
    """Bytes of checkpoints of the whole model for each token of KV."""
    of_kv = BYTES_PER_KV_BYTE * kv_cache.token_bytes(whole, dtype)
    return min(of_kv, row_bytes(whole, dtype) / TOKENS_PER_CHECKPOINT)


def first_checkpoint(slots: int) -> int:
    """Returns the row of the first checkpoint, with that many slots."""
    return slots + 1


def allocate(
    config: DecoderConfig, slots: int, checkpoints: int, device: torch.device, dtype: torch.dtype
) -> RecurrentStates | None:
    """Allocates the rows of slots, of padding and of checkpoints; None without recurrent layers. On a CPU, a row takes
    memory only once it is written."""
    if config.recurrent is None or not config.recurrent.num_layers:
        return None
    states, layers = config.recurrent.states, config.recurrent.num_layers
    heads = (states.value_heads, states.value_dim, states.key_dim)
    rows = first_checkpoint(slots) + checkpoints
    recurrent = torch.empty(layers, rows, *heads, dtype=torch.float32, device=device)
    inputs = torch.empty(layers, rows, states.channels, states.width - 1, dtype=dtype, device=device)
    if device.type != "cuda":
        return TorchStates(recurrent, inputs, states)
    from kernels.recurrent.triton_states import TritonStates

    recurrent[:, slots].zero_()  # padding has numbers, whatever it does to them
    inputs[:, slots].zero_()
    return TritonStates(recurrent, inputs, states)
