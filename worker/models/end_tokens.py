"""The tokens that end a text, from all files of a model that say some.

No file is the one that is right: a fine-tune of a base model often has that model's end in one and its own end of a
turn in another. A model that never ends is worse than one that ends at a token which no text has.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_ENDS = "eos_token_id"


class _Added(msgspec.Struct):
    id: int
    content: str


class _Vocabulary(msgspec.Struct, frozen=True):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json that have ids of tokens."""

    added_tokens: list[_Added] = []
    model: _Vocabulary = _Vocabulary()


def eos_token_ids(model: Path, configured: int | list[int] | None) -> tuple[int, ...]:
    """The tokens that end a text, by the files of a model's folder.

    | source | counts |
    | --- | --- |
    | `eos_token_id` in generation_config.json | always |
    | `eos_token_id` in config.json, for the whole model and for its text part | always |
    | `configured`, which may be an architecture's default | where config.json is not there, or both are silent |
    | `eos_token` in tokenizer_config.json, or else in special_tokens_map.json | if the vocabulary has it |

    Raises ValueError, with the file's name, for a file that cannot be decoded, or has other values than tokens.
    """
    tokens = _Tokens(model)
    generation = model / "generation_config.json"
    found = tokens.ids(_object(generation).get(_ENDS), generation)
    config = model / "config.json"
    said = _object(config)
    text = said.get("text_config")
    for values in (said, text if isinstance(text, Mapping) else {}):
        found += tokens.ids(values.get(_ENDS), config)
    if not found or not config.exists():
        found += tokens.ids(configured, config)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _object(model / name).get("eos_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(token, str):
            found += [number for number in (tokens.id(token),) if number is not None]
            break
    return tuple(dict.fromkeys(found))


class _Tokens:
    """The ids of tokens by their texts, read when the first one is asked for."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._added: dict[str, int] | None = None
        self._vocabulary = msgspec.Raw(b"{}")

    def id(self, token: str) -> int | None:
        """The id of a token; None if there is no such token."""
        if self._added is None:
            self._read()
        assert self._added is not None
        if token in self._added:
            return self._added[token]
        try:
            return msgspec.json.decode(self._vocabulary, type=dict[str, int]).get(token)
        except msgspec.DecodeError:  # a list with scores: a unigram model's
            pairs = msgspec.json.decode(self._vocabulary, type=list[tuple[str, float]])
            return next((number for number, (text, _) in enumerate(pairs) if text == token), None)

    def _read(self) -> None:
        path = self._model / "tokenizer.json"
        read = _TokenizerFile()
        if path.exists():
            try:
                read = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise _wrong(path, str(error)) from None
        self._added = {token.content: token.id for token in read.added_tokens}
        self._vocabulary = read.model.vocab
        decoder = _object(self._model / "tokenizer_config.json").get("added_tokens_decoder")
        for number, token in (decoder if isinstance(decoder, Mapping) else {}).items():
            self._added.setdefault(token["content"], int(number))

    def ids(self, said: Any, path: Path) -> list[int]:
        """The ids of what a file says: an id, the text of a token, a list of these, or nothing. Raises ValueError."""
        made: list[int] = []
        for each in said if isinstance(said, list) else () if said is None else (said,):
            number = self.id(each) if isinstance(each, str) else each
            if isinstance(number, bool) or not isinstance(number, int):
                raise _wrong(path, f"{_ENDS} is {each!r}, which is not a token")
            if number >= 0:  # some files say -1 for none
                made.append(number)
        return made


def _object(path: Path) -> Mapping[str, Any]:
    """The object in a file; empty if there is no file. Raises ValueError."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _wrong(path, str(error)) from None


def _wrong(path: Path, why: str) -> ValueError:
    return ValueError(f"{path} is not as it should be: {why}")
