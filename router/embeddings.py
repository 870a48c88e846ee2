"""Embeddings of texts: `POST /v1/embeddings`. Each input is a sequence that generates nothing."""

import base64
import uuid
from dataclasses import dataclass
from functools import partial

import msgspec

from router.errors import invalid
from router.generation import WholeFormat
from router.output_text import Piece
from router.pooling import Pooling
from router.prepared_request import Choice, PreparedRequest
from router.programs import BranchText
from router.prompts import Prompt, context_room, encode_prompt, separate_prompts
from router.requests import EmbeddingsRequest
from router.responses import Embedding, Embeddings, PromptUsage, Usage
from router.sampling import check_token_ids
from router.tokenizer import Tokenizer
from worker.messages import SamplingParams

_BEGINS = BranchText()  # what an input follows: nothing


@dataclass(frozen=True)
class EmbeddingsJob:
    """A request for embeddings, ready to run. `dimensions`: how many numbers of each embedding are kept; None for
    all."""

    prepared: PreparedRequest
    pooling: Pooling
    dimensions: int | None
    is_base64: bool


def embeddings_job(
    request: EmbeddingsRequest,
    tokenizer: Tokenizer,
    context_length: int,
    max_sequences: int,
    pooling: Pooling,
    arrived: float,
) -> EmbeddingsJob:
    """Prepares a request for embeddings: tokenises its inputs. Slow: run it in a thread. Raises ApiError."""
    if request.dimensions is not None and pooling.size is not None and request.dimensions > pooling.size:
        raise invalid(
            f"'dimensions' is {request.dimensions}; the model's embeddings have {pooling.size}.",
            "dimensions",
            "invalid_value",
        )
    inputs = separate_prompts(request.input, "input")
    if len(inputs) > max_sequences:
        raise invalid(f"There are {len(inputs)} inputs; the limit is {max_sequences} in one request.", "input")
    encode = partial(prompt_tokens, tokenizer=tokenizer, context_length=context_length, param="input")
    sampling = pooled(pooling)
    sequences = [Choice(index, Prompt(encode(entry)), sampling, True) for index, entry in enumerate(inputs)]
    prompt_count = sum(len(sequence.prompt.token_ids) for sequence in sequences)
    prepared = without_text("embd-", sequences, prompt_count, "input", arrived)
    return EmbeddingsJob(prepared, pooling, request.dimensions, request.encoding_format == "base64")


def pooled(pooling: Pooling) -> SamplingParams:
    """The parameters of a sequence whose embedding is wanted."""
    return SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, pooling=pooling.method)


def prompt_tokens(entry: str | list[int], tokenizer: Tokenizer, context_length: int, param: str) -> list[int]:
    """The tokens of an input, which are not too many and not none. Raises ApiError about `param`."""
    if isinstance(entry, list):
        check_token_ids(entry, tokenizer.vocab_size, param)
    token_ids = entry if isinstance(entry, list) else encode_prompt(entry, tokenizer, context_length, _BEGINS, param)
    context_room(token_ids, context_length, param)
    return token_ids


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

    def __init__(self, job: EmbeddingsJob, model: str) -> None:
        self._job = job
        self._model = model

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        """The embeddings of all inputs."""
        data = [Embedding(index=index, embedding=self._written(answer)) for index, answer in enumerate(answers)]
        tokens = usage.prompt_tokens
        return msgspec.json.encode(Embeddings(data=data, model=self._model, usage=PromptUsage(tokens, tokens)))

    def _written(self, answer: Piece) -> list[float] | str:
        vector = self._job.pooling.vector(answer.embedding, self._job.dimensions)
        if self._job.is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return [float(value) for value in vector.tolist()]
