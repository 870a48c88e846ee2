"""Gemma 1, 2 and 3."""

from worker.models.family import Differences, Family, HfConfig


def gemma(hf: HfConfig) -> Differences:
    return {"gemma_norms": True, "embedding_scale": hf.hidden_size**0.5}


def gemma2(hf: HfConfig) -> Differences:
    return gemma(hf) | {
        "sandwich_norms": True,
        "attention_scale": hf.query_pre_attn_scalar**-0.5,
        "attention_softcap": hf.attn_logit_softcapping,
        "logit_softcap": hf.final_logit_softcapping,
    }


def gemma3(hf: HfConfig) -> Differences:
    return gemma2(hf) | {"qk_norm": "head"}


FAMILIES = {
    "gemma": Family(gemma),
    "gemma2": Family(gemma2),
    "gemma3_text": Family(gemma3, text_of=("gemma3",), ignored=("vision_tower", "multi_modal_projector")),
}
