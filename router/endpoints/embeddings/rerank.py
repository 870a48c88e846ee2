"""Documents in the order of their relevance to a query (`POST /v1/rerank`), and scores of pairs of texts
(`POST /v1/score`)."""

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET

from router.endpoints.embeddings.scoring import PreparedScoring, Texts
from router.generation import WholeFormat
from router.text.output_text import Piece
from router.text.truncation import Truncation
from router.wire.errors import invalid
from router.wire.requests import RerankRequest, ScoreRequest
from router.wire.responses import PromptUsage, RankedDocument, Reranking, Score, Scores, SourceDocument, Usage

Pairs = TypeVar("Pairs", RerankRequest, ScoreRequest)


def rerank_texts(request: RerankRequest, max_documents: int) -> Texts:
    """The pairs of a request for a ranking. Raises ApiError."""
    documents = [entry if isinstance(entry, str) else entry.text for entry in request.documents]
    _check_number(len(documents), max_documents, "documents")
    truncation = Truncation.asked(request, "right")
    return Texts([request.query], documents, "query", "documents", request.instruction, truncation)


def score_texts(request: ScoreRequest, max_documents: int) -> Texts:
    """The pairs of a request for scores. Raises ApiError."""
    sides = {name: getattr(request, name) for name in ("text_1", "text_2", "queries", "documents")}
    given = [name for name, side in sides.items() if side is not None]
    if given not in (["text_1", "text_2"], ["queries", "documents"]):
        param = given[0] if given else "text_1"
        raise invalid("Send either 'text_1' and 'text_2', or 'queries' and 'documents'.", param)
    first, second = given
    queries, documents = ([side] if isinstance(side, str) else side for side in (sides[first], sides[second]))
    _check_number(len(documents), max_documents, second)
    if len(queries) not in (1, len(documents)):
        message = f"{first!r} has {len(queries)} texts and {second!r} has {len(documents)}"
        raise invalid(f"{message}: the first must have one, or as many as the second.", first)
    return Texts(queries, documents, first, second, request.instruction, Truncation.asked(request, "right"))


def _check_number(documents: int, most: int, param: str) -> None:
    if documents > most:
        raise invalid(f"There are {documents} texts in {param!r}; the limit is {most} in one request.", param)


class PairsFormat(WholeFormat, Generic[Pairs]):
    """Writes the answer to a request for scores of pairs as one JSON object."""

    def __init__(self, prepared: PreparedScoring, request: Pairs, model: str) -> None:
        self._prepared = prepared
        self._request: Pairs = request
        self._model = model


class RerankFormat(PairsFormat[RerankRequest]):
    """A ranking."""

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        """The documents, the most relevant first; equal ones in their own order."""
        scores = self._prepared.scores(answers)
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._request.top_n or None]
        shows = self._request.return_documents is not False
        texts = self._prepared.texts.documents
        results = [
            RankedDocument(
                index=index,
                relevance_score=scores[index],
                document=SourceDocument(texts[index]) if shows else UNSET,
            )
            for index in order
        ]
        return _encoded(Reranking, self._prepared, usage, model=self._model, results=results)


class ScoreFormat(PairsFormat[ScoreRequest]):
    """The scores of pairs."""

    def whole(self, answers: list[Piece], usage: Usage) -> bytes:
        """The scores of all pairs, in their order."""
        data = [Score(index=index, score=score) for index, score in enumerate(self._prepared.scores(answers))]
        created = self._prepared.request.created
        return _encoded(Scores, self._prepared, usage, created=created, model=self._model, data=data)


def _encoded(kind: type[msgspec.Struct], prepared: PreparedScoring, usage: Usage, **fields: Any) -> bytes:
    tokens = usage.prompt_tokens
    return msgspec.json.encode(kind(id=prepared.request.id, usage=PromptUsage(tokens, tokens), **fields))
