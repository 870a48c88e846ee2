"""Memory of the states of gated delta nets. Row s is the state of the running sequence in slot s."""

import torch

from kernels.delta_rule.states import DeltaRuleStates
from kernels.delta_rule.torch_states import TorchStates
from worker.models.config import DecoderConfig


def row_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Returns the bytes of one sequence's states in all layers of a rank; 0 without gated delta nets."""
    net = config.delta_net
    return 0 if net is None else net.num_layers * net.states.row_bytes(dtype)


def allocate(config: DecoderConfig, rows: int, device: torch.device, dtype: torch.dtype) -> DeltaRuleStates | None:
    """Allocates `rows` rows; None for layers without gated delta nets. On a CPU, a row takes memory only once it is
    written."""
    net = config.delta_net
    if net is None or not net.num_layers:
        return None
    states, layers = net.states, net.num_layers
    heads = (states.value_heads, states.value_dim, states.key_dim)
    recurrent = torch.empty(layers, rows, *heads, dtype=torch.float32, device=device)
    inputs = torch.empty(layers, rows, states.channels, states.width - 1, dtype=dtype, device=device)
    return TorchStates(recurrent, inputs, states)
