"""Scores of pairs of a query and a document: a reranker's, or the cosine between two embeddings.

A reranker is asked by Qwen3-Reranker's published prompt whether the document answers the query. The score is the
probability of `yes` as a part of that of `yes` and `no` (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B). Each pair
has two sequences, with one answer each after the same prompt. The second one finds all of the prompt in the cache.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

from router.endpoints.embeddings.embeddings import pooled, pooled_prompts, without_text
from router.prepare.pooling import Pooling, normalised
from router.prepare.prepared_request import Choice, PreparedRequest
from router.prepare.prompts import Prompt, context_room, encode_inside
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.text.truncation import Truncation
from router.wire.responses import finite
from worker.messages import SamplingParams

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
ANSWERS = ("yes", "no")


@dataclass(frozen=True)
class Texts:
    """The pairs to score, and the client's names for their two sides. There are as many documents as pairs. `queries`
    has one for each document, or a single one for all. `truncation`: what of texts that are too long may be cut; of a
    reranker's pair, that is the document."""

    queries: list[str]
    documents: list[str]
    query_param: str
    document_param: str
    instruction: str | None = None
    truncation: Truncation | None = None

    def query_of(self, document: int) -> int:
        """Index of the query of a document."""
        return document if len(self.queries) > 1 else 0


@dataclass(frozen=True)
class PreparedScoring:
    """Pairs that are ready to run. With embeddings, the sequences are the queries, then the documents; with a reranker,
    the answers to each pair."""

    request: PreparedRequest
    texts: Texts
    pooling: Pooling

    def scores(self, answers: list[Piece]) -> list[float]:
        """The score of each pair. `answers`: by sequence."""
        if self.pooling.is_reranker:
            logprobs = [_logprob(answer) for answer in answers]
            return [_sigmoid(yes - no) for yes, no in zip(logprobs[::2], logprobs[1::2], strict=True)]
        vectors = [normalised(self.pooling.vector(answer.embedding)).astype("f8") for answer in answers]
        first = len(self.texts.queries)
        return [float(vectors[self.texts.query_of(number)] @ vector) for number, vector in enumerate(vectors[first:])]


def prepare_scoring(
    prefix: str, texts: Texts, tokenizer: Tokenizer, context_length: int, pooling: Pooling, arrived: float
) -> PreparedScoring:
    """Prepares the sequences for scores: tokenises queries and documents. Slow: run it in a thread. Raises ApiError."""
    make = _answers if pooling.is_reranker else _embeddings
    sequences = make(texts, tokenizer, context_length, pooling)
    count = sum(len(sequence.prompt.token_ids) for sequence in sequences if sequence.first)
    prepared = without_text(prefix, sequences, count, texts.document_param, arrived)
    return PreparedScoring(prepared, texts, pooling)


def _embeddings(texts: Texts, tokenizer: Tokenizer, context_length: int, pooling: Pooling) -> list[Choice]:
    encode = partial(pooled_prompts, tokenizer=tokenizer, context_length=context_length, truncation=texts.truncation)
    sampling, given = pooled(pooling), texts.instruction
    queries = texts.queries if given is None else [f"Instruct: {given}\nQuery:{query}" for query in texts.queries]
    token_ids = encode(queries, param=texts.query_param) + encode(texts.documents, param=texts.document_param)
    return [Choice(index, Prompt(ids), sampling, True) for index, ids in enumerate(token_ids)]


def _answers(texts: Texts, tokenizer: Tokenizer, context_length: int, pooling: Pooling) -> list[Choice]:
    before, after = tokenizer.encode(BEFORE, False), tokenizer.encode(AFTER, False)
    answers = [tokenizer.encode(answer, False) for answer in ANSWERS]
    longest = max(map(len, answers))
    instruction = INSTRUCTION if texts.instruction is None else texts.instruction
    sequences: list[Choice] = []
    for number, document in enumerate(texts.documents):
        query = texts.queries[texts.query_of(number)]
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        pair = _pair(asked, document, texts, tokenizer, context_length, len(before) + len(after), longest)
        prompt = before + pair + after
        for answer in answers:
            context_room(prompt + answer, context_length, texts.document_param)
            sampling = SamplingParams(
                max_tokens=1,
                temperature=0.0,
                ignore_eos=True,
                seed=0,
                prompt_logprobs=0,
                prompt_logprobs_start=len(prompt),
            )
            sequences.append(Choice(len(sequences), Prompt(prompt + answer), sampling, answer is answers[0]))
    return sequences


def _pair(
    asked: str, document: str, texts: Texts, tokenizer: Tokenizer, context_length: int, around: int, answer: int
) -> list[int]:
    """The tokens of a query and a document. What does not fit, with `around` tokens of the prompt and `answer` ones
    after it, is cut off the document where the client allows it. Raises ApiError."""
    cut, param = texts.truncation, texts.document_param
    if cut is None:
        return encode_inside(asked + document, tokenizer, context_length, param)
    room = context_length - around - answer - 1
    cut = replace(cut, most=None if cut.most is None else max(0, cut.most - around))
    begin = encode_inside(asked, tokenizer, context_length, texts.query_param)
    whole = encode_inside(asked + cut.part(document, room), tokenizer, context_length, param)
    if len(cut.cut(whole, room)) == len(whole):
        return whole
    left = replace(cut, most=None if cut.most is None else max(0, cut.most - len(begin)))
    document_ids = encode_inside(cut.part(document, room), tokenizer, context_length, param)
    return begin + left.cut(document_ids, max(0, room - len(begin)))


def _logprob(answer: Piece) -> float:
    return sum(finite(token.logprobs.logprob) for token in answer.tokens if token.logprobs is not None)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))
