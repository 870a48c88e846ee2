"""The names of tensors in the checkpoints of all families, and those that a rank does not need."""

import re

from worker.models.config import DecoderConfig
from worker.models.sharding import Shard

# The names of experts and MLPs in checkpoints, and those of `destinations`: Mixtral's, Granite's, Qwen2's, Ernie's,
# StarCoder2's and Phi's.
_EXPERT_NAMES = (
    (re.compile(r"\.(block_sparse_moe|feed_forward)\."), ".mlp."),
    (re.compile(r"(layers\.\d+)\.(experts|router)\."), r"\1.mlp.\2."),
    (re.compile(r"\.mlp\.router\.(?:proj\.)?(weight|scale|per_expert_scale)$"), r".mlp.gate.\1"),
    (re.compile(r"\.experts\.(\d+)\.w1\."), r".experts.\1.gate_proj."),
    (re.compile(r"\.experts\.(\d+)\.w3\."), r".experts.\1.up_proj."),
    (re.compile(r"\.experts\.(\d+)\.w2\."), r".experts.\1.down_proj."),
    (re.compile(r"\.mlp\.input_linear\.weight$"), ".mlp.experts.gate_up_proj"),
    (re.compile(r"\.mlp\.output_linear\.weight$"), ".mlp.experts.down_proj"),
    (re.compile(r"\.mlp\.router(\.layer|\.gate)?\.(weight|bias)$"), r".mlp.gate.\2"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.shared_experts.gate_up_proj."),
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.shared_experts.down_proj."),
    (re.compile(r"\.mlp\.gate\.wg\."), ".mlp.gate."),
    (re.compile(r"\.mlp\.shared_(expert|mlp)\."), ".mlp.shared_experts."),
    (re.compile(r"\.mlp\.(?:experts\.)?(e_score_correction_bias|expert_bias)$"), ".mlp.gate.e_score_correction_bias"),
    (re.compile(r"\.mlp\.(gate\.)?moe_statics\.e_score"), ".mlp.gate.e_score"),
    (re.compile(r"\.mlp\.(c_fc|fc1)\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.(c_proj|fc2)\."), ".mlp.down_proj."),
)

# Nemotron-H's names: a layer's one sublayer is its mixer, whatever it is.
_MIXER_NAMES = (
    (re.compile(r"^backbone\."), "model."),
    (re.compile(r"\bembeddings\."), "embed_tokens."),
    (re.compile(r"\bnorm_f\."), "norm."),
    (re.compile(r"\.mixer\.([qkvo]_proj)\."), r".self_attn.\1."),
    (re.compile(r"\.mixer\.(up_proj|down_proj|gate|experts|shared_experts|fc[12]_latent_proj)\."), r".mlp.\1."),
    (re.compile(r"\.mixer\."), ".mamba."),
)

# GPT-2's names, in files that begin with `transformer.` or do not, and GPT-NeoX's.
_GPT2_NAMES = (
    (re.compile(r"^(transformer\.)?wte\."), "model.embed_tokens."),
    (re.compile(r"^(transformer\.)?wpe\."), "model.embed_positions."),
    (re.compile(r"^(transformer\.)?ln_f\."), "model.norm."),
    (re.compile(r"^(transformer\.)?h\."), "model.layers."),
    (re.compile(r"\.ln_1\."), ".input_layernorm."),
    (re.compile(r"\.ln_2\."), ".post_attention_layernorm."),
    (re.compile(r"\.attn\.c_attn\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attn\.c_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.attn\."), ".self_attn."),
)
_NEOX_NAMES = (
    (re.compile(r"^gpt_neox\."), "model."),
    (re.compile(r"^embed_out\."), "lm_head."),
    (re.compile(r"\bembed_in\."), "embed_tokens."),
    (re.compile(r"\bfinal_layer_norm\."), "norm."),
    (re.compile(r"\.attention\.query_key_value\."), ".self_attn.qkv_proj."),
    (re.compile(r"\.attention\."), ".self_attn."),
    (re.compile(r"\.dense_h_to_4h\."), ".up_proj."),
    (re.compile(r"\.dense_4h_to_h\."), ".down_proj."),
)

# Those of LFM2's attention and MLPs, of attention of Phi and Laguna, of Hunyuan's norms, and those of most families.
_LAYER_NAMES = (
    (re.compile(r"\.mlp\.w1\."), ".mlp.gate_proj."),
    (re.compile(r"\.mlp\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.mlp\.w2\."), ".mlp.down_proj."),
    (re.compile(r"\.self_attn\.(out_proj|dense)\."), ".self_attn.o_proj."),
    (re.compile(r"\.self_attn\.g_proj\."), ".self_attn.gate_proj."),
    (re.compile(r"\.self_attn\.([qk])(?:uery|ey)?_layernorm\."), r".self_attn.\1_norm."),
)

_OF_MEDIA = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector.", "mm_projector."),
    *("vision_embedder.", "embed_vision.", "audio_tower.", "embed_audio."),
)


