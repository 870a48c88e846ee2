"""Where the tensors of a short convolution's layer go: the channels of each that a rank has."""

from worker.checkpoint.recurrent_tensor import RecurrentTensor, moved, scaled
from worker.models.sharding import Shard
from worker.models.short_convolution import ShortConvolutionConfig


def convolution_tensors(shard: Shard, whole: ShortConvolutionConfig) -> dict[str, RecurrentTensor]:
    """The tensors of a layer's short convolution that this rank needs, by their names within the layer."""
    own = shard.config.recurrent
    assert own is not None
    channels, hidden, own_channels = whole.states.channels, shard.whole.hidden_size, own.states.channels
    kept = scaled(shard.value_heads, whole.states.value_dim)
    projected = tuple((number * own_channels, moved(kept, number * channels)) for number in range(3))
    once = range(hidden if shard.rank == 0 else 0)  # only rank 0 has the bias: ranks' outputs are added up
    return {
        "in_proj.weight": RecurrentTensor("qkv", (3 * channels, hidden), 0, projected),
        "in_proj.bias": RecurrentTensor("qkv_bias", (3 * channels,), 0, projected),
        "conv.weight": RecurrentTensor("conv", (channels, 1, whole.states.width), 0, ((0, kept),)),
        "conv.bias": RecurrentTensor("conv_bias", (channels,), 0, ((0, kept),)),
        "out_proj.weight": RecurrentTensor("out", (hidden, channels), 1, ((0, kept),)),
        "out_proj.bias": RecurrentTensor("out_bias", (hidden,), 0, ((0, once),)),
    }
