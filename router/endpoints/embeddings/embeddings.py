"""Embeddings of texts: `POST /v1/embeddings`. Each input is a sequence that generates nothing."""

import base64
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from router.generation import WholeFormat
from router.prepare.pooling import Pooling
from router.prepare.prepared_request import Choice, PreparedRequest
from router.prepare.prompts import Prompt, context_room, separate_prompts, tokenized_prompt
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.text.truncation import Truncation
from router.wire.errors import invalid
from router.wire.requests import EmbeddingsRequest
from router.wire.responses import Embedding, Embeddings, PromptUsage, Usage
from worker.messages import SamplingParams


@dataclass(frozen=True)
class PreparedEmbeddings:
    """A request for embeddings, ready to run. `dimensions`: how many numbers of each embedding are kept; None for
    all."""

    request: PreparedRequest
    pooling: Pooling
    dimensions: int | None
    is_base64: bool


def prepare_embeddings(
    request: EmbeddingsRequest,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    pooling: Pooling,
    arrived: float,
) -> PreparedEmbeddings:
    """Prepares a request for embeddings: tokenises its inputs. Slow: run it in a thread. Raises ApiError."""
    if request.dimensions is not None and pooling.size is not None and request.dimensions > pooling.size:
        raise invalid(
            f"'dimensions' is {request.dimensions}; the model's embeddings have {pooling.size}.",
            "dimensions",
            "invalid_value",
        )
    truncation = Truncation.asked(request, "right")
    inputs = separate_prompts(request.input, "input")
    if len(inputs) > max_sequences:
        raise invalid(f"There are {len(inputs)} inputs; the limit is {max_sequences} in one request.", "input")
    token_ids = pooled_prompts(inputs, tokenizer, context_length, truncation, "input")
    sampling = pooled(pooling)
    sequences = [Choice(index, Prompt(ids), sampling, True) for index, ids in enumerate(token_ids)]
    prompt_count = sum(len(sequence.prompt.token_ids) for sequence in sequences)
    prepared = without_text("embd-", sequences, prompt_count, "input", arrived)
    return PreparedEmbeddings(prepared, pooling, request.dimensions, request.encoding_format == "base64")


def pooled(pooling: Pooling) -> SamplingParams:
    """The parameters of a sequence whose embedding is wanted."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, pooling=pooling.method)


def pooled_prompts(
    entries: Sequence[str | list[int]],
    tokenizer: Tokenizer,
    context_length: int,
    truncation: Truncation | None,
    param: str,
) -> list[list[int]]:
    """The tokens of each input, which are not too many, or cut, and not none. Raises ApiError about `param`, or about
    the entry of it that is at fault."""
    made = []
    for index, entry in enumerate(entries):
        name = param if len(entries) == 1 else f"{param}[{index}]"
        prompt = tokenized_prompt(entry, tokenizer, context_length, truncation, context_length - 1, name)
        context_room(prompt.token_ids, context_length, name)
        made.append(prompt.token_ids)
    return made


def without_text(
    prefix: str, sequences: list[Choice], prompt_count: int, param: str, arrived: float
) -> PreparedRequest:
    """A request that returns no text. `prompt_count`: tokens of its prompts. `param`: the client's name for these."""
    return PreparedRequest(
        id=prefix + uuid.uuid4().hex,
        sequences=sequences,
        prompt_tokens=prompt_count,
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        priority=0,
        include_usage=False,
        usage_so_far=False,
        names_tier=False,
        prompt_param=param,
        grammar_param=None,
        discard=True,
        arrived=arrived,
    )


class EmbeddingsFormat(WholeFormat):
    """Writes embeddings as one JSON object."""

    def __init__(self, prepared: PreparedEmbeddings, model: str) -> None:
        self._prepared = prepared
        self._model = model

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        """The embeddings of all inputs."""
        data = [Embedding(index=index, embedding=self._written(answer)) for index, answer in enumerate(answers)]
        tokens = usage.prompt_tokens
        return msgspec.json.encode(Embeddings(data=data, model=self._model, usage=PromptUsage(tokens, tokens)))

    def _written(self, answer: Piece) -> list[float] | str:
        vector = self._prepared.pooling.vector(answer.embedding, self._prepared.dimensions)
        if self._prepared.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(value) for value in vector.tolist()]
