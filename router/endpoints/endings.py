"""Facts about the end of a choice, its schema and its prompt, as chat completions and completions tell them."""

from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from router.prepare.prepared_request import PreparedRequest
from router.text.output_text import Piece
from router.text.tokenizer import Tokenizer
from router.wire.responses import PromptLogprob, PromptLogprobs, SchemaReport, finite
from worker.messages import TokenLogprobs


def stopped_by(piece: Piece, prepared: PreparedRequest) -> dict[str, Any]:
    """`stop_reason` and `matched_stop` of a choice that ends with this piece; empty for a piece that ends none."""
    if piece.finish_reason is None:
        return {}
    token_id = piece.stop_token_id
    asked = token_id if token_id in prepared.sequences[0].sampling.stop_token_ids else None
    return {
        "stop_reason": asked if piece.stop is None else piece.stop,
        "matched_stop": token_id if piece.stop is None else piece.stop,
    }


def schema_report(piece: Piece) -> SchemaReport | UnsetType:
    """The report on a choice whose schema is enforced in part, in its last piece."""
    check = piece.check
    if check is None or piece.finish_reason is None:
        return UNSET
    narrowed = check.narrowed or UNSET
    return SchemaReport(check.not_enforced, check.valid, check.violation, piece.sampled_again, narrowed)


def prompt_logprobs(
    answer: Piece, prepared: PreparedRequest, index: int, tokenizer: Tokenizer
) -> PromptLogprobs | UnsetType:
    """`prompt_logprobs` of the prompt of choice number `index`, if the request asks for them. `answer`: the first
    choice of that prompt."""
    if prepared.prompt_logprobs is None:
        return UNSET
    # A sequence that was resumed has lost them.
    found: Sequence[TokenLogprobs | None] = answer.prompt_logprobs or [None] * len(prepared.prompt_ids(index))
    return [None if entry is None else _position(entry, prepared.prompt_logprobs, tokenizer) for entry in found]


def _position(entry: TokenLogprobs, most: int, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    """The prompt's token, and the `most` likeliest."""
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:most], 1)]
    return {
        str(token_id): PromptLogprob(finite(logprob), rank, tokenizer.token_text(token_id))
        for token_id, logprob, rank in ranked
    }
