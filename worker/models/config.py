"""Configuration of the decoder, and how each supported architecture maps onto it."""

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from kernels.attention.interface import AttentionShape, LatentHeads
from kernels.ops.rotary import Rope
from worker.folders import cache_folder
from worker.models.end_tokens import eos_token_ids as eos_token_ids
from worker.models.experts import ExpertsConfig
from worker.models.families import family_of, text_part
from worker.models.family import Family, HfConfig, RopeRules
from worker.models.layer_inputs import LayerInputsConfig
from worker.models.layer_sizes import LayerSizes
from worker.models.output_gate import OutputGate
from worker.models.quantization import quantization
from worker.models.query_temperature import QueryTemperature
from worker.models.recurrent_layer import RecurrentConfig


@dataclass(frozen=True)
class DecoderConfig:
    """Decoder of the Llama family. Sizes are in elements.

    | field | meaning |
    | --- | --- |
    | `family` | how its checkpoints are laid out; `model_type` is for messages |
    | `context_length` | the longest context that the model is made for, in tokens |
    | `windows`, `ropes` | one entry a layer; a window of None means full attention |
    | `in_chunks` | windows are chunks (`kernels.attention.interface.AttentionShape`) |
    | `own_sizes` | one entry a layer, where layers differ in the sizes of heads or MLP, or share keys and values |
    | `kv_before` | how many layers earlier the keys and values come from; 0: the layer's own (`of_layer`) |
    | `keys_are_values` | values are the keys before norm and rotation (`of_layer`) |
    | `gemma_norms` | norms multiply, in float32, by one plus the stored weight |
    | `float32_norms` | norms multiply in float32 |
    | `layer_norms` | norms subtract the mean |
    | `norm_biases` | such norms have biases |
    | `pre_norms` | attention and MLP read the hidden states through a norm |
    | `parallel` | attention and MLP read the same hidden states, through a norm each, or both through one |
    | `sandwich_norms` | attention and MLP are also followed by a norm, before the residual sum |
    | `gated_mlps` | MLPs and experts multiply the activation of a product, the gate, by another one; else they have one product before the last |
    | `qk_norm` | queries and keys are normalised before rotation: each head by itself, or all heads together; or each head by itself and without weights, in layers that rotate. `after`: each head by itself, after rotation |
    | `value_norm` | values are normalised, each head by itself and without weights |
    | `query_temperature` | factor of queries that grows with the position |
    | `qk_norm_sizes` | for `all`: number of elements of the queries, and of the keys, of all ranks |
    | `latent` | heads of multi-head latent attention; then there is one KV head, of `latent.row` elements |
    | `q_lora_rank` | with latent attention: rank of the queries' matrix if it is a product of two, or None |
    | `output_gate` | outputs of heads are multiplied by gates, which the query's product gives |
    | `experts` | of the layers that have experts in place of an MLP |
    | `recurrent` | of the layers that have recurrent states in place of attention, or alongside it |
    | `sublayers` | for each layer which one it has, where each has one: attention, or what is in its place, or an MLP or experts; None: both |
    | `learned_positions` | positions that have a row of an embedding, which is added to that of the tokens; 0: none has |
    | `layer_inputs` | inputs of each layer besides the hidden states |
    | `layer_scales` | the output of each layer is multiplied by a number |
    | `has_sinks` | attention has sinks (`kernels.attention.interface.AttentionShape`) |
    | `head_bias` | the head has biases |
    | `logit_scale` | factor of all logits |
    | `weight_factors` | factors of a layer's weights, which they have from loading on: by the checkpoint's name of the tensor, one for each of its pieces (`worker.checkpoint.destinations`) |
    | `extra_layers` | layers that a checkpoint has after the model's own, for training or drafts; they are not loaded |
    | `ranks` | number of ranks that share the layers (`worker.models.sharding`) |
    | `is_first` | the layers are the model's first, with the embedding before them |
    | `is_last` | the layers are the model's last, with norm and head after them |

    With several ranks, heads and intermediate size are those of one rank. With several stages, layers, windows and
    ropes are those of one stage.
    """  # noqa: E501

    model_type: str
    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Literal["silu", "gelu", "gelu_tanh", "relu2"]
    context_length: int
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    ropes: tuple[Rope, ...]
    attention_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    gated_mlps: bool = True
    qk_norm: Literal["head", "all", "rotated", "after"] | None = None
    query_temperature: QueryTemperature | None = None
    qk_norm_sizes: tuple[int, int] = (0, 0)
    in_chunks: bool = False
    own_sizes: tuple[LayerSizes, ...] | None = None
    kv_before: int = 0
    keys_are_values: bool = False
    value_norm: bool = False
    gemma_norms: bool = False
    float32_norms: bool = False
    layer_norms: bool = False
    norm_biases: bool = True
    pre_norms: bool = True
    parallel: Literal["two norms", "one norm"] | None = None
    sandwich_norms: bool = False
    embedding_scale: float = 1.0
    attention_softcap: float | None = None
    has_sinks: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    latent: LatentHeads | None = None
    q_lora_rank: int | None = None
    output_gate: OutputGate | None = None
    experts: ExpertsConfig | None = None
    recurrent: RecurrentConfig | None = None
    sublayers: tuple[Literal["attention", "mlp"], ...] | None = None
    learned_positions: int = 0
    layer_inputs: LayerInputsConfig | None = None
    layer_scales: bool = False
    weight_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    extra_layers: int = 0
    ranks: int = 1
    is_first: bool = True
    is_last: bool = True

    @property
    def has_embedding(self) -> bool:
        """Whether the embedding's weights are needed, to embed tokens or as the head."""
        return self.is_first or (self.is_last and self.tied_embeddings)

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and the head on one rank. With several ranks, a multiple of 8 for matrix products on a
        GPU; rows of the last ranks may then lie beyond the vocabulary."""
        return self.vocab_size if self.ranks == 1 else -(-self.vocab_size // (8 * self.ranks)) * 8

    def up_to(self, length: int) -> "DecoderConfig":
        """The same for sequences of at most `length` tokens: a chunk that none of them leaves is no window."""
        ropes = tuple(rope.up_to(length) for rope in self.ropes)
        if self.in_chunks and all(window is None or window >= length for window in self.windows):
            return replace(self, windows=(None,) * self.num_layers, in_chunks=False, ropes=ropes)
        return replace(self, ropes=ropes)

    def of_layer(self, index: int) -> "DecoderConfig":
        """The same with the sizes of layer `index` for all layers."""
        if self.own_sizes is None:
            return self
        return replace(self, own_sizes=None, **asdict(self.own_sizes[index]))

    def experts_of(self, index: int) -> ExpertsConfig | None:
        """The experts of layer `index`; None if it has an MLP."""
        return self.experts if self.experts is not None and self.experts.layers[index] else None

    def has_attention(self, index: int) -> bool:
        """Whether layer `index` has attention, or recurrent states in place of it."""
        return self.sublayers is None or self.sublayers[index] == "attention"

    def has_mlp(self, index: int) -> bool:
        """Whether layer `index` has an MLP or experts."""
        return self.sublayers is None or self.sublayers[index] == "mlp"

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention, and not with recurrent states in place of it."""
        own = self.recurrent
        layers = [index for index in range(self.num_layers) if self.has_attention(index)]
        if own is None or own.alongside_attention:
            return layers
        return [index for index in layers if not own.layers[index]]

    @property
    def kv_layers(self) -> list[int]:
        """The layers with keys and values of their own: those that the KV cache holds."""
        return [index for index in self.attention_layers if not self.of_layer(index).kv_before]

    @property
    def received_size(self) -> int:
        """Columns of what a stage after the first receives: hidden states, then the inputs of its and later layers."""
        inputs = self.layer_inputs
        return self.hidden_size + (0 if inputs is None else inputs.size * inputs.layers)

    @property
    def sent_size(self) -> int:
        """Columns of what a stage before the last sends."""
        inputs = self.layer_inputs
        return self.received_size - (0 if inputs is None else inputs.size * self.num_layers)

    @property
    def query_size(self) -> int:
        """Elements of a head's query."""
        return self.head_dim if self.latent is None else self.latent.query

    @property
    def output_size(self) -> int:
        """Elements of a head's output."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    @property
    def attended_size(self) -> int:
        """Elements of the outputs of all heads, which a layer's last product of attention reads."""
        return self.num_heads * self.output_size

    @property
    def qkv_size(self) -> int:
        """Outputs of the first product of a layer's attention: queries, keys, values and gates of heads if the model
        has any, or what queries, keys and values are made of."""
        if self.latent is None:
            gates = 0 if self.output_gate is None else self.output_gate.size(self.num_heads, self.head_dim)
            kv_heads = 0 if self.kv_before else 2 * self.num_kv_heads
            return (self.num_heads + kv_heads) * self.head_dim + gates
        return (self.q_lora_rank or self.num_heads * self.latent.query) + self.latent.row

    @property
    def attention_weights(self) -> int:
        """Elements of the matrices of a layer's attention."""
        weights = self.hidden_size * (self.qkv_size + self.attended_size)
        if self.latent is not None:
            weights += self.num_heads * self.latent.up * self.latent.kv_lora_rank
            weights += self.num_heads * self.latent.query * (self.q_lora_rank or 0)
        return weights

    @property
    def attention_shape(self) -> AttentionShape:
        """The attention of the layers with keys and values of their own. Where layers have heads of two sizes, those
        with a window have one, and the others the other."""
        heads = {self.windows[index] is not None: self.of_layer(index) for index in self.kv_layers}
        own = heads.get(True) or heads.get(False) or self
        full = heads.get(False) or own
        full_heads = full.num_heads, full.num_kv_heads, full.head_dim
        return AttentionShape(
            num_heads=own.num_heads,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            full_heads=full_heads if full_heads != (own.num_heads, own.num_kv_heads, own.head_dim) else None,
            scale=self.attention_scale,
            windows=tuple(self.windows[index] for index in self.kv_layers),
            softcap=self.attention_softcap,
            latent=self.latent,
            has_sinks=self.has_sinks,
            in_chunks=self.in_chunks,
        )


