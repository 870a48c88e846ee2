"""The bytes that texts of tokens stand for, in the kinds of vocabularies that language models have."""

SPACE = "\u2581"  # stands for a space in SentencePiece's vocabularies


def _byte_level() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted({*range(256)} - {*printable})
    return {chr(value): value for value in printable} | {chr(0x100 + i): value for i, value in enumerate(others)}


# GPT-2's alphabet: printable Latin-1 characters stand for their own bytes, characters from U+0100 on for the others.
BYTE_LEVEL = _byte_level()
# SentencePiece's tokens of single bytes, for texts that its vocabulary lacks. `tokenizers` reads digits of either case.
_DIGITS = "0123456789abcdefABCDEF"
BYTE_FALLBACK = {f"<0x{high}{low}>": bytes([int(high + low, 16)]) for high in _DIGITS for low in _DIGITS}
