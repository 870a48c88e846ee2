"""Reference outputs: small models with random weights, computed by `transformers` on the same device.

The random weights are scaled so that every layer matters, attention is neither uniform nor one-hot, and logits spread
as in a trained model. Then the likeliest token leads by far more than rounding errors, except at about one position in
thousands.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.correctness import families, mxfp4
from bench.replica import dummy_models

NEW_TOKENS = 48
LENGTHS = (
    1,
    2,
    3,
    5,
    7,
    8,
    11,
    15,
    16,
    17,
    24,
    31,
    32,
    33,
    40,
    48,
    57,
    63,
    64,
    65,
    80,
    96,
    111,
    128,
    150,
    200,
    257,
    300,
)
LOGIT_SPREAD = 3.0
QUERY_KEY_GAIN = 1.5
EMBEDDING_SHRINK = 12.0
# Factors of a matrix's weights. A router's likeliest experts get most of the weight, as in a trained model, so that
# little depends on the order of the last that are chosen.
GAINS = {
    "q_proj": QUERY_KEY_GAIN,
    "k_proj": QUERY_KEY_GAIN,
    "qkv_proj": QUERY_KEY_GAIN,
    "experts.down_proj": 0.5,
    "mlp.gate.": 2.0,
    "router": 2.0,
}


@dataclass(frozen=True)
class RandomModel:
    """A model: its `model_type`, its configuration, the tensor-parallel degrees that can split it, and whether its
    experts are written in MXFP4."""

    model_type: str
    config: dict[str, Any]
    tp: tuple[int, ...]
    in_mxfp4: bool = False

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def layers(self) -> int:
        return self.config["num_hidden_layers"]


def _llama(
    layers: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int, tied: bool
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
    }


FAMILIES = families.models(families.SMALL)
MODELS: dict[str, RandomModel] = {
    name: RandomModel(model_type, families.common(families.SMALL) | own, (1, 2))
    for name, (model_type, own) in FAMILIES.items()
} | {
    "gpt_oss_mxfp4": RandomModel(
        "gpt_oss", families.common(families.SMALL) | FAMILIES["gpt_oss"][1], (1, 2), in_mxfp4=True
    ),
    "llama": RandomModel("llama", _llama(8, 512, 1536, 8, 4, 64, 8192, False), (1, 2, 4)),
    "smollm2": RandomModel("llama", _llama(30, 576, 1536, 9, 3, 64, 49152, True), (1, 2, 4)),
    "tiny": RandomModel("llama", _llama(2, 64, 128, 4, 2, 16, 512, False), (1, 2)),
}


def is_known(name: str) -> bool:
    """Whether the installed `transformers` has the architecture of the model `name`."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    model_type = MODELS[name].model_type
    return model_type in CONFIG_MAPPING_NAMES and model_type in known


