"""Facts of a family: how its configuration maps onto the decoder, and how its checkpoints are laid out."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

HfConfig = Any
"""A Hugging Face configuration: a `transformers.PretrainedConfig`, or its values as `read_config` keeps them."""

Differences = dict[str, Any]
"""Fields of `DecoderConfig` in which a family differs from a Llama. An entry `rope_rules` is a `RopeRules`."""

# The names of a text part: as `transformers` has it, and as checkpoints were published before.
_TEXT_PART = {"model.language_model": "model", "language_model.model": "model", "language_model.lm_head": "lm_head"}


@dataclass(frozen=True, eq=False)
class Family:
    """Facts of the models of one `model_type`, or of several that differ in nothing but that name.

    Names of tensors are dotted. A run of whole parts, as `mlp.router`, is found anywhere in a name, and as no part of a
    longer word.

    | field | meaning |
    | --- | --- |
    | `config` | the differences from a Llama. Raises ValueError for what would be computed wrongly |
    | `fields` | names of fields in config.json, and the usual ones |
    | `names` | runs in names of tensors, and Llama's. All are replaced at once, the longest where several begin |
    | `norms` | norms before and after attention, before and after the MLP; None: as most families name them |
    | `ignored` | runs in names of tensors that are not needed: of images and sounds, for drafts, masks |
    | `text_of` | each `model_type` of models with images that may have one of these as the text part |
    | `fused_qkv` | queries, keys and values are one tensor, `qkv_proj`: one after the other, or those of each head |
    | `fused_gate_up` | gates and ups of MLPs are one tensor, `gate_up_proj` |
    | `own_gates` | gates of heads are a tensor, `gate_proj`; else each head's stand behind its queries |
    | `mlp` | the name of an MLP in layers without experts |
    | `turned` | ends of the names, in files, of matrices that are `[in, out]`, or `[experts, in, out]` |
    | `in_turns` | gates and ups of experts stand in turns, and may be in MXFP4 (`worker.checkpoint.gpt_oss_experts`) |
    """

    config: Callable[[HfConfig], Differences] = lambda hf: {}
    fields: Mapping[str, str] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    norms: tuple[str | None, str | None, str | None, str | None] | None = None
    ignored: tuple[str, ...] = ()
    text_of: tuple[str, ...] = ()
    fused_qkv: Literal["one after the other", "by head"] | None = None
    fused_gate_up: bool = False
    own_gates: bool = False
    mlp: str = "mlp"
    turned: tuple[str, ...] = ()
    in_turns: bool = False

    def renamed(self, name: str) -> str:
        """A tensor's name with Llama's names in place of the family's own."""
        return self._own_names.sub(lambda found: self._all_names[found[0]], name) if self._all_names else name

    def ignores(self, name: str) -> bool:
        """Whether a tensor, by its name with Llama's names, is one of those that are not needed."""
        return any(f".{run}." in f".{name}." for run in self.ignored)

    @cached_property
    def _all_names(self) -> Mapping[str, str]:
        return {**self.names, **_TEXT_PART} if self.text_of else self.names

    @cached_property
    def _own_names(self) -> re.Pattern[str]:
        longest_first = sorted(self._all_names, key=len, reverse=True)
        return re.compile(rf"(?<![^.])(?:{'|'.join(map(re.escape, longest_first))})(?![^.])")


@dataclass(frozen=True)
class RopeRules:
    """How a family rotates queries and keys, besides what its configuration says.

    | field | meaning |
    | --- | --- |
    | `is_partial` | only the first dimensions of a head may be rotated |
    | `is_interleaved` | neighbouring dimensions are a pair, in place of dimension i and `i + head_dim / 2` |
    | `layers` | whether the layer of a number is rotated; by default it is |
    | `thetas` | base of each layer's angles, where layers differ in it |
    | `head_dim` | elements of the part of a head that counts as a head here; None: of the whole head |
    """

    is_partial: bool = False
    is_interleaved: bool = False
    layers: Mapping[int, bool] = field(default_factory=dict)
    thetas: tuple[float, ...] | None = None
    head_dim: int | None = None


def refuse_other_than(hf: HfConfig, **computed: Any) -> None:
    """Raises ValueError if one of these fields, some of which `transformers` does not read, says something else than
    what is computed. A field that is missing or None says nothing."""
    for name, value in computed.items():
        if (said := getattr(hf, name, None)) is not None and said != value:
            raise ValueError(f"{hf.model_type} models with {name} {said!r} are not supported")


def scaled_residuals(hf: HfConfig, embedding: float, residual: float) -> Differences:
    """Embeddings are multiplied by one number, and sublayers' outputs by another as they are added. The decoder keeps
    the hidden states divided by the latter, which norms undo: their epsilon is divided by its square."""
    return {"norm_eps": hf.rms_norm_eps / residual**2, "embedding_scale": embedding / residual}


def rotated_windows(hf: HfConfig) -> RopeRules:
    """Layers with a window rotate, and those without do not."""
    return RopeRules(layers={index: kind == "sliding_attention" for index, kind in enumerate(hf.layer_types)})
