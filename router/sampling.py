"""From a request's fields to `SamplingParams`: defaults, limits that depend on the model, seeds, grammars."""

import hashlib
import json
import secrets

from router.errors import invalid
from router.requests import GenerationRequest, JsonObjectFormat, JsonSchemaFormat
from worker.messages import Grammar, SamplingParams

_SEED_BITS = 63
# Below this, dividing logits by the temperature overflows float32, and the choice is greedy anyway.
_COLDEST = 1e-4


def sampling_params(
    request: GenerationRequest,
    vocab_size: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Everything but `max_tokens` and `seed`, which differ from sequence to sequence (`max_tokens` is 1 here)."""
    temperature = 1.0 if request.temperature is None else request.temperature
    top_k, top_p = max(request.top_k or 0, 0), 1.0 if request.top_p is None else request.top_p
    if top_p == 0:  # the smallest set of tokens that has at least no probability is not empty
        top_k, top_p = 1, 1.0
    for token_id in request.stop_token_ids or ():
        _check_token(token_id, vocab_size, "stop_token_ids")
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
        grammar=_grammar(request),
    )


def is_greedy(temperature: float) -> bool:
    """Whether it stands for always taking the likeliest token."""
    return temperature < _COLDEST


def sequence_seed(seed: int | None, choice: int) -> int:
    """The seed of one sequence, in 0 to 2^63 - 1. The first choice has the request's own seed, so that it is the text
    of the same request with `n` 1; the others have seeds that follow from it. None draws one: it is the router that
    draws, so that a sequence can go on with the same seed on another replica."""
    if seed is None:
        return secrets.randbits(_SEED_BITS)
    if choice:
        mixed = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(mixed, "big")
    return seed & ((1 << _SEED_BITS) - 1)


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises ApiError if a token id is none of the model's."""
    if token_ids:
        _check_token(max(token_ids), vocab_size, param)


def _check_token(token_id: int, vocab_size: int, param: str) -> None:
    if token_id >= vocab_size:
        raise invalid(f"{param!r} has token id {token_id}; the model's go to {vocab_size - 1}.", param)


def _logit_bias(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    result = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise invalid(f"'logit_bias' has the key {key[:40]!r}: keys are token ids, such as \"42\".", "logit_bias")
        _check_token(int(key), vocab_size, "logit_bias")
        result[int(key)] = bias
    return result


def _grammar(request: GenerationRequest) -> Grammar | None:
    asked: list[tuple[str, Grammar]] = []
    match request.response_format:
        case JsonObjectFormat():
            asked.append(("response_format", Grammar("json_object")))
        case JsonSchemaFormat(json_schema=json_schema):
            asked.append(("response_format", Grammar("json_schema", json.dumps(json_schema.schema))))
    if request.regex is not None:
        asked.append(("regex", Grammar("regex", request.regex)))
    if request.choice is not None:
        asked.append(("choice", Grammar("choice", json.dumps(request.choice))))
    if request.ebnf is not None:
        asked.append(("ebnf", Grammar("ebnf", request.ebnf)))
    if len(asked) > 1:
        names = " and ".join(repr(name) for name, _ in asked)
        raise invalid(f"{names} exclude each other: send one of them.", asked[1][0])
    return asked[0][1] if asked else None
