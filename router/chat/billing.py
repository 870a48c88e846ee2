"""The line about billing that Claude Code puts at the head of its system text.

It differs from request to request, so that no prefix would be shared after it, and it tells the model nothing.
"""

import re

_BEGIN = "x-anthropic-billing-header:"
_PAIR = r"[ \t]*[\w.-]+=[^;\s]*"
# Up to its last pair where text follows in the same line, otherwise the whole line.
_LINE = re.compile(rf"^{_BEGIN}(?:(?:{_PAIR};)+(?:{_PAIR}(?=\n|\Z))?|[^\n]*)[ \t]*\n?", re.MULTILINE)


def without_billing(text: str) -> str:
    """The text without such lines."""
    return _LINE.sub("", text) if _BEGIN in text else text
