"""StarCoder2: MLPs without a gate, norms that subtract the mean, windows."""

from worker.models.families.mistral import mistral
from worker.models.family import Differences, Family, HfConfig


def starcoder2(hf: HfConfig) -> Differences:
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), hf.use_bias)
    return mistral(hf) | biases | {"norm_eps": hf.norm_epsilon, "layer_norms": True, "gated_mlps": False}


FAMILIES = {"starcoder2": Family(starcoder2, names={"c_fc": "up_proj", "c_proj": "down_proj"})}