# Kinds of layers that see a part of the context, by the field that says how many tokens.
_WINDOW_SIZES = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}

_ACTIVATION_NAMES = ("hidden_activation", "mlp_hidden_act", "hidden_act", "activation_function")
# Activations of gates, and of MLPs without a gate.
_GATED: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_PLAIN: dict[str, Literal["gelu", "gelu_tanh", "relu2"]] = {
    "relu2": "relu2",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_config(model: Path) -> HfConfig:
    """The Hugging Face configuration of a model folder, with the defaults of its architecture.

    A model whose files have no head, as embedding models, counts as one with tied embeddings. Of a model with a vision
    part, it is the configuration of the text part.

    It is kept in the cache, by the contents of config.json and the version of transformers. Reading it with
    transformers imports half of that library and takes 3 to 5 s, in every process of a replica.

    Raises ValueError if the folder has none that transformers understands.
    """
    values = _config_values(model)
    if not values.get("quantization_config") and (said := _modelopt_config(model)) is not None:
        values |= {"quantization_config": said}
    if (text := text_part(values)) is not None:
        of_all = {"tie_word_embeddings": values.get("tie_word_embeddings", text.get("tie_word_embeddings", True))}
        of_all["quantization_config"] = values.get("quantization_config") or text.get("quantization_config")
        ends = (part.get("eos_token_id") for part in (values, text))
        of_all["eos_token_id"] = next((end for end in ends if end is not None), None)
        if of_all["tie_word_embeddings"] and "lm_head.weight" in _tensor_names(model):
            of_all["tie_word_embeddings"] = False  # the files know better than a default of the whole model
        values = text | of_all
    hf = SimpleNamespace(**values)
    if not getattr(hf, "tie_word_embeddings", True) and _is_headless(model):
        hf.tie_word_embeddings = True
    return hf


def _modelopt_config(model: Path) -> dict[str, Any] | None:
    """The checkpoint's format by a file next to config.json, as `quantization_config` would: older checkpoints
    of Model Optimizer have it there alone. None if there is no such file. Raises ValueError if it cannot be read."""
    path = model / "hf_quant_config.json"
    try:
        said = json.loads(path.read_text())["quantization"]
        return {"quant_method": "modelopt", "quant_algo": said["quant_algo"]}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not as Model Optimizer writes it: {error!r}") from None


def _is_headless(model: Path) -> bool:
    """Whether a folder's safetensors are those of a model without a head: the layers alone, whose tensors' names begin
    without `model.`. False for a folder without safetensors that can be read."""
    names = _tensor_names(model)
    return "embed_tokens.weight" in names and "lm_head.weight" not in names


def _tensor_names(model: Path) -> set[str]:
    """Names of the tensors in a folder's safetensors, those of a text part as if it were the model. Empty for a folder
    without safetensors that can be read."""
    from safetensors import SafetensorError, safe_open

    index = model / "model.safetensors.index.json"
    try:
        if index.exists():
            names: set[str] = set(json.loads(index.read_text())["weight_map"])
        else:
            with safe_open(model / "model.safetensors", framework="np") as file:
                names = set(file.keys())
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return set()
    return {name.removeprefix("language_model.") for name in names}


def _config_values(model: Path) -> dict[str, Any]:
    kept = _kept_config(model)
    if kept is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):  # it was damaged, and is made again
            values = json.loads(kept.read_text())
            if isinstance(values, dict):
                return values
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        values = AutoConfig.from_pretrained(model).to_dict()
    except (OSError, ValueError, KeyError, StrictDataclassError) as error:
        raise ValueError(f"{model} has no readable model configuration: {error}") from error
    if kept is not None:
        half = kept.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError, TypeError):  # it is read with transformers again, then
            text = json.dumps(values)
            kept.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(text)
            half.replace(kept)
    return dict(values)


