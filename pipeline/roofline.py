"""The expected time of a stage's step, from the arithmetic and the bytes of its layers and a device's rates.

Used as the prior of a `CostModel`, so that the first steps are predicted, and for the stages of the simulator. The time
of a matrix product is a smooth maximum of its memory time and its arithmetic time (S. Williams et al., Roofline, CACM
2009: the corner is round on real devices).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.shape import BatchShape, unused_rows
from pipeline.stages import split_costs

# How round the corner of the roofline is: max(a, b) ~ (a^p + b^p)^(1/p). Fitted to the linear layers of Llama-3.1-8B at
# 1 to 2,048 tokens on an H200; the error is at most 4%.
ROUNDNESS = 2.2
# Bytes of activations that norms, rotary embedding, the gate and the residual move in a layer, for each element of a
# token's hidden state and of its MLP's inner state.
HIDDEN_PASSES, INNER_PASSES = 16, 6


@dataclass(frozen=True)
class DeviceSpec:
    """Rates that a device achieves, not those of its data sheet."""

    name: str
    flops: float  # per second, matrix products, for a moment
    sustained_flops: float  # the same for minutes, within the power limit
    attention_flops: float  # per second, attention over long prompts
    bytes_per_s: float  # of weights and activations
    attention_bytes_per_s: float  # of KV
    memory_bytes: float
    layer_s: float  # launches and small kernels of a layer, for any batch
    mixed_layer_s: float  # the same if the batch has chunks of prompts

    def sustained(self) -> "DeviceSpec":
        """The device under load for minutes."""
        return replace(self, flops=self.sustained_flops)


@dataclass(frozen=True)
class LinkSpec:
    """A link between devices."""

    name: str
    latency_s: float
    bytes_per_s: float
    sum_latency_s: float  # of an all-reduce
    sum_bytes_per_s: float

    def send_s(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s

    def sum_s(self, num_bytes: float) -> float:
        """Seconds of an all-reduce of `num_bytes` on every rank."""
        return self.sum_latency_s + num_bytes / self.sum_bytes_per_s


@dataclass(frozen=True)
class LayerSpec:
    """Sizes of one layer, in elements.

    | field | meaning |
    | --- | --- |
    | `weights` | of the matrices that each token is multiplied with |
    | `inner` | a token's inner state of the MLP, or of its experts |
    | `kv` | a token's keys and values that the layer keeps; 0 for none, as where it reads those of another layer |
    | `read_kv` | a token's keys and values that its attention reads |
    | `kv_heads` | into as many parts, at most, can ranks divide these |
    | `attended` | a token's outputs of all heads. Queries may have another size: then it is the mean of both |
    | `window` | tokens that attention reads at most; None for all |
    | `experts`, `chosen`, `expert_weights` | experts, those of one token, and the weights of one |
    | `expert_bytes` | of an expert's weight |
    | `state_bytes` | of a sequence's recurrent state, which a step reads and writes |
    """

    weights: int
    inner: int
    kv: int
    read_kv: int
    kv_heads: int
    attended: int
    window: int | None = None
    experts: int = 0
    chosen: int = 0
    expert_weights: int = 0
    expert_bytes: float = 2.0
    state_bytes: int = 0

    @property
    def all_weights(self) -> int:
        """Weights that a step of many decodes reads, which have all experts between them: their bytes over two."""
        return self.weights + round(self.read_weights(self.experts))

    def read_weights(self, experts: float) -> float:
        """Weights of as many experts: their bytes over two."""
        return experts * self.expert_weights * self.expert_bytes / 2

    @property
    def multiplied(self) -> int:
        """Weights that one token is multiplied with."""
        return self.weights + self.chosen * self.expert_weights

    def experts_used(self, tokens: float) -> float:
        """Number of experts that some of `tokens` tokens use, if all are as likely."""
        return self.experts * (1.0 - (1.0 - self.chosen / self.experts) ** tokens) if self.experts else 0.0


@dataclass(frozen=True)
class ModelSpec:
    """Sizes of a transformer, from its public configuration. Two bytes per number.

    A model with `experts` has them in all layers but the first `dense_layers`: each token uses `chosen` experts of
    inner size `expert_inner`, and shared ones of inner size `shared_inner` together.

    A model with latent attention has `latent` elements of KV a token and layer, which every rank holds, and
    `latent_weights` matrix elements in a layer's attention. Its `head_dim` is the mean of a query's and a value's.

    `own_layers`: the sizes of each layer, where they are not those that the other fields say.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    element_bytes: int = 2
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    latent: int = 0
    latent_weights: int = 0
    own_layers: tuple[LayerSpec, ...] | None = None

    @cached_property
    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """The sizes of each layer."""
        if self.own_layers is not None:
            return self.own_layers
        kv, attended = self.kv_bytes // self.element_bytes, self.heads * self.head_dim
        dense = LayerSpec(self.layer_weights, self.inner, kv, kv, self.kv_heads, attended)
        if not self.experts:
            return (dense,) * self.layers
        sparse = replace(
            dense,
            weights=round(self.sparse_weights(0)),
            inner=self.chosen * self.expert_inner + self.shared_inner,
            experts=self.experts,
            chosen=self.chosen,
            expert_weights=3 * self.hidden * self.expert_inner,
        )
        return (dense,) * self.dense_layers + (sparse,) * (self.layers - self.dense_layers)

    @property
    def layer_weights(self) -> int:
        """Number of matrix elements in one layer without experts."""
        return self._attention_weights + self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def all_weights(self) -> int:
        """Number of matrix elements in all layers."""
        return sum(layer.all_weights for layer in self.layer_specs)

    def sparse_weights(self, experts: float) -> float:
        """Number of matrix elements in a layer with experts, of which only as many count."""
        always = self._attention_weights + self.hidden * (self.experts + 3 * self.shared_inner)
        return always + 3.0 * self.hidden * self.expert_inner * experts

    @property
    def _attention_weights(self) -> int:
        return self.latent_weights or self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one token in one layer."""
        return (self.latent or 2 * self.kv_heads * self.head_dim) * self.element_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token sends from a stage to the next."""
        return self.hidden * self.element_bytes


