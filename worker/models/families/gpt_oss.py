"""gpt-oss: sinks, and experts with biases."""

from kernels.experts.choice import Routing
from kernels.experts.mxfp4_weight import GROUP
from kernels.ops.activation import ClampedSwiGLU
from worker.models.family import Differences, Family, HfConfig
from worker.models.family_experts import experts_of


def gpt_oss(hf: HfConfig) -> Differences:
    experts = experts_of(
        hf,
        Routing(hf.num_experts_per_tok),
        hf.intermediate_size,
        has_product_biases=True,
        # Published configurations, and older versions of transformers, lack alpha.
        activation=ClampedSwiGLU(hf.swiglu_limit, getattr(hf, "swiglu_alpha", 1.702)),
        unit=GROUP,
        in_mxfp4=(getattr(hf, "quantization_config", None) or {}).get("quant_method") == "mxfp4",
    )
    return {"has_sinks": True, "experts": experts}


FAMILIES = {"gpt_oss": Family(gpt_oss, names={"mlp.router": "mlp.gate"}, in_turns=True)}
