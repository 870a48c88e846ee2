"""Log probabilities as chat completions and Responses write them."""

from collections.abc import Iterable

from router.text.output_text import TokenText
from router.text.tokenizer import Tokenizer
from router.wire.responses import ContentLogprob, TopLogprob, finite


def content_logprobs(tokens: Iterable[TokenText], tokenizer: Tokenizer) -> list[ContentLogprob]:
    """The tokens of an answer, each with its log probability and those of the likeliest."""
    return [_content(token, tokenizer) for token in tokens]


def _content(token: TokenText, tokenizer: Tokenizer) -> ContentLogprob:
    assert token.logprobs is not None
    top = [TopLogprob(*_named(token_id, logprob, tokenizer)) for token_id, logprob in token.logprobs.top]
    return ContentLogprob(*_named(token.token_id, token.logprobs.logprob, tokenizer), top)


def _named(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, list[int]]:
    return tokenizer.token_text(token_id), finite(logprob), list(tokenizer.token_bytes[token_id])
