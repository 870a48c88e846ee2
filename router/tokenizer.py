"""Text to tokens and back, for one model."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from router.chat_template import ChatTemplate, TemplateError
from router.detokenizer import Detokenizer, TokenBytes

# A text longer than this many characters a token of context is surely too long, or nothing but blanks.
CHARACTERS_PER_TOKEN = 16


class PromptTooLong(Exception):
    """A text has at least `tokens` tokens, more than the `context_length` of the model."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class Tokenizer:
    """One model's tokenizer and chat template. Safe to use from several threads.

    `vocab_size`: every token id is below it. `special_ids`: tokens that are no text, such as the end of a turn.
    """

    def __init__(self, backend: tokenizers.Tokenizer, template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self.token_bytes = TokenBytes(backend)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """From a Hugging Face folder. Raises FileNotFoundError without a `tokenizer.json`, ValueError for one that is
        not understood."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the router needs a fast tokenizer")
        return cls(tokenizers.Tokenizer.from_file(str(path)), ChatTemplate.from_folder(folder))

    def encode(self, text: str, add_special_tokens: bool = True, context_length: int | None = None) -> list[int]:
        """Raises PromptTooLong, without looking at the whole text, if its beginning alone is far over the context: a
        large body costs no more time than a long prompt. Lets other threads run meanwhile (`Tokenizer.encode` of the
        tokenizers package would not)."""
        if context_length is not None and len(text) > CHARACTERS_PER_TOKEN * context_length:
            beginning = len(self._encode(text[: CHARACTERS_PER_TOKEN * context_length], False))
            # Cutting a text changes tokens near the cut only; twice is far beyond that.
            if beginning > 2 * context_length:
                raise PromptTooLong(beginning)
        return self._encode(text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; its special tokens are in it, so encode it without adding any. `arguments` are
        the template's own. Raises TemplateError, also for a model without a template."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, add_generation_prompt, arguments)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """All at once. Like `encode` it lets other threads run."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(self, skip_special_tokens: bool = True, continues: bool = False) -> Detokenizer:
        """For the tokens of one sequence, one at a time."""
        return Detokenizer(self.token_bytes, self.special_ids if skip_special_tokens else frozenset(), continues)

    def token_id(self, token: str) -> int:
        """Raises KeyError for a token that the vocabulary does not have."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def token_text(self, token_id: int) -> str:
        """A name for one token: its text, or its bytes written as `bytes:\\xe2\\x80` if they are no whole text."""
        data = self.token_bytes[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)
