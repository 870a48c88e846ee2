"""What a replica cannot do, said so that whoever hears of it can act on it."""

from collections.abc import Iterable

from worker.messages import Failure, Generate


def refusal(request: Generate, *, vocab_size: int, context_length: int, kv_tokens: int) -> Failure | None:
    """Why a replica with these limits (in tokens) cannot run `request`; None when it can."""
    num_prompt = len(request.prompt_ids)
    if num_prompt == 0:
        return Failure("invalid", "the prompt is empty: send at least one token", "prompt")
    if request.sampling.max_tokens < 1:
        return Failure("invalid", "max_tokens must be at least 1", "max_tokens")
    if num_prompt + 1 > context_length:
        message = f"the prompt has {num_prompt} tokens and the context length is {context_length}"
        return Failure("invalid", f"{message}: shorten it to at most {context_length - 1}", "prompt")
    if num_prompt + 1 > kv_tokens:
        message = f"the prompt has {num_prompt} tokens and this replica's KV cache holds {kv_tokens}"
        return Failure("invalid", f"{message}: shorten it, or start the replica with more kv_tokens", "prompt")
    # On a GPU an index out of range kills the device, and with it everybody's requests.
    ids: list[tuple[str, Iterable[int]]] = [
        ("prompt", request.prompt_ids),
        ("prompt", request.output_ids),
        ("stop_token_ids", request.sampling.stop_token_ids),
        ("logit_bias", request.sampling.logit_bias),
    ]
    for param, values in ids:
        if min(values, default=0) < 0 or max(values, default=0) >= vocab_size:
            message = f"{param} has a token id outside the vocabulary: ids are 0 to {vocab_size - 1}"
            return Failure("invalid", message, param)
    return None


def in_one_line(error: BaseException, most: int = 200) -> str:
    """An error and what it says, up to `most` characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:most]}"
