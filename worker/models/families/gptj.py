"""GPT-J: attention and MLP side by side, through one norm; a part of each head is rotated, in neighbouring pairs."""

from kernels.ops.rotary import Rope
from worker.models.families.gpt2 import FIELDS
from worker.models.family import Differences, Family, HfConfig


def gptj(hf: HfConfig) -> Differences:
    head_dim = hf.hidden_size // hf.num_attention_heads
    rope = Rope(head_dim, 1e4, rotated=hf.rotary_dim, is_interleaved=True)
    return {
        **dict.fromkeys(("mlp_bias", "head_bias", "layer_norms"), True),
        "norm_eps": hf.layer_norm_epsilon,
        "parallel": "one norm",
        "head_dim": head_dim,
        "num_kv_heads": hf.num_attention_heads,
        "intermediate_size": hf.n_inner or 4 * hf.hidden_size,
        "gated_mlps": False,
        "ropes": (rope,) * hf.num_hidden_layers,  # the configuration has no `rope_parameters`
    }


FAMILIES = {
    "gptj": Family(
        gptj,
        fields=FIELDS,
        names={
            "transformer": "model",
            "wte": "embed_tokens",
            "h": "layers",
            "ln_1": "input_layernorm",
            "attn": "self_attn",
            "attn.out_proj": "self_attn.o_proj",
            "fc_in": "up_proj",
            "fc_out": "down_proj",
            "ln_f": "norm",
        },
        ignored=("self_attn.bias", "self_attn.masked_bias"),
    )
}
