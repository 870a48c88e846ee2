"""Where the tensors of a gated delta net go: the parts of each that a rank has, and their places in its parameters."""

from collections.abc import Iterator

from worker.checkpoint.recurrent_tensor import RecurrentTensor, moved, scaled
from worker.models.gated_delta_net import DeltaNetConfig
from worker.models.sharding import Shard


def net_tensors(shard: Shard, whole: DeltaNetConfig) -> dict[str, RecurrentTensor]:
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
    mixed = (
        (0, of_keys),
        (own_keys, moved(of_keys, all_keys)),
        (2 * own_keys, moved(of_values, 2 * all_keys)),
    )
    channels = own.states.channels
    firsts = (channels, channels + own.projected_sizes[1], sum(own.projected_sizes[:3]))
    tensors = {
        "conv1d.weight": RecurrentTensor("conv", (states.channels, 1, states.width), 0, mixed),
        "A_log": RecurrentTensor("decay_log", (states.value_heads,), 0, ((0, values),)),
        "dt_bias": RecurrentTensor("decay_bias", (states.value_heads,), 0, ((0, values),)),
        "norm.weight": RecurrentTensor("head_scale", (states.value_dim,), 0, ((0, range(states.value_dim)),)),
        "out_proj.weight": RecurrentTensor("out", (hidden, all_values), 1, ((0, of_values),)),
    }
    if not whole.is_fused:
        gates, strengths, decays = firsts
        return tensors | {
            "in_proj_qkv.weight": RecurrentTensor("qkv", (states.channels, hidden), 0, mixed),
            "in_proj_z.weight": RecurrentTensor("qkv", (all_values, hidden), 0, ((gates, of_values),)),
            "in_proj_b.weight": RecurrentTensor("qkv", (states.value_heads, hidden), 0, ((strengths, values),)),
            "in_proj_a.weight": RecurrentTensor("qkv", (states.value_heads, hidden), 0, ((decays, values),)),
        }
    large = ((0, key_size), (own_keys, key_size), (2 * own_keys, value_size), (firsts[0], value_size))
    small = ((firsts[1], group), (firsts[2], group))
    return tensors | {
        "in_proj_qkvz.weight": RecurrentTensor(
            "qkv", (states.channels + all_values, hidden), 0, tuple(_by_head(heads, large))
        ),
        "in_proj_ba.weight": RecurrentTensor("qkv", (2 * states.value_heads, hidden), 0, tuple(_by_head(heads, small))),
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
