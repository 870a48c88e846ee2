"""Tokens to text one by one, against the tokenizers package decoding them all at once."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from router.text.detokenizer import TokenBytes
from router.text.tokenizer import Tokenizer

TEXTS = [
    "Hello there, general!",
    "naïve café — “quotes”",
    "🦊👩‍👩‍👧🇫🇷",
    "e\u0301\u0323 combining",
    "  two  spaces \n\n and\ttabs ",
    "日本語とعربى",
    "<|im_end|> in the text",
    "",
    " ",
    "\ufffd itself",
]


def streamed(tokenizer: Tokenizer, token_ids: list[int], skip: bool = True, continues: bool = False) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip, continues)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@settings(deadline=None, max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_byte_level_is_the_whole_decode_for_any_tokens(
    byte_level_tokenizer: tokenizers.Tokenizer, data: st.DataObject, skip: bool
) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    assert "".join(streamed(tokenizer, ids, skip)) == byte_level_tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=40))
def test_byte_level_any_text_comes_back(byte_level_tokenizer: tokenizers.Tokenizer, text: str) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer)
    assert "".join(streamed(tokenizer, tokenizer.encode(text, False), skip=False)) == text


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=40))
def test_byte_fallback_is_the_whole_decode_for_any_text(
    byte_fallback_tokenizer: tokenizers.Tokenizer, text: str
) -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer)
    ids = tokenizer.encode(text, False)
    assert "".join(streamed(tokenizer, ids)) == byte_fallback_tokenizer.decode(ids)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_byte_fallback_is_the_whole_decode_of_whole_characters(
    byte_fallback_tokenizer: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    """For bytes that are no UTF-8 the whole decode looks back and spoils the characters before them, which a stream has
    sent by then; so the runs of byte tokens here are characters."""
    tokenizer = Tokenizer(byte_fallback_tokenizer)
    pieces = st.one_of(
        st.integers(259, tokenizer.vocab_size - 1).map(lambda token_id: [token_id]),
        st.characters(codec="utf-8").map(lambda character: [3 + value for value in character.encode()]),
    )
    ids = [token_id for piece in data.draw(st.lists(pieces, max_size=20)) for token_id in piece]
    assert "".join(streamed(tokenizer, ids)) == byte_fallback_tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_no_character_is_split(byte_level_tokenizer: tokenizers.Tokenizer, text: str) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer)
    whole = tokenizer.encode(text, False)
    pieces = streamed(tokenizer, whole, skip=False)
    assert "".join(pieces) == text
    assert "\ufffd" in text or all("\ufffd" not in piece for piece in pieces)


def test_an_incomplete_character_at_the_end_is_marked(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer)
    fox = [tokenizer.token_id(character) for character in "ðŁ¦Ĭ"]  # the four bytes of a fox
    assert streamed(tokenizer, fox) == ["", "", "", "🦊", ""]
    assert streamed(tokenizer, fox[:3]) == ["", "", "", "\ufffd"]
    assert streamed(tokenizer, [*fox[:2], tokenizer.token_id("a")]) == ["", "", "\ufffda", ""]


def test_the_space_at_the_start_belongs_to_texts_that_continue(byte_fallback_tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_fallback_tokenizer)
    ids = [tokenizer.token_id("▁h"), tokenizer.token_id("el"), tokenizer.token_id("▁lo")]
    assert "".join(streamed(tokenizer, ids)) == "hel lo" == byte_fallback_tokenizer.decode(ids)
    assert "".join(streamed(tokenizer, ids, continues=True)) == " hel lo"
    assert "".join(streamed(tokenizer, [tokenizer.token_id("<s>"), *ids])) == "hel lo"
    two = [tokenizer.token_id("▁"), tokenizer.token_id("▁h")]
    assert "".join(streamed(tokenizer, two)) == " h"


def test_special_tokens_are_skipped_only_if_asked(byte_level_tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer(byte_level_tokenizer)
    ids = [tokenizer.token_id("<|im_start|>"), tokenizer.token_id("a"), tokenizer.token_id("<tool é>")]
    assert streamed(tokenizer, ids) == ["", "a", "<tool é>", ""]
    assert "".join(streamed(tokenizer, ids, skip=False)) == "<|im_start|>a<tool é>"


def test_the_real_tokenizer_decodes_alike(real_folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(real_folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(real_folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, False)
        assert "".join(streamed(tokenizer, ids, skip=False)) == text
    everything = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(everything) == backend.decode(everything)
    assert tokenizer.decode(everything, False) == backend.decode(everything, skip_special_tokens=False)


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip("x", 2, 0)])
def test_an_unknown_decoder_is_refused(decoder: object) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(ValueError, match="decoder"):
        TokenBytes(backend)


def test_metaspace_decoders(byte_fallback_tokenizer_maker: Callable[[], tokenizers.Tokenizer]) -> None:
    for scheme, text in (("always", "h lo"), ("never", " h lo")):
        backend = byte_fallback_tokenizer_maker()
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        tokenizer = Tokenizer(backend)
        ids = [tokenizer.token_id("▁h"), tokenizer.token_id("▁lo")]
        assert tokenizer.decode(ids) == text == backend.decode(ids)
