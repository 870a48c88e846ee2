"""Tokenisation and detokenisation for one model."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from router.chat.chat_template import SPECIAL_TOKENS, ChatTemplate, TemplateError, special_tokens, token_content
from router.formats.families import choose
from router.formats.format import OutputFormat
from router.text.detokenizer import Detokenizer, TokenBytes

# A text with more characters than this per token of context is surely too long, or nothing but blanks.
CHARACTERS_PER_TOKEN = 16
_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
_MARK = "\x02"  # a control character that no vocabulary merges with others


class PromptTooLong(Exception):
    """A text has at least `tokens` tokens, more than the `context_length` of the model."""

    def __init__(self, tokens: int) -> None:
        super().__init__(f"at least {tokens} tokens")
        self.tokens = tokens


class Tokenizer:
    """The tokenizer and chat template of one model. Thread-safe.

    | attribute | meaning |
    | --- | --- |
    | `vocab_size` | every token id is below it |
    | `special_ids` | tokens that are no text, such as the end of a turn |
    | `token_bytes` | the bytes of each token |
    | `info` | `tokenizer_config.json`, with the texts of special tokens, and the chat template |
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        template: ChatTemplate | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`config`: the content of `tokenizer_config.json`."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._template = template
        self.token_bytes = TokenBytes(backend)
        self._adds_space = b"".join(self.token_bytes[token_id] for token_id in self._encode("a", False)) != b"a"
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.info = {
            "tokenizer_class": None,
            **dict.fromkeys(SPECIAL_TOKENS),
            **_texts(dict(config or {})),
            "chat_template": None if template is None else template.source,
        }

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Loads it from a Hugging Face folder. Raises FileNotFoundError without a `tokenizer.json`, ValueError for one
        that is not supported."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise FileNotFoundError(f"{path} is missing: the router needs a fast tokenizer")
        about = folder / "tokenizer_config.json"
        config = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
        config.pop("name_or_path", None)  # a path on the machine where it was made
        texts = special_tokens(folder)
        backend = tokenizers.Tokenizer.from_file(str(path))
        _add_tokens(backend, config, texts.values())
        return cls(backend, ChatTemplate.from_folder(folder), texts | config)

    def encode(self, text: str, add_special_tokens: bool = True, context_length: int | None = None) -> list[int]:
        """Returns the tokens of a text. Releases the GIL (`Tokenizer.encode` of the tokenizers package would not).
        Raises PromptTooLong if the beginning of the text alone is far over `context_length`, without looking at the
        rest: so a large body costs no more time than a long prompt."""
        if context_length is not None and len(text) > CHARACTERS_PER_TOKEN * context_length:
            beginning = len(self._encode(text[: CHARACTERS_PER_TOKEN * context_length], False))
            # Cutting a text changes only the tokens near the cut: a factor of two is far beyond that.
            if beginning > 2 * context_length:
                raise PromptTooLong(beginning)
        return self._encode(text, add_special_tokens)

    def encode_continuation(self, text: str, context_length: int | None = None) -> list[int]:
        """Returns the tokens of a text that follows other tokens: without special tokens, and without the space that
        some tokenizers put before a text. Raises as `encode` does."""
        if self._adds_space:
            token_ids = self.encode(_MARK + text, False, context_length)
            data = b""
            for count, token_id in enumerate(token_ids, 1):
                data += self.token_bytes[token_id]
                if data.lstrip(b" ") == _MARK.encode():
                    return token_ids[count:]
        return self.encode(text, False, context_length)

    def encode_part(self, text: str, begins: bool, context_length: int | None = None) -> list[int]:
        """`encode` for a text that `begins` a prompt, `encode_continuation` for one that follows other tokens."""
        return self.encode(text, True, context_length) if begins else self.encode_continuation(text, context_length)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a conversation. It contains its special tokens, so encode it without adding any. `arguments`:
        further variables of the template. Raises TemplateError, also for a model without a template."""
        if self._template is None:
            raise TemplateError("this model has no chat template; use /v1/completions")
        return self._template.render(messages, add_generation_prompt, arguments, tools)

    @property
    def takes_tools(self) -> bool:
        """Whether the chat template has a place for tools. Without a template, nothing says that it has none."""
        return self._template is None or self._template.takes_tools

    @property
    def reads_tools_of_messages(self) -> bool:
        """Whether the chat template looks for tools in messages alone."""
        return self._template is not None and self._template.reads_tools_of_messages

    def output_format(
        self, tool_call_parser: str, reasoning_parser: str, config: Mapping[str, Any] | None = None
    ) -> OutputFormat:
        """How the model writes its answers; see `router.formats.families.choose`. `config`: its `config.json`."""
        added = {token.content: token_id for token_id, token in self._backend.get_added_tokens_decoder().items()}
        source = None if self._template is None else f"{self._template.source}{self._template.for_tools}"
        return choose(tool_call_parser, reasoning_parser, source, added.get, config)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once. Releases the GIL."""
        return self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)[0]

    def detokenizer(
        self, skip_special_tokens: bool = True, continues: bool = False, marker_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A detokenizer for the tokens of one sequence. `marker_ids`: special tokens that are not skipped."""
        skipped = self.special_ids - marker_ids if skip_special_tokens else frozenset()
        return Detokenizer(self.token_bytes, skipped, continues)

    def token_id(self, token: str) -> int:
        """The id of a token. Raises KeyError for a token that is not in the vocabulary."""
        found = self._backend.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    def spelled(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary spells them."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def token_text(self, token_id: int) -> str:
        """A name for one token: its text, or its bytes written as `bytes:\\xe2\\x80` if they are no whole text."""
        data = self.token_bytes[token_id]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)


def _add_tokens(backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Iterable[str]) -> None:
    """Adds tokens that `tokenizer_config.json` alone has, as transformers does: fine-tunes have theirs there. Tokens
    that have a name there, such as `eos_token`, are special, whatever `tokenizer.json` says."""
    added = config.get("added_tokens_decoder")
    for number, token in sorted((int(key), token) for key, token in (added if isinstance(added, dict) else {}).items()):
        text = token_content(token)
        if text and backend.token_to_id(text) is None and number == backend.get_vocab_size():
            told = {name: value for name, value in token.items() if name in _TOKEN_FIELDS}
            kept = tokenizers.AddedToken(**told)
            backend.add_special_tokens([kept]) if kept.special else backend.add_tokens([kept])
    more = config.get("additional_special_tokens")
    named = [*special, *filter(None, map(token_content, more if isinstance(more, list) else ()))]
    known = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens([text for text in named if text not in known and backend.token_to_id(text) is not None])


def _texts(value: Any) -> Any:
    """`value` with each token's description replaced by the token's text."""
    if isinstance(value, dict):
        if isinstance(value.get("content"), str):
            return value["content"]
        return {key: _texts(part) for key, part in value.items()}
    return [_texts(part) for part in value] if isinstance(value, list) else value
