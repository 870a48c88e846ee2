"""Where the tensors of a Mamba2 layer go: the parts of each that a rank has, and their places in its parameters."""

from worker.checkpoint.recurrent_tensor import RecurrentTensor, moved, scaled
from worker.models.mamba2 import Mamba2Config
from worker.models.sharding import Shard


def mamba2_tensors(shard: Shard, whole: Mamba2Config) -> dict[str, RecurrentTensor]:
    """The tensors of a layer's Mamba2 that this rank needs, by their names within the layer."""
    own = shard.config.recurrent
    assert own is not None
    states, hidden, heads = whole.states, shard.whole.hidden_size, shard.value_heads
    size, keys, own_size = whole.attended_size, states.key_heads * states.key_dim, own.attended_size
    of_heads, of_groups = scaled(heads, states.value_dim), scaled(shard.key_heads, states.key_dim)
    # Inputs, keys and queries stand in this order in the convolution. In the product, gates stand before them.
    mixed = (
        (0, of_heads),
        (own_size, moved(of_groups, size)),
        (own_size + own.states.key_heads * states.key_dim, moved(of_groups, size + keys)),
    )
    projected = (
        *((first, moved(part, size)) for first, part in mixed),
        (own.states.channels, of_heads),
        (own.states.channels + own_size, moved(heads, size + states.channels)),
    )
    rows = sum(whole.projected_sizes)
    return {
        "in_proj.weight": RecurrentTensor("qkv", (rows, hidden), 0, projected),
        "conv1d.weight": RecurrentTensor("conv", (states.channels, 1, states.width), 0, mixed),
        "conv1d.bias": RecurrentTensor("conv_bias", (states.channels,), 0, mixed),
        "A_log": RecurrentTensor("decay_log", (states.value_heads,), 0, ((0, heads),)),
        "dt_bias": RecurrentTensor("step_bias", (states.value_heads,), 0, ((0, heads),)),
        "D": RecurrentTensor("skip", (states.value_heads,), 0, ((0, heads),)),
        "norm.weight": RecurrentTensor("gated_norm", (size,), 0, ((0, of_heads),)),
        "out_proj.weight": RecurrentTensor("out", (hidden, size), 1, ((0, of_heads),)),
    }
