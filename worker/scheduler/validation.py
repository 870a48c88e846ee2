"""Refusals of requests that a replica cannot run, with messages that tell the client what to change."""

import math
from collections.abc import Iterable, Sequence

from worker.messages import Failure, Generate

MAX_RETRY_S = 60.0  # the load further ahead is unknown


def overloaded(waiting: int, starts_s: Sequence[float], now_s: float) -> Failure:
    """The refusal of a request because `waiting` requests wait already. The client is to retry when those have probably
    started, by the rate of the latest starts (`starts_s`, their times): after 1 to 60 s."""
    each_s = (now_s - starts_s[0]) / len(starts_s) if starts_s else 0.0
    retry_after_s = min(MAX_RETRY_S, max(1.0, waiting * each_s))
    message = f"{waiting} requests are waiting already: try again in {retry_after_s:.0f} s"
    return Failure("overloaded", message, retry_after_s=retry_after_s)


def refusal(
    request: Generate, *, vocab_size: int, context_length: int, kv_tokens: int, max_loras: int = 0
) -> Failure | None:
    """The reason why a replica with these limits (in tokens) cannot run `request`; None if it can."""
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        return Failure("invalid", "the prompt is empty: send at least one token", "prompt")
    if request.sampling.max_tokens < 1:
        return Failure("invalid", "max_tokens must be at least 1", "max_tokens")
    if not 0 < request.weight < math.inf:
        return Failure("invalid", "the weight of a client must be above 0 and finite", "weight")
    if num_prompt + 1 > context_length:
        message = f"the prompt has {num_prompt} tokens and the context length is {context_length}"
        return Failure("invalid", f"{message}: shorten it to at most {context_length - 1}", "prompt")
    if num_prompt + 1 > kv_tokens:
        message = f"the prompt has {num_prompt} tokens and this replica's KV cache holds {kv_tokens}"
        return Failure("invalid", f"{message}: shorten it, or start the replica with more kv_tokens", "prompt")
    if not 0 <= request.sampling.prompt_logprobs_start < num_prompt:
        message = f"prompt_logprobs_start must be 0 to {num_prompt - 1}, a position of the prompt"
        return Failure("invalid", message, "prompt_logprobs_start")
    if request.sampling.pooling is not None and (failure := _pooling_refusal(request)) is not None:
        return failure
    if request.adapter is not None and not max_loras:
        message = f"this replica has no room for the adapter {request.adapter.name!r}: max_loras is 0"
        return Failure("invalid", message, "model")
    # On a GPU, an index out of range makes the device unusable, and so ends all requests.
    ids: list[tuple[str, Iterable[int]]] = [
        ("prompt", request.prompt_ids),
        ("prompt", request.output_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
        ("allowed_token_ids", request.sampling.allowed_token_ids),
        *(("bad_words", word) for word in request.sampling.bad_words),
    ]
    for param, values in ids:
        if min(values, default=0) < 0 or max(values, default=0) >= vocab_size:
            message = f"{param} has a token id outside the vocabulary: ids are 0 to {vocab_size - 1}"
            return Failure("invalid", message, param)
    return None


def _pooling_refusal(request: Generate) -> Failure | None:
    sampling = request.sampling
    if sampling.max_tokens != 1 or request.output_ids:
        return Failure("invalid", "a request with pooling has no output: max_tokens must be 1", "max_tokens")
    if sampling.prompt_logprobs is not None:
        return Failure("invalid", "prompt_logprobs does not go with pooling", "prompt_logprobs")
    if sampling.grammar is not None:
        return Failure("invalid", "a grammar does not go with pooling", "grammar")
    return None
