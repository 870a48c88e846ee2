"""Grammars that clients write in Lark: which texts they allow, and what is said of wrong ones."""

import random
import re
from collections.abc import Callable

import pytest

from tests.worker.structured_output.conftest import Walker
from worker.messages import Grammar
from worker.structured_output import GrammarCompiler, GrammarError
from worker.structured_output.compiling.client_lark import client_lark, is_lark
from worker.structured_output.matching.engines import LLGUIDANCE, XGRAMMAR
from worker.structured_output.matching.lazy_grammar import LazyGrammar
from worker.structured_output.matching.lazy_matcher import LazyVocabulary

SUMS = r"""
// sums of products: the root of a tree, and the names of its nodes, change no text
?start: sum
?sum: product
    | sum "+" product   -> add
?product: atom | product "*" atom   -> mul
?atom: NUMBER  -> number  # a leaf
    | "(" sum ")"
NUMBER: /[0-9]{1,3}/
%ignore " "
"""
DATES = 'start: YEAR "-" MONTH ("T" HOUR)~0..2\nYEAR: /20[0-9]{2}/\nMONTH: "0" "1".."9" | /1[0-2]/\nHOUR: /[01][0-9]/\n'
NAMES = '%import common (CNAME, WS_INLINE)\nstart: "of"i WS_INLINE CNAME ("::=" CNAME)? [end]\nend: /[.!]/ | ";"\n'


@pytest.fixture(scope="module")
def vocabulary(walker: Walker) -> LazyVocabulary:
    return LazyVocabulary(walker.tokens, [walker.eos])


def is_sum(text: str) -> bool:
    """By Python's own parser."""
    if not re.fullmatch(r"[0-9+*() ]*", text) or re.search(r"[0-9]{4}|[0-9] +[0-9]|\*\*|\( *\)", text):
        return False
    try:
        compile(re.sub(r"\b0+(?=[0-9])", "", text.strip()), "sum", "eval", dont_inherit=True)
    except SyntaxError:
        return False
    return not re.search(r"[(+*] *\+|^ *\+|[0-9)] *\(", text)


@pytest.mark.parametrize(
    ("grammar", "is_right"),
    [
        (SUMS, is_sum),
        (DATES, lambda text: re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])(T[01]\d){0,2}", text)),
        (NAMES, lambda text: re.fullmatch(r"[oO][fF][ \t]+[a-zA-Z_]\w*(::=[a-zA-Z_]\w*)?[.!;]?", text, re.ASCII)),
    ],
    ids=["sums", "dates", "names"],
)
def test_sampled_outputs_are_texts_of_the_grammar(
    walker: Walker, vocabulary: LazyVocabulary, grammar: str, is_right: Callable[[str], bool]
) -> None:
    made, ended = LazyGrammar(client_lark(grammar), vocabulary), 0
    for seed in range(40):
        choose, matcher, text = random.Random(seed), made.matcher(), b""
        for _ in range(60):
            tokens = walker.allowed(matcher)
            token = walker.eos if walker.eos in tokens and choose.random() < 0.4 else choose.choice(tokens)
            assert matcher.accept_token(token)
            if token == walker.eos:
                assert is_right(text.decode()), text
                ended += 1
                break
            text += walker.tokens[token]
    assert ended > 20


def test_texts_are_allowed_as_they_should_be(vocabulary: LazyVocabulary) -> None:
    sums = LazyGrammar(client_lark(SUMS), vocabulary)
    for text, is_right in [("1+2*(3 + 4)", True), ("12 * 3", True), ("1+", False), ("1234", False), ("(1", False)]:
        matcher = sums.matcher()
        assert (matcher.accept_string(text) and matcher.is_completed()) == is_right, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SUMS, True),
        (NAMES, True),
        ("start[lazy]: /a+/", True),
        ('root ::= "a: b" # x: y', False),
        ('root ::= [^":]+\nx ::= "a"', False),
        ("root", False),
    ],
)
def test_the_language_is_known_by_its_rules(text: str, expected: bool) -> None:
    assert is_lark(text) == expected


WRONG = [
    ('start: "a" b\nc: "c"', 'line 1, column 8: .*"b"'),
    ('\nstart: "a" (\nb: "c"', "line 2, column 13: .*'[)]'"),
    ("start: A\nA: /[/", "line 2, column 4: "),
    ("start: /(?=a)b/", "line 1, column 8: .* look-around"),
    ('root: "a"', "there is no rule called start"),
    ('start: "x"\nb: <|end|>', "line 2: tokens "),
    ('start: %json {"type": "object"}', "line 1: %json "),
    ("start: a\na[temperature=0.5]: /a+/", "line 2: temperature "),
    ("start: @other", "line 1: references "),
    ("start: start", "no token"),
]


def test_what_is_wrong_is_said_with_its_place(made: Callable[..., GrammarCompiler]) -> None:
    compiler = made()
    for text, reason in WRONG:
        error = compiler.submit(Grammar("ebnf", text)).exception()
        assert isinstance(error, GrammarError) and re.search(reason, str(error)), (text, error)


def test_engines_and_thinking(made: Callable[..., GrammarCompiler]) -> None:
    compiler = made()
    assert compiler.submit(Grammar("ebnf", 'start: "<" /[a-z]+/')).result().engine == LLGUIDANCE
    assert compiler.submit(Grammar("ebnf", 'root ::= "<" [a-z]+')).result().engine == XGRAMMAR
    error = compiler.submit(Grammar("ebnf", 'start: "a"', after="</think>", begin="<think>")).exception()
    assert "thinking" in str(error)
