"""gpt-oss: sinks, and experts with biases."""

from kernels.experts.choice import Routing
from kernels.experts.mxfp4_weight import GROUP
from kernels.ops.activation import ClampedSwiGLU
from worker.models.experts import ExpertsConfig
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import expert_count


def gpt_oss(hf: HfConfig) -> Differences:
    experts = ExpertsConfig(
        expert_count(hf),
        hf.intermediate_size,
        Routing(hf.num_experts_per_tok),
        (True,) * hf.num_hidden_layers,
        has_product_biases=True,
        # Published configurations, and older versions of transformers, lack alpha.
        activation=ClampedSwiGLU(hf.swiglu_limit, getattr(hf, "swiglu_alpha", 1.702)),
        unit=GROUP,
        in_mxfp4=(getattr(hf, "quantization_config", None) or {}).get("quant_method") == "mxfp4",
    )
    return {"qkv_bias": hf.attention_bias, "out_bias": hf.attention_bias, "has_sinks": True, "experts": experts}


FAMILIES = {"gpt_oss": Family(gpt_oss, names={"mlp.router": "mlp.gate"}, in_turns=True)}
