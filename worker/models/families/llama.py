"""Llama, and all that have its architecture."""

from worker.models.family import Differences, Family, HfConfig


def llama(hf: HfConfig) -> Differences:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


FAMILIES = dict.fromkeys(("llama", "internlm3", "iquestcoder"), Family(llama))
