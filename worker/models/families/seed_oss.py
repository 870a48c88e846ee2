"""Seed-OSS: biases."""

from worker.models.family import Differences, Family, HfConfig


def seed_oss(hf: HfConfig) -> Differences:
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_out_bias, "mlp_bias": hf.mlp_bias}


FAMILIES = {"seed_oss": Family(seed_oss)}
