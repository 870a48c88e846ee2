"""Where the tensors of recurrent layers go: the parts of each that a rank has, and their places in its parameters."""

from collections.abc import Iterator

from worker.checkpoint.destination import Destination, TensorPiece, moved, scaled
from worker.models.gated_delta_net import DeltaNetConfig
from worker.models.mamba2 import Mamba2Config
from worker.models.recurrent_layer import RecurrentConfig
from worker.models.sharding import Shard
from worker.models.short_convolution import ShortConvolutionConfig


def recurrent_destinations(shard: Shard, whole: RecurrentConfig) -> dict[str, Destination]:
    """The tensors of a recurrent layer that this rank needs, by their names within the model's layer."""
    if isinstance(whole, Mamba2Config):
        prefix, tensors = "mamba", _mamba2(shard, whole)
    elif isinstance(whole, ShortConvolutionConfig):
        prefix, tensors = "conv", _convolution(shard, whole)
    else:
        assert isinstance(whole, DeltaNetConfig)
        prefix, tensors = "linear_attn", _delta_net(shard, whole)
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _delta_net(shard: Shard, whole: DeltaNetConfig) -> dict[str, Destination]:
    """The tensors of a layer's gated delta net that this rank needs, by their names within the layer."""
    own = shard.config.recurrent
    assert own is not None
    states, hidden = whole.states, shard.whole.hidden_size
    heads, values, group = shard.key_heads, shard.value_heads, states.value_heads // states.key_heads
    key_size, value_size = states.key_dim, group * states.value_dim  # elements of one key head
    all_keys, all_values = states.key_heads * key_size, states.key_heads * value_size
    own_keys = own.states.key_heads * key_size
    of_keys, of_values = scaled(heads, key_size), scaled(heads, value_size)

    # Queries, keys and values stand in this order in the convolution, and in the product of a checkpoint with a tensor
    # for each.
    mixed = ((0, of_keys), (own_keys, moved(of_keys, all_keys)), (2 * own_keys, moved(of_values, 2 * all_keys)))
    channels = own.states.channels
    firsts = (channels, channels + own.projected_sizes[1], sum(own.projected_sizes[:3]))
    tensors = {
        "conv1d.weight": _tensor("conv", (states.channels, 1, states.width), 0, mixed),
        "A_log": _tensor("decay_log", (states.value_heads,), 0, ((0, values),)),
        "dt_bias": _tensor("decay_bias", (states.value_heads,), 0, ((0, values),)),
        "norm.weight": _tensor("head_scale", (states.value_dim,), 0, ((0, range(states.value_dim)),)),
        "out_proj.weight": _tensor("out", (hidden, all_values), 1, ((0, of_values),)),
    }
    if not whole.is_fused:
        gates, strengths, decays = firsts
        return tensors | {
            "in_proj_qkv.weight": _tensor("qkv", (states.channels, hidden), 0, mixed),
            "in_proj_z.weight": _tensor("qkv", (all_values, hidden), 0, ((gates, of_values),)),
            "in_proj_b.weight": _tensor("qkv", (states.value_heads, hidden), 0, ((strengths, values),)),
            "in_proj_a.weight": _tensor("qkv", (states.value_heads, hidden), 0, ((decays, values),)),
        }
    large = ((0, key_size), (own_keys, key_size), (2 * own_keys, value_size), (firsts[0], value_size))
    small = ((firsts[1], group), (firsts[2], group))
    return tensors | {
        "in_proj_qkvz.weight": _tensor("qkv", (states.channels + all_values, hidden), 0, tuple(_by_head(heads, large))),
        "in_proj_ba.weight": _tensor("qkv", (2 * states.value_heads, hidden), 0, tuple(_by_head(heads, small))),
    }


def _by_head(heads: range, kinds: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, range]]:
    """The parts of a tensor that has, for one key head after the other, some elements of each kind. `kinds`: where
    those of the first head go, and how many a head has."""
    total = sum(size for _, size in kinds)
    for number, head in enumerate(heads):
        start = head * total
        for first, size in kinds:
            yield first + number * size, range(start, start + size)
            start += size


def _mamba2(shard: Shard, whole: Mamba2Config) -> dict[str, Destination]:
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
        "in_proj.weight": _tensor("qkv", (rows, hidden), 0, projected),
        "conv1d.weight": _tensor("conv", (states.channels, 1, states.width), 0, mixed),
        "conv1d.bias": _tensor("conv_bias", (states.channels,), 0, mixed),
        "A_log": _tensor("decay_log", (states.value_heads,), 0, ((0, heads),)),
        "dt_bias": _tensor("step_bias", (states.value_heads,), 0, ((0, heads),)),
        "D": _tensor("skip", (states.value_heads,), 0, ((0, heads),)),
        "norm.weight": _tensor("gated_norm", (size,), 0, ((0, of_heads),)),
        "out_proj.weight": _tensor("out", (hidden, size), 1, ((0, of_heads),)),
    }


def _convolution(shard: Shard, whole: ShortConvolutionConfig) -> dict[str, Destination]:
    """The tensors of a layer's short convolution that this rank needs, by their names within the layer."""
    own = shard.config.recurrent
    assert own is not None
    channels, hidden, own_channels = whole.states.channels, shard.whole.hidden_size, own.states.channels
    kept = scaled(shard.value_heads, whole.states.value_dim)
    projected = tuple((number * own_channels, moved(kept, number * channels)) for number in range(3))
    once = range(hidden if shard.rank == 0 else 0)  # only rank 0 has the bias: ranks' outputs are added up
    return {
        "in_proj.weight": _tensor("qkv", (3 * channels, hidden), 0, projected),
        "in_proj.bias": _tensor("qkv_bias", (3 * channels,), 0, projected),
        "conv.weight": _tensor("conv", (channels, 1, whole.states.width), 0, ((0, kept),)),
        "conv.bias": _tensor("conv_bias", (channels,), 0, ((0, kept),)),
        "out_proj.weight": _tensor("out", (hidden, channels), 1, ((0, kept),)),
        "out_proj.bias": _tensor("out_bias", (hidden,), 0, ((0, once),)),
    }


def _tensor(parameter: str, shape: tuple[int, ...], dim: int, parts: tuple[tuple[int, range], ...]) -> Destination:
    """A tensor of whose elements along `dim` each range goes to a parameter, from the index given with it on."""
    return Destination(parameter, shape, dim, tuple(TensorPiece(*part) for part in parts))
