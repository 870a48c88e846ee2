"""The bytes of tokens are those that the library of tokenizers decodes them to."""

from tokenizers import decoders, pre_tokenizers

from worker.formats.token_bytes import BYTE_FALLBACK, BYTE_LEVEL, SPACE


def test_the_alphabet_of_byte_level_vocabularies() -> None:
    assert BYTE_LEVEL.keys() == {*pre_tokenizers.ByteLevel.alphabet()}
    assert sorted(BYTE_LEVEL.values()) == [*range(256)]
    decoder = decoders.ByteLevel()
    for characters in ("Ġ", "ÃĹ", "ä½ł", "ðŁ¦Ĭ"):
        assert bytes(BYTE_LEVEL[each] for each in characters).decode() == decoder.decode([characters])


def test_tokens_of_single_bytes() -> None:
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    for token in ("<0x0A>", "<0x0a>", "<0x7E>", "<0x7e>"):
        assert BYTE_FALLBACK[token].decode() == decoder.decode([token])
    assert "<0x0G>" not in BYTE_FALLBACK
    assert {*BYTE_FALLBACK.values()} == {bytes([value]) for value in range(256)}


def test_the_mark_of_a_space() -> None:
    assert decoders.Metaspace(prepend_scheme="never").decode(["a", f"{SPACE}b"]) == "a b"