def _kept_config(model: Path) -> Path | None:
    """The file in the cache for the configuration of a model folder; None if the folder has no config.json."""
    try:
        content = (model / "config.json").read_bytes()
    except OSError:
        return None
    key = hashlib.sha256(f"{version('transformers')}\n".encode() + content).hexdigest()
    return cache_folder() / "configs" / f"{key[:32]}.json"


def decoder_config(hf: HfConfig) -> DecoderConfig:
    """The decoder's configuration for a model. Raises ValueError if the decoder does not support its architecture, or
    this variant of it."""
    if not isinstance(hf, SimpleNamespace):
        hf = SimpleNamespace(**hf.to_dict())  # where layers differ, transformers refuses to say what holds for most
    family = family_of(hf.model_type)
    hf = SimpleNamespace(**{family.fields.get(name, name): value for name, value in vars(hf).items()})
    if not hasattr(hf, "num_hidden_layers") and hasattr(hf, "layers_block_type"):  # where the number follows from it
        hf = SimpleNamespace(**vars(hf), num_hidden_layers=len(hf.layers_block_type))
    if getattr(hf, "use_bidirectional_attention", False) not in (None, False, "vision"):  # text is causal with "vision"
        raise ValueError("models with bidirectional attention are not supported")
    quantization(quantization_config(hf), family.in_turns)  # raises for a format that is not understood
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    layer_types = _layer_types(hf)
    own = family.config(hf)
    rules = own.pop("rope_rules", RopeRules())
    sizes: tuple[LayerSizes, ...] | None = own.get("own_sizes")
    common: dict[str, Any] = {
        "model_type": hf.model_type,
        "family": family,
        "vocab_size": hf.vocab_size,
        "hidden_size": hf.hidden_size,
        "intermediate_size": getattr(hf, "intermediate_size", None),
        "num_layers": hf.num_hidden_layers,
        "num_heads": hf.num_attention_heads,
        "num_kv_heads": getattr(hf, "num_key_value_heads", None) or hf.num_attention_heads,
        "head_dim": head_dim,
        "norm_eps": getattr(hf, "rms_norm_eps", None),
        "qkv_bias": getattr(hf, "attention_bias", False),
        "out_bias": getattr(hf, "attention_bias", False),
        "mlp_bias": getattr(hf, "mlp_bias", False),
        "activation": _activation(hf, own.get("gated_mlps", True)),
        "context_length": hf.max_position_embeddings,
        "tied_embeddings": hf.tie_word_embeddings,
        "windows": tuple(getattr(hf, _WINDOW_SIZES[kind]) if kind in _WINDOW_SIZES else None for kind in layer_types),
        "in_chunks": "chunked_attention" in layer_types,
        "ropes": tuple(
            _rope(hf, kind, rules.head_dim or (sizes[index].head_dim if sizes else head_dim), rules, index)
            for index, kind in enumerate(layer_types)
        ),
        "attention_scale": head_dim**-0.5,
    }
    config = DecoderConfig(**(common | own))
    if config.qk_norm == "all":
        of_all = (config.num_heads * head_dim, config.num_kv_heads * head_dim)
        config = replace(config, qk_norm_sizes=of_all)
    return config


