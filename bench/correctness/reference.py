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


@dataclass(frozen=True)
class Small:
    """The sizes of a model, and the tensor-parallel degrees that can split it."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    tp: tuple[int, ...]


MODELS: dict[str, Small] = {
    "llama": Small(8, 512, 1536, 8, 4, 64, 8192, False, (1, 2, 4)),
    "smollm2": Small(30, 576, 1536, 9, 3, 64, 49152, True, (1, 2, 4)),
    "tiny": Small(2, 64, 128, 4, 2, 16, 512, False, (1, 2)),
}


def make(name: str, folder: Path) -> Path:
    """Writes the random model `name` to a Hugging Face folder, in float32 and without an end token. Returns the
    folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = MODELS[name]
    config = LlamaConfig(
        num_hidden_layers=small.layers,
        hidden_size=small.hidden,
        intermediate_size=small.inner,
        num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads,
        head_dim=small.head_dim,
        vocab_size=small.vocabulary,
        tie_word_embeddings=small.tied,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        dtype="float32",
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    model = model.float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _randomise(key, parameter)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    last = small.vocabulary - 1
    dummy_models.tokenizer(small.vocabulary, (last - 1, last)).save(str(folder / "tokenizer.json"))
    return folder


def _randomise(name: str, parameter: torch.Tensor) -> None:
    if "norm" in name:
        parameter.normal_(1.0, 0.2)
    elif "embed_tokens" in name or "lm_head" in name:
        parameter.normal_(0.0, LOGIT_SPREAD * parameter.shape[1] ** -0.5)
    else:
        gain = QUERY_KEY_GAIN if "q_proj" in name or "k_proj" in name else 1.0
        parameter.normal_(0.0, gain * parameter.shape[1] ** -0.5)


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
        from transformers import AutoModelForCausalLM

        self.device = device
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model.to(device).eval()

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """NEW_TOKENS greedy output tokens for each prompt, computed in one batch, padded on the left."""
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