def make(name: str, folder: Path) -> Path:
    """Writes the random model `name` to a Hugging Face folder, in float32 (or MXFP4) and without an end token. Returns
    the folder."""
    from transformers import AutoConfig

    random_model = MODELS[name]
    config = AutoConfig.for_model(random_model.model_type, **random_model.config, dtype="float32")
    torch.manual_seed(0)
    model = families.model_class(random_model.model_type).from_config(config).float()
    # A family that divides its logits, or does not divide attention's products, has weights that make up for it; so has
    # HyperCLOVA X, which multiplies them.
    scaling = getattr(config, "logits_scaling", 1.0)
    spread = LOGIT_SPREAD * (1 / scaling if random_model.model_type == "hyperclovax" else scaling)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _randomise(key, parameter, spread)
            if random_model.model_type == "gemma4_text" and key.endswith("q_norm.weight"):
                parameter.mul_(QUERY_KEY_GAIN * len(parameter) ** -0.5)
        for key, buffer in model.named_buffers():
            if "e_score_correction_bias" in key or "expert_bias" in key:
                buffer.normal_(0.0, 0.1)
            if "layer_scalar" in key:
                buffer.uniform_(0.6, 1.2)
        if hasattr(model.get_input_embeddings(), "embed_scale"):
            _shrink_embeddings(model)
    model.save_pretrained(folder)
    if random_model.in_mxfp4:
        mxfp4.publish(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    last = random_model.vocabulary - 1
    dummy_models.tokenizer(random_model.vocabulary, (last - 1, last)).save(str(folder / "tokenizer.json"))
    return folder


def _shrink_embeddings(model: Any) -> None:
    """Makes embeddings smaller that are multiplied by a factor and are the head too, and the last norm larger by as
    much. Hidden states would be hardly more than the embedding otherwise, and the likeliest token would be the last."""
    model.get_input_embeddings().weight.div_(EMBEDDING_SHRINK)
    norm = model.model.norm.weight
    offset = 1.0 - norm.mean().round()  # some norms multiply by one more than their weight
    norm.copy_((norm + offset) * EMBEDDING_SHRINK - offset)


def _randomise(name: str, parameter: torch.Tensor, spread: float) -> None:
    """Norms, biases and other vectors stay near the values that they begin training with, which differ by family."""
    if "A_log" in name:
        parameter.normal_(-2.0, 1.0)  # states that remember some ten tokens, and some heads a hundred
    elif "dt_bias" in name:
        parameter.normal_(0.0, 0.5)
    elif parameter.ndim == 1:
        parameter.add_(0.2 * torch.randn_like(parameter))
    elif "lm_head" in name:
        parameter.normal_(0.0, spread * parameter.shape[1] ** -0.5)
    elif "embed_tokens" in name or "embeddings" in name:
        parameter.normal_(0.0, LOGIT_SPREAD * parameter.shape[1] ** -0.5)
    else:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        parameter.normal_(0.0, gain * parameter.shape[-1] ** -0.5)


def prompts(vocabulary: int) -> list[list[int]]:
    """A prompt of each of LENGTHS. Every third prompt begins with the same tokens."""
    rng = random.Random(5)
    shared = [rng.randrange(vocabulary) for _ in range(70)]
    made = []
    for i, length in enumerate(LENGTHS):
        own = [rng.randrange(vocabulary) for _ in range(length)]
        made.append((shared + own)[:length] if i % 3 == 2 else own)
    return made


@dataclass(frozen=True)
class Scored:
    """Scores of a sequence, for every position except the last. CPU tensors `[positions]`.

    | field | meaning |
    | --- | --- |
    | `likeliest` | the likeliest next token, int64 |
    | `margins` | the lead of its logit over the second-likeliest token's, float32 |
    | `logprobs` | the log probability of the actual next token, float32 |
    """

    likeliest: torch.Tensor
    margins: torch.Tensor
    logprobs: torch.Tensor


class Reference:
    """A model as `transformers` runs it."""

    def __init__(self, folder: Path, device: str, dtype: torch.dtype) -> None:
        from transformers import AutoConfig

        self.device = device
        # Eager, since some versions leave out soft caps in other implementations, and say nothing.
        class_ = families.model_class(AutoConfig.from_pretrained(folder).model_type)
        model = class_.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        if dtype == torch.float32:
            model = model.float()  # numbers in MXFP4 stay in bfloat16 in some versions
        self.model = model.to(device).eval()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """NEW_TOKENS greedy output tokens for each prompt."""
        # Llama 4's queries grow with positions, which count padding too. A bias makes padding no zero to a convolution.
        if self.model.config.model_type == "llama4_text" or getattr(self.model.config, "conv_bias", False):
            return [self._generate([prompt])[0] for prompt in prompts]
        return self._generate(prompts)

    def _generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Output tokens computed in one batch, padded on the left."""
        from transformers import GenerationConfig

        greedy = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=self.device)
        own = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self.model.generate(ids, attention_mask=own.to(self.device), generation_config=greedy)
        return out[:, longest:].tolist()

    @torch.inference_mode()
    def score(self, sequence: list[int]) -> Scored:
        """The scores of a sequence of at least two tokens, computed in one pass."""
        ids = torch.tensor([sequence], device=self.device)
        logits = self.model(ids).logits[0, :-1].float()
        best = logits.topk(2, dim=1)
        logprobs = logits.log_softmax(1).gather(1, ids[0, 1:, None])[:, 0]
        return Scored(best.indices[:, 0].cpu(), (best.values[:, 0] - best.values[:, 1]).cpu(), logprobs.cpu())