def in_memory(model: DecoderConfig, device: str, dtype: str, dequantize: bool) -> DecoderConfig:
    """The model with experts in the format that ranks have them in: those in MXFP4 are multiplied out but for bfloat16
    on a GPU. `device`: `cpu` or `cuda`; `dtype`: as in `WorkerConfig`."""
    if model.experts is None or (device == "cuda" and dtype in ("auto", "bfloat16") and not dequantize):
        return model
    return replace(model, experts=replace(model.experts, in_mxfp4=False))


def quantization_config(hf: HfConfig) -> dict[str, Any] | None:
    """Description of a quantized checkpoint's format in config.json; None if it has none. Older checkpoints of
    compressed-tensors have another name for it."""
    said: dict[str, Any] | None = getattr(hf, "quantization_config", None) or getattr(hf, "compression_config", None)
    return said


def _layer_types(hf: HfConfig) -> list[str]:
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    known = {"full_attention", "linear_attention", "conv", *_WINDOW_SIZES}
    if (unknown := set(kinds) - known) or _WINDOW_SIZES.keys() <= set(kinds):
        raise ValueError(f"layer types {sorted(unknown or set(kinds))} are not supported")
    return list(kinds)


def _activation(hf: HfConfig, has_gate: bool) -> Literal["silu", "gelu", "gelu_tanh", "relu2"]:
    name = next((said for field in _ACTIVATION_NAMES if (said := getattr(hf, field, None))), "silu")
    known = _GATED if has_gate else _PLAIN
    if name not in known:
        where = "" if has_gate else " of MLPs without a gate"
        raise ValueError(f"activation {name!r}{where} is not supported; these are: {', '.join(known)}")
    return known[name]


