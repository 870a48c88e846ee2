"""Log probabilities of tokens under the model's own distribution: computed on the device, read later."""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.host_device import all_to_device, to_host
from worker.messages import TokenLogprobs

_ROWS = 128  # rows of logits that are processed at a time


class PendingLogprobs:
    """Log probabilities of some rows, on their way to the host."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor, top: Sequence[int], ranked: bool = False) -> None:
        """Row i of `logits` [n, vocab] is the distribution that `token_ids[i]` (int64[n], on the same device) came
        from. Besides that token, the `top[i]` likeliest are reported. `ranked`: so is the token's rank."""
        self._top = top
        k = min(max(top, default=0), logits.shape[1])
        self._parts = []
        for start in range(0, len(top), _ROWS):
            ids = token_ids[start : start + _ROWS, None]
            logprobs = torch.log_softmax(logits[start : start + _ROWS], dim=1, dtype=torch.float32)
            best = torch.topk(logprobs, k, dim=1)
            own = logprobs.gather(1, ids)
            tensors = [ids[:, 0], own[:, 0], best.indices, best.values]
            tensors += [(logprobs > own).sum(dim=1) + 1] if ranked else []
            self._parts.append([to_host(tensor) for tensor in tensors])
        self._event = None
        if logits.device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def result(self) -> list[TokenLogprobs]:
        """Log probabilities for each row. Waits for the device."""
        if self._event is not None:
            self._event.synchronize()
        rows = [row for part in self._parts for row in zip(*(tensor.tolist() for tensor in part), strict=True)]
        return [
            TokenLogprobs(token_id, logprob, list(zip(ids[:k], values[:k], strict=True)), *rank)
            for k, (token_id, logprob, ids, values, *rank) in zip(self._top, rows, strict=True)
        ]


def prompt_logprobs(logits: torch.Tensor, token_ids: np.ndarray, k: int) -> PendingLogprobs:
    """Log probabilities of given tokens, integers [n], each with its rank and the `k` likeliest. Row i of `logits`
    [n, vocab] is the distribution that `token_ids[i]` came from."""
    (ids,) = all_to_device([token_ids.astype(np.int64)], logits.device)
    return PendingLogprobs(logits, ids, [k] * len(token_ids), ranked=True)
