"""From a request's fields to `SamplingParams`: defaults, limits that depend on the model, seeds."""

import hashlib
import secrets
from collections.abc import Sequence

from router.text.tokenizer import Tokenizer
from router.wire.errors import invalid
from router.wire.requests import GenerationRequest
from worker.messages import Grammar, SamplingParams

_SEED_BITS = 63
# Below this, dividing logits by the temperature overflows float32, and the choice is greedy anyway.
_MIN_TEMPERATURE = 1e-4


def sampling_params(
    request: GenerationRequest,
    vocab_size: int,
    grammar: Grammar | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """The sampling parameters, without `max_tokens` and `seed`, which differ between sequences (`max_tokens` is 1
    here). `bad_words`: as `bad_word_ids` returns them."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_k, top_p = max(request.top_k or 0, 0), 1.0 if request.top_p is None else request.top_p
    if top_p == 0:  # at least one token stays: the likeliest
        top_k, top_p = 1, 1.0
    for token_id in request.stop_token_ids or ():
        _check_token(token_id, vocab_size, "stop_token_ids")
    check_token_ids(request.allowed_token_ids or [], vocab_size, "allowed_token_ids")
    return SamplingParams(
        max_tokens=1,
        min_tokens=request.min_tokens or 0,
        temperature=0.0 if is_greedy(temperature) else temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(request.logit_bias or {}, vocab_size),
        grammar=grammar,
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        bad_words=bad_words,
    )


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The tokens of words that an answer must not have: of each as it is, and after a space."""
    written = [tokenizer.encode_continuation(text) for word in words for text in (word, f" {word.lstrip()}")]
    return tuple(dict.fromkeys(tuple(token_ids) for token_ids in written if token_ids))


def is_greedy(temperature: float) -> bool:
    """Whether the temperature is so low that the likeliest token is always taken."""
    return temperature < _MIN_TEMPERATURE


def sequence_seed(seed: int | None, choice: int) -> int:
    """The seed of one sequence, in 0 to 2^63 - 1. The first choice has the request's own seed, so its text equals that
    of the same request with `n` 1. The other choices have seeds derived from it. If `seed` is None, a seed is drawn
    here, not on the replica, so that the sequence can be resumed with the same seed on another replica."""
    if seed is None:
        return secrets.randbits(_SEED_BITS)
    if choice:
        mixed = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(mixed, "big")
    return seed & ((1 << _SEED_BITS) - 1)


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError if a token id is not the model's."""
    if token_ids:
        _check_token(max(token_ids), vocab_size, param)


def _check_token(token_id: int, vocab_size: int, param: str) -> None:
    if token_id >= vocab_size:
        raise invalid(f"{param!r} has token id {token_id}; the model's largest is {vocab_size - 1}.", param)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    result = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid(f"'logit_bias' has the key {key[:40]!r}: keys are token ids, such as \"42\".", "logit_bias")
        _check_token(int(key), vocab_size, "logit_bias")
        result[int(key)] = bias
    return result