DEVICES = {
    # H200: measured (device copy, matrix products for a moment and at 692 of its 700 W, FlashInfer's attention).
    # H100, A100: scaled by their data sheets; matrix products of an A100 stay within its power limit.
    # CPU: the order of magnitude of a core, which is enough for a first guess.
    "h200": DeviceSpec("h200", 800e12, 670e12, 540e12, 3.6e12, 4.2e12, 141e9, 6e-6, 12e-6),
    "h100": DeviceSpec("h100", 800e12, 670e12, 540e12, 2.5e12, 2.9e12, 80e9, 6e-6, 12e-6),
    "a100": DeviceSpec("a100", 255e12, 255e12, 170e12, 1.6e12, 1.8e12, 80e9, 8e-6, 16e-6),
    "cpu": DeviceSpec("cpu", 5e10, 5e10, 2e10, 1e10, 5e9, 8e9, 5e-5, 8e-5),
}
LINKS = {
    # H200: NCCL, measured over NVLink, and restricted to sockets.
    "nvlink": LinkSpec("nvlink", 21e-6, 150e9, 19e-6, 210e9),
    "sockets": LinkSpec("sockets", 180e-6, 16e9, 151e-6, 5.7e9),
    # 100 Gb Ethernet between nodes, NVLink of A100s within a node: nine tenths of the line rate, usual latencies.
    "ethernet_100g": LinkSpec("ethernet_100g", 60e-6, 11e9, 120e-6, 5.5e9),
    "nvlink_a100": LinkSpec("nvlink_a100", 25e-6, 100e9, 25e-6, 120e9),
}
MODELS = {
    "llama-8b": ModelSpec("llama-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    "llama-70b": ModelSpec("llama-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    "llama-405b": ModelSpec("llama-405b", 126, 16384, 53248, 128, 8, 128, 128256),
    "qwen3-30b-a3b": ModelSpec(
        "qwen3-30b-a3b", 48, 2048, 6144, 32, 4, 128, 151936, experts=128, chosen=8, expert_inner=768
    ),
    "deepseek-v2-lite": ModelSpec(
        "deepseek-v2-lite",
        27,
        2048,
        10944,
        16,
        1,
        160,
        102400,
        experts=64,
        chosen=6,
        expert_inner=1408,
        shared_inner=2816,
        dense_layers=1,
        latent=576,
        latent_weights=13_762_560,
    ),
    "falcon-180b": ModelSpec("falcon-180b", 80, 14848, 59392, 232, 8, 64, 65024, gated=False),
}


@dataclass(frozen=True)
class StageSpec:
    """A stage: `layers` of a model on `ranks` devices, from layer `first` on.

    - `link` joins the ranks; None for a single rank.
    - `has_head`: whether the stage has the head.
    - `rows`: number of rows that the stage computes for a step.

    With more ranks than KV heads, several ranks hold the same KV.
    """

    model: ModelSpec
    device: DeviceSpec
    layers: int
    has_head: bool = False
    ranks: int = 1
    link: LinkSpec | None = None
    rows: PaddedSizes = UNPADDED
    first: int = 0

    @cached_property
    def _kinds(self) -> list[tuple[LayerSpec, int]]:
        """The sizes of its layers, each with the number of layers that have them."""
        return list(Counter(self.model.layer_specs[self.first : self.first + self.layers]).items())

    def seconds(self, shape: BatchShape) -> float:
        """Seconds of one step."""
        model, device = self.model, self.device
        n = self.rows.padded(shape)
        whole = n + unused_rows(n)
        seconds = self.layers * (device.mixed_layer_s if shape.chunks else device.layer_s)
        for layer, count in self._kinds:
            read = layer.weights + layer.read_weights(layer.experts_used(n))
            layer_s = self._product_s(read, whole, layer.multiplied) + self._small_s(n, layer.inner)
            seconds += count * (layer_s + self._attention_s(layer, shape))
        if self.has_head:
            seconds += self._product_s(model.head_weights, shape.decodes + shape.chunks)
        if self.link is not None and self.ranks > 1:
            seconds += 2 * self.layers * self.link.sum_s(n * model.token_bytes)
        return seconds

    def kv_tokens(self, used: float = 0.9, reserved_bytes: float = 4e9) -> int:
        """Tokens whose KV the stage can hold, if layers with windows keep all of them too. `used`: fraction of the
        memory for weights, KV and `reserved_bytes`."""
        model = self.model
        weights = sum(layer.all_weights * count for layer, count in self._kinds)
        weights += model.head_weights if self.has_head else 0
        free = self.device.memory_bytes * used - weights * model.element_bytes / self.ranks - reserved_bytes
        token = sum(count * layer.kv * model.element_bytes / self._kv_parts(layer) for layer, count in self._kinds)
        return max(0, int(free / (token or model.element_bytes)))

    def _kv_parts(self, layer: LayerSpec) -> int:
        """Number of parts into which the ranks divide the KV of a layer."""
        return min(self.ranks, layer.kv_heads)

    def _small_s(self, tokens: int, inner: int) -> float:
        """Seconds of a layer's operators between its products."""
        moved = HIDDEN_PASSES * self.model.hidden + INNER_PASSES * inner / self.ranks
        return tokens * self.model.element_bytes * moved / self.device.bytes_per_s

    def _product_s(self, weights: float, tokens: int, multiplied: float | None = None) -> float:
        """Seconds of products that read `weights` elements, and multiply each token with `multiplied` of them, by
        default all."""
        memory = weights * self.model.element_bytes / self.ranks / self.device.bytes_per_s
        arithmetic = 2.0 * (weights if multiplied is None else multiplied) * tokens / self.ranks / self.device.flops
        return (memory**ROUNDNESS + arithmetic**ROUNDNESS) ** (1 / ROUNDNESS)

    def _attention_s(self, layer: LayerSpec, shape: BatchShape) -> float:
        """Seconds of one layer's attention, or of its recurrent state. With a window, at most: what each sequence reads
        of it follows only from the sums over all."""
        device = self.device
        context, prefixes, pairs = shape.decode_context, shape.prefixes, shape.prefix_products + shape.squares / 2
        if layer.window is not None:
            context = min(context, shape.decodes * layer.window)
            prefixes = min(prefixes, shape.chunks * layer.window)
            pairs = min(pairs, (shape.tokens - shape.decodes) * layer.window)
        token_s = layer.read_kv * self.model.element_bytes / self._kv_parts(layer) / device.attention_bytes_per_s
        seconds = context * token_s
        if shape.chunks:
            seconds += 4.0 * pairs * layer.attended / self.ranks / device.attention_flops + prefixes * token_s
        if layer.state_bytes:
            seconds += 2.0 * (shape.decodes + shape.chunks) * layer.state_bytes / self.ranks / device.bytes_per_s
        return seconds


def make_stages(
    model: ModelSpec,
    device: DeviceSpec,
    stages: int,
    ranks: int = 1,
    link: LinkSpec | None = None,
    rows: PaddedSizes = UNPADDED,
    cut: Sequence[range] | None = None,
) -> list[StageSpec]:
    """All layers divided over `stages` stages of `ranks` devices each. `cut`: the layers of each; None: by cost."""
    read = [float(layer.all_weights) for layer in model.layer_specs]
    multiplied = [float(layer.multiplied) for layer in model.layer_specs]
    return [
        StageSpec(model, device, len(layers), layers.stop == model.layers, ranks, link, rows, layers.start)
        for layers in cut or split_costs(read, multiplied, stages, float(model.head_weights))
    ]
