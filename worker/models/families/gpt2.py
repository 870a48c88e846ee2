"""GPT-2 and DistilGPT2: positions have an embedding."""

from worker.models.family import Differences, Family, HfConfig, refuse_other_than


def gpt2(hf: HfConfig) -> Differences:
    refuse_other_than(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return {
        **dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "layer_norms"), True),
        "norm_eps": hf.layer_norm_epsilon,
        "intermediate_size": hf.n_inner or 4 * hf.hidden_size,
        "learned_positions": hf.max_position_embeddings,
        "num_kv_heads": hf.num_attention_heads,
        "gated_mlps": False,
    }


FIELDS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
FAMILIES = {
    "gpt2": Family(
        gpt2,
        fields=FIELDS,
        names={
            "transformer": "model",  # some files lack it
            "wte": "embed_tokens",
            "wpe": "embed_positions",
            "h": "layers",
            "ln_1": "input_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "ln_2": "post_attention_layernorm",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
            "ln_f": "norm",
        },
        ignored=("attn.bias", "attn.masked_bias"),
        fused_qkv="one after the other",
        turned=("c_attn.weight", "c_proj.weight", "c_fc.weight"),
    )
}
