"""Whatever a converted expression lets through, Python's own `re` matches too."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.structured_output.conversion.spelling import JSON
from worker.structured_output.error import GrammarError
from worker.structured_output.rules import charset, regex
from worker.structured_output.rules.ebnf import EMPTY, Regex, to_text


def ebnf(pattern: str) -> str:
    return to_text({"start": Regex(pattern) if pattern else EMPTY}, "start")


def plain(pattern: str) -> str | None:
    return regex.whole(pattern, regex.spell_plain())


def inside(pattern: str) -> str | None:
    return regex.whole(pattern, JSON.one)


def quoted(pattern: str) -> str:
    return to_text({"start": Regex(f'"(?:{pattern})"')}, "start")


chars = st.sampled_from(
    ["a", "b", "Z", "7", "_", "-", " ", "é", "中", "😀", r"\.", r"\[", r"\\", '"', r"\"", r"\n", r"\t"]
)
classes = st.sampled_from(
    [
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        ".",
        "[a-c]",
        "[^a-c]",
        r"[\d_]",
        r"[^\s\d]",
        r"[^\W_]",
        "[à-ÿ]",
        '[^"\\\\]',
        '["\\\\\n]',
        "[܀-𐄀]",
        r"[\x00-\x20]",
        "[^\x00-\uffff]",
        r"[]^-]",
    ]
)
atoms = chars | classes
expressions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda p: f"(?:{p[0]}|{p[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{1,}", "{2,}?", "{0}", "*?"])).map(
            lambda p: f"({p[0]}){p[1]}"
        ),
        inner.map(lambda p: f"(?P<x{abs(hash(p))}>{p})"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=120)
@given(pattern=expressions, anchors=st.sampled_from(["", "^", "$", "^$"]), seed=st.integers(0, 1000))
@pytest.mark.slow
def test_texts_of_an_expression_match_it(walker, pattern, anchors, seed):
    try:
        re.compile(pattern)
    except re.error:  # a name twice
        return
    whole = ("^" if "^" in anchors else "") + f"(?:{pattern})" + ("$" if "$" in anchors else "")
    converted = plain(whole)
    assert converted is not None
    for offset in range(4):
        text = walker.walk(ebnf(converted), seed + offset, 60)
        if text is not None:
            assert re.fullmatch(pattern, text.decode())

    converted = inside(whole)
    if converted is not None:
        for offset in range(4):
            text = walker.walk(quoted(converted), seed + offset, 60)
            if text is not None:
                assert re.fullmatch(pattern, json.loads(text))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("abc", ["abc"], ["ab", "abcd", "xabc", ""]),
        ("^a|b$", ["a", "b"], ["ab", ""]),
        ("^(?:ab|cd)$", ["ab", "cd"], ["abcd"]),
        ("(^a|^b)c", ["ac", "bc"], ["c"]),
        ("", [""], ["a"]),
        ("a{0}", [""], ["a"]),
        ("(a|)b", ["ab", "b"], ["a"]),
        (r"\d{3}-\d{4}", ["555-1234"], ["55-1234", "٣٣٣-٣٣٣٣"]),
        (".", ["a", "é", "😀", "\x00"], ["", "\n", "\r", "\u2028", "ab"]),
        (r"[^\d]", ["a", "é"], ["1", "٣"]),
        (r"\W", ["-", "。"], ["a", "é", "_"]),
        ("a{2,3}?", ["aa", "aaa"], ["a", "aaaa"]),
        ("a{120}", ["a" * 120], ["a" * 119, "a" * 121]),
        ("(?:ab){6,60}", ["ab" * 6, "ab" * 60, "ab" * 20], ["ab" * 5, "ab" * 61]),
        ("x{12,}", ["x" * 12, "x" * 40], ["x" * 11]),
        ("[][^-]+", ["][^-"], ["a"]),
        (r"\x41\u00e9\U0001F600\t", ["Aé😀\t"], ["A"]),
        ("(?:a?){3}", ["", "aaa"], ["aaaa"]),
        ("[\x00-\U0010ffff]", ["\x00", "߿", "ࠀ", "\ud7ff", "\ue000", "😀"], ["", "ab"]),
    ],
)
def test_an_expression_matches_the_whole(walker, pattern, matching, other):
    converted = ebnf(plain(pattern))
    for text in matching:
        assert walker.accepts(converted, text), text
        assert re.fullmatch(pattern, text)
    for text in other:
        assert not walker.accepts(converted, text), text


def test_large_counts_are_not_for_xgrammar():
    with pytest.raises(GrammarError, match="128"):
        ebnf(plain("(?:ab){126,260}"))
    assert regex.counted(plain("(?:ab){126,260}c|[a-z]d{3,}")) == (2 * 260 + 1 + 1 + 3, 260)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(", "missing \\)"),
        ("[a", "unterminated character set"),
        ("*a", "nothing to repeat"),
        ("a{5,2}", "min repeat greater"),
        (r"\p{Script=Greek}", "general categories are supported"),
        (r"(?<a>x)\k<a>", "references to groups"),
        ("(?=a)b", "look-ahead"),
        ("(?<!a)b", "look-behind"),
        ("(a)\\1", "references to groups"),
        ("(?i)a", "flags"),
        ("(?i:a)", "flags"),
        (r"\bword\b", "anchor"),
        ("a^b", "anchor"),
        ("a$b", "anchor"),
        ("(^a)*", "anchor"),
        ("(?>a)", "atomic"),
        ("a*+", "possessive"),
        ("(a)?(?(1)b|c)", "conditional"),
        ("(?:a{1000}){1000}", "counts more than"),
        ("a{99999999999999}", "not valid"),
    ],
)
def test_what_a_grammar_cannot_follow_is_refused(pattern, reason):
    with pytest.raises(GrammarError, match=reason):
        plain(pattern)
    with pytest.raises(GrammarError, match=reason):
        inside(pattern)


@pytest.mark.parametrize("pattern", [r"[^\s\S]", r"a[^\s\S]", r"(?:[^\s\S])+", "[\ud800-\udfff]"])
def test_an_expression_without_texts_is_none(pattern):
    assert plain(pattern) is None


def test_parts_without_texts_are_left_out(walker):
    grammar = ebnf(plain(r"(?:a|c[^\s\S])b"))
    assert walker.accepts(grammar, "ab") and not walker.accepts(grammar, "cb")
    assert walker.accepts(ebnf(plain(r"x(?:[^\s\S])*y")), "xy")


@pytest.mark.parametrize(
    ("pattern", "value"),
    [('say "hi"', 'say "hi"'), (r"C:\\dir", "C:\\dir"), (r"a\nb\tc", "a\nb\tc"), (r"[\x00-\x1f]", "\x07"), ("/", "/")],
)
def test_what_json_must_escape_is_escaped(walker, pattern, value):
    assert walker.accepts(quoted(inside(pattern)), json.dumps(value))


@pytest.mark.parametrize(
    ("pattern", "found", "other"),
    [
        ("^/", ["/", "/usr/local/bin"], ["usr/", ""]),
        ("@", ["@", "a@b", 'a"@\\\n'], ["", "ab"]),
        (r"\.py$", [".py", "a.py"], ["a.py ", "a.pyc"]),
        (r"\S", ["Alice Smith", " x "], ["", " \n"]),
        ("^(http|ftp)://", ["http://", "ftp://a/b?c"], ["xhttp://", "https://"]),
        ("^a|b$", ["a", "ab", "axx", "xxb"], ["xx", "ba", "bx"]),
        ("(^a|b)c", ["ac", "acd", "xbcx"], ["xac", "c"]),
        ("(^a|b)?c$", ["ac", "c", "xxc", "xac"], ["cx"]),
        (r"^\d+\.\d+\.\d+", ["1.2.3", "1.2.3-rc.1+b"], ["1.2", "v1.2.3"]),
        ("", ["", "x"], []),
        ("a{2}$", ["aa", "baa", "aaa"], ["a", "aab"]),
        (r"^\p{Lu}\p{L}*$", ["Éva", "A", "Ωμέγα"], ["éva", "A1", ""]),
        (r"^[\p{L}\p{Nd}_-]+$", ["a-1_é", "٣"], ["a b", ""]),
        (r"^\P{L}$", ["1", "\n", "😀"], ["a", "é"]),
        (r"^\u{1F600}\cJ(?<year>\d{4})$", ["😀\n2024"], ["😀2024"]),
        ("^\\ud83d\\ude00$", ["😀"], ["\U0001f601"]),
    ],
)
@pytest.mark.parametrize("ascii", [False, True])
def test_an_expression_is_searched_for(walker, pattern, found, other, ascii):
    grammar = quoted(regex.found(pattern, JSON.one))
    for text in found:
        assert walker.accepts(grammar, json.dumps(text, ensure_ascii=ascii)), text
    for text in other:
        assert not walker.accepts(grammar, json.dumps(text, ensure_ascii=ascii)), text


def test_characters_that_need_escapes_are_escaped_beside_others(walker):
    grammar = quoted(inside(r'^[a"\\\n/é😀]+$'))
    for text in ['a"', "\\a", "\n", "é😀"]:
        assert walker.accepts(grammar, json.dumps(text)), text
        assert walker.accepts(grammar, json.dumps(text, ensure_ascii=False)), text
    assert walker.accepts(grammar, r'"\/\u000A\u00E9\uD83D\uDE00"')
    for text in (r'"\t"', r'"\ud83d"', r'"\u00e8"', '"\n"', r'"\"', r'"\ud83d\ude01"'):
        assert not walker.accepts(grammar, text), text


@pytest.mark.parametrize(
    "characters", [charset.SCALARS, ((0x41, 0x5A), (0x3C, 0x3C), (0xE9, 0x2FFF), (0x1F000, 0x2A6DF))]
)
def test_escapes_are_those_of_the_characters(walker, characters):
    grammar = quoted(JSON.one(characters))
    edges = [c + d for pair in characters for c in pair for d in (-1, 0, 1)]
    for code in [*edges, 0x22, 0x5C, 0xA, 0x10000, 0x103FF, 0x10400, 0x10FFFF]:
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            continue
        inside_ = any(first <= code <= last for first, last in characters)
        assert walker.accepts(grammar, json.dumps(chr(code), ensure_ascii=False)) == inside_, hex(code)
        assert walker.accepts(grammar, json.dumps(chr(code))) == inside_, hex(code)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("^[ab]+$", ("[a-b]", 1, None)),
        ("^x{2,5}$", ("x", 2, 5)),
        ("^[ab]+", None),
        ("^[ab]+c$", None),
        ("[ab]*", None),
        ("^(ab)*$", None),
    ],
)
def test_one_character_again_and_again(pattern, expected):
    assert regex.repeated(pattern, JSON.one) == expected


@pytest.mark.parametrize(
    ("pattern", "least", "most", "expected"),
    [
        ("^[a-z]{2}-[0-9]$", 1, 5, True),
        ("^[a-z]{2}-[0-9]$", 5, None, False),
        ("[a-z]{2}", 2, None, True),
        ("[a-z]{2}", 0, 5, False),
        ("^a+b$", 0, 5, False),
    ],
)
def test_lengths_that_an_expression_keeps_to(pattern, least, most, expected):
    assert regex.keeps(pattern, least, most) == expected


# ---------------------------------------------------------------- sets of characters

code_points = st.integers(0, 0x10FFFF)
sets = st.lists(st.tuples(code_points, code_points).map(lambda p: (min(p), max(p))), min_size=1, max_size=4).map(
    charset.union
)


@settings(deadline=None, max_examples=60)
@given(ranges=sets, probes=st.lists(code_points, max_size=10))
def test_a_set_spelled_out_is_that_set_in_utf8(walker, ranges, probes):
    ranges = charset.intersection(ranges, charset.SCALARS)
    if not ranges:
        return
    grammar = ebnf(charset.pattern(ranges))
    edges = [c + d for first, last in ranges for c in (first, last) for d in (-1, 0, 1)]
    for code in {*edges, *probes}:
        if 0 <= code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF:
            inside = any(first <= code <= last for first, last in ranges)
            assert walker.accepts(grammar, chr(code)) == inside, hex(code)
    for offset in range(6):  # nothing but UTF-8, whatever bytes are tried
        walker.walk(grammar, offset).decode()


@given(a=sets, b=sets, probes=st.lists(code_points, min_size=1, max_size=10))
def test_sets_keep_the_laws_of_sets(a, b, probes):
    def has(ranges: charset.Ranges, code: int) -> bool:
        return any(first <= code <= last for first, last in ranges)

    for code in [*probes, *(edge for r in (a, b) for pair in r for edge in pair)]:
        assert has(charset.union([*a, *b]), code) == (has(a, code) or has(b, code))
        assert has(charset.intersection(a, b), code) == (has(a, code) and has(b, code))
        assert has(charset.complement(a), code) != has(a, code)
