"""Regular expressions of ECMA 262 (with the flag u), which JSON Schema asks for, in the words of Python's parser."""

import re
import unicodedata
from collections.abc import Callable
from functools import cache

from worker.structured_output.error import GrammarError
from worker.structured_output.rules.charset import Ranges, complement, union

# Python has no words for these, or others: \p{...}, \u{...}, two escapes of one character, \cX, and names of groups.
_FOREIGN = re.compile(
    r"\\(?:[pP](?:\{(?P<property>[^}]*)\})?|u\{(?P<code>[0-9a-fA-F]{1,6})\}|c(?P<control>[a-zA-Z])"
    r"|u(?P<high>[dD][89abAB][0-9a-fA-F]{2})\\u(?P<low>[dD][c-fC-F][0-9a-fA-F]{2})|(?P<reference>k<)|.)"
    r"|(?P<group>\(\?<(?![=!]))|\[\^?|\]",
    re.DOTALL,
)
_LONG_NAMES = """
Letter=L Cased_Letter=LC Uppercase_Letter=Lu Lowercase_Letter=Ll Titlecase_Letter=Lt Modifier_Letter=Lm Other_Letter=Lo
Mark=M Combining_Mark=M Nonspacing_Mark=Mn Spacing_Mark=Mc Enclosing_Mark=Me Number=N Decimal_Number=Nd digit=Nd
Letter_Number=Nl Other_Number=No Punctuation=P punct=P Connector_Punctuation=Pc Dash_Punctuation=Pd
Open_Punctuation=Ps Close_Punctuation=Pe Initial_Punctuation=Pi Final_Punctuation=Pf Other_Punctuation=Po Symbol=S
Math_Symbol=Sm Currency_Symbol=Sc Modifier_Symbol=Sk Other_Symbol=So Separator=Z Space_Separator=Zs Line_Separator=Zl
Paragraph_Separator=Zp Other=C Control=Cc cntrl=Cc Format=Cf Private_Use=Co Unassigned=Cn Surrogate=Cs
"""
_LONG = dict(pair.split("=") for pair in _LONG_NAMES.split())
_CATEGORIES = frozenset(_LONG.values())
_BINARY: dict[str, Callable[[str], bool]] = {
    "Lowercase": str.islower,
    "Lower": str.islower,
    "Uppercase": str.isupper,
    "Upper": str.isupper,
    "ASCII": str.isascii,
}


def in_python(pattern: str) -> str:
    """The pattern as Python's parser reads it. Raises GrammarError."""
    if _FOREIGN.search(pattern) is None:
        return pattern
    out, at, in_class = "", 0, False
    for match in _FOREIGN.finditer(pattern):
        if match.start() < at:
            continue
        out += pattern[at : match.start()]
        at = match.end()
        text = match[0]
        if text in ("[", "[^"):
            out += text
            if not in_class and pattern[at : at + 1] == "]":  # a member of the set, as it comes first
                out, at = out + "]", at + 1
            in_class = True
        elif text == "]":
            in_class = False
            out += text
        else:
            out += _written(match, in_class=in_class)
    return out + pattern[at:]


def _written(match: re.Match[str], *, in_class: bool) -> str:
    if match[0][1:2] in ("p", "P") and match[0][0] == "\\":
        found = property_ranges(match["property"] or "")
        members = _members(complement(found) if match[0][1] == "P" else found)
        return members if in_class else f"[{members}]"
    if match["code"] is not None:
        return f"\\U{int(match['code'], 16):08x}"
    if match["control"] is not None:
        return f"\\x{ord(match['control']) % 32:02x}"
    if match["high"] is not None:
        code = 0x10000 + ((int(match["high"], 16) - 0xD800) << 10) + int(match["low"], 16) - 0xDC00
        return f"\\U{code:08x}"
    if match["reference"] is not None:
        raise GrammarError("a regular expression uses references to groups, which a grammar cannot follow")
    return "(?P<" if match["group"] is not None and not in_class else match[0]


def _members(ranges: Ranges) -> str:
    return "".join(f"\\U{first:08x}" + f"-\\U{last:08x}" * (last > first) for first, last in ranges)


def property_ranges(name: str) -> Ranges:
    """The characters of a Unicode property, as \\p{...} names it: a general category, or one of a few binary ones.
    Raises GrammarError for others."""
    key, _, value = name.rpartition("=")
    category = _LONG.get(value, value)
    if key in ("", "gc", "General_Category") and category in _CATEGORIES:
        wanted = ("Lu", "Ll", "Lt") if category == "LC" else (category,)
        return union((first, last) for first, last, each in _runs() if each.startswith(wanted))
    if not key and value in _BINARY:
        return _that_are(value)
    raise GrammarError(
        f"a regular expression uses \\p{{{name}}}: general categories are supported, such as L or Lowercase_Letter, "
        f"and {', '.join(_BINARY)}"
    )


@cache
def _runs() -> list[tuple[int, int, str]]:
    """All code points, in runs of one general category each. Takes 0.2 s."""
    runs: list[tuple[int, int, str]] = []
    first, category = 0, unicodedata.category("\0")
    for code, each in enumerate(map(unicodedata.category, map(chr, range(0x110000)))):
        if each != category:
            runs.append((first, code - 1, category))
            first, category = code, each
    return [*runs, (first, 0x10FFFF, category)]


@cache
def _that_are(name: str) -> Ranges:
    holds = _BINARY[name]
    return union((code, code) for code in range(0x110000) if holds(chr(code)))