def full_name(name: str) -> str:
    """The name of a tensor in a model with a head, as `worker.checkpoint.destinations` has it. In a checkpoint of the
    layers alone, as embedding models have, names begin without `model.`. Names of experts differ by family."""
    # Next to a vision part: as transformers has it, and as checkpoints were published before.
    name = name.replace("model.language_model.", "model.", 1)
    name = re.sub(r"^language_model\.(?=model\.|lm_head\.)", "", name)
    if re.search(r"\.mixer\.|\bembeddings\.|\bnorm_f\.|^backbone\.", name):
        for pattern, new in _MIXER_NAMES:
            name = pattern.sub(new, name)
    if re.search(r"^(transformer\.)?(wte|wpe|ln_f|h)\.", name):
        for pattern, new in _GPT2_NAMES:
            name = pattern.sub(new, name)
    if re.search(r"^gpt_neox\.|^embed_out\.", name):
        for pattern, new in _NEOX_NAMES:
            name = pattern.sub(new, name)
    if re.search(r"\.(mlp|feed_forward|block_sparse_moe|shared_mlp|experts|router)\.", name):
        for pattern, new in _EXPERT_NAMES:
            name = pattern.sub(new, name)
    name = re.sub(r"\b(final_layernorm|embedding_norm)\.", "norm.", name)  # Bamba's and LFM2's
    if ".mlp." in name or ".self_attn." in name:
        for pattern, new in _LAYER_NAMES:
            name = pattern.sub(new, name)
    return f"model.{name}" if name.startswith(("embed_tokens.", "layers.", "norm.")) else name


def is_ignored(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is not needed: rotary frequencies and masks, in old checkpoints; a second copy of tied
    embeddings; what a model has for images, sounds and drafts; keys and values of layers that read others'."""
    if name.removeprefix("model.").startswith(_OF_MEDIA) or name.startswith("mtp."):
        return True
    of_kv = re.match(r"model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.", name)
    if of_kv is not None and config.own_sizes is not None and int(of_kv[1]) < config.num_layers:
        return config.own_sizes[int(of_kv[1])].kv_before > 0
    if re.search(r"\.rotary_emb\.inv_freq$|\.self_attn\.(masked_)?bias$", name):
        return True
    return config.tied_embeddings and name == "lm_head.weight"


def is_elsewhere(name: str, shard: Shard) -> bool:
    """Whether the tensor belongs to another stage, or is an expert that another rank has."""
    expert, experts = re.search(r"\.mlp\.experts\.(\d+)\.", name), shard.config.experts
    if expert is not None and experts is not None:
        number = int(expert[1])
        if number < experts.count and number not in experts.own:
            return True
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    if layer is not None:
        index = int(layer[1])
        return index < shard.whole.num_layers + shard.whole.extra_layers and index not in shard.layers
    if name == "model.embed_tokens.weight":
        return not shard.config.has_embedding
    if name.startswith(("model.embed_positions.", "model.embed_tokens_per_layer.", "model.per_layer_")):
        return not shard.config.is_first
    return name.startswith(("model.norm.", "lm_head.")) and not shard.config.is_last
