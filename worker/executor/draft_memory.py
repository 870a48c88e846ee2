"""Memory of a draft model, which the KV cache of the model that it drafts for leaves free."""

from pathlib import Path
from typing import NamedTuple

import torch

from worker.executor.kv_cache import GRAPHS_BYTES, token_bytes
from worker.models.config import decoder_config, read_config
from worker.models.layer_specs import roofline_model


class DraftBytes(NamedTuple):
    """Memory of a draft model next to the model that it drafts for.

    | field | meaning |
    | --- | --- |
    | `per_token` | bytes of a token's keys and values |
    | `fixed` | bytes of all else: weights; on a GPU also logits and CUDA graphs |
    """

    per_token: int = 0
    fixed: int = 0

    @classmethod
    def of(cls, model: Path, dtype: torch.dtype, device: torch.device, max_running: int) -> "DraftBytes":
        """Returns the memory of the model in a folder, for as many sequences at once."""
        config = decoder_config(read_config(model))
        sizes = roofline_model("", config)
        parameters = sizes.all_weights + (1 if config.tied_embeddings else 2) * sizes.head_weights
        fixed = int(parameters * dtype.itemsize)
        if device.type == "cuda":
            fixed += 4 * max_running * config.vocab_size + GRAPHS_BYTES
        return cls(token_bytes(config, dtype), fixed)
