"""Llama and all that have its architecture, and those that differ from it in a field."""

from worker.models.family import Family, HfConfig, RopeRules


def layers_with_rope(hf: HfConfig) -> RopeRules:
    """Layers rotate or do not as `no_rope_layers` says, which has 1 where they do."""
    return RopeRules(layers={index: bool(has_rope) for index, has_rope in enumerate(hf.no_rope_layers)})


FAMILIES = {
    **dict.fromkeys(("llama", "internlm3", "iquestcoder"), Family()),
    "arcee": Family(lambda hf: {"gated_mlps": False}),
    "cwm": Family(),
    "jais2": Family(lambda hf: {"norm_eps": hf.layer_norm_eps, "layer_norms": True, "gated_mlps": False}),
    "seed_oss": Family(lambda hf: {"out_bias": hf.attention_out_bias}),
    "smollm3": Family(lambda hf: {"rope_rules": layers_with_rope(hf)}),
}