def _rope(hf: HfConfig, layer_type: str, head_dim: int, rules: RopeRules, index: int) -> Rope:
    said = getattr(hf, "rope_parameters", None)
    if said is None:  # a family that never rotates
        return Rope(head_dim, 1e4, rotated=0)
    parameters = dict(said.get(layer_type) or said)
    if "rope_theta" not in parameters:  # kinds of layers have rotations of their own
        if layer_type in ("conv", "linear_attention"):
            return Rope(head_dim, 1e4, rotated=0)
        raise ValueError(f"rope_parameters lack rope_theta for {layer_type}")
    kind, theta = parameters.pop("rope_type", "default"), parameters.pop("rope_theta")
    if rules.thetas is not None:
        theta = rules.thetas[index]
    part = 1.0 if kind == "proportional" else parameters.pop("partial_rotary_factor", 1.0)
    if rules.head_dim is not None:  # what is said is the size of that part
        part = 1.0
    if kind == "longrope":
        original = parameters.get("original_max_position_embeddings") or hf.original_max_position_embeddings
        parameters["original_max_position_embeddings"] = original
        parameters["factor"] = parameters.get("factor") or hf.max_position_embeddings / original
    if kind == "dynamic" and (alpha := parameters.get("alpha")):  # Hunyuan's, the same for all lengths
        kind, theta = "default", theta * alpha ** (head_dim / (head_dim - 2))
    if not rules.layers.get(index, True):
        return Rope(head_dim, theta, rotated=0)
    if part != 1.0 and not rules.is_partial:
        raise ValueError("models that rotate only a part of each head are not supported")
    return Rope(head_dim, theta, kind, parameters, int(head_dim * part), rules.is_interleaved)
