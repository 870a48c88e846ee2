"""GPT-NeoX and Pythia: attention and MLP side by side, through a norm each."""

from worker.models.family import Differences, Family, HfConfig, RopeRules


def gpt_neox(hf: HfConfig) -> Differences:
    return {
        "norm_eps": hf.layer_norm_eps,
        "layer_norms": True,
        "parallel": "two norms" if hf.use_parallel_residual else None,
        "num_kv_heads": hf.num_attention_heads,
        "mlp_bias": True,
        "gated_mlps": False,
        "rope_rules": RopeRules(is_partial=True),
    }


_NAMES = {
    "gpt_neox": "model",
    "embed_in": "embed_tokens",
    "attention.query_key_value": "self_attn.qkv_proj",
    "attention.dense": "self_attn.o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
    "final_layer_norm": "norm",
    "embed_out": "lm_head",
}
_MASKS = ("attention.bias", "attention.masked_bias")
FAMILIES = {"gpt_neox": Family(gpt_neox, names=_NAMES, ignored=_MASKS, fused_qkv="by head")}
