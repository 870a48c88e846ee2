"""The mechanical part of how Shoal's prose is written: the subject of a first sentence is a noun, and some words that
make a reader search for what they stand for are not used. The rest takes a reader."""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels", "bench", "helm")
# A docstring that begins so has no noun for its subject.
PRONOUNS = {"It", "Its", "That", "Those", "These", "They", "This", "What", "Whatever", "Whoever", "Who", "Of", "One", "Ones", "Theirs", "Somebody", "Nobody"}  # fmt: skip  # noqa: E501
# What to write instead: alongside, no sequence (or router, rank), the caller, again, n.
WORDS = re.compile(r"\b(beside|nobody|nobody's|somebody|whoever|anew|so many|so long as)\b", re.IGNORECASE)
# A limit says which side it is on, and of what quantity: `MAX_NAME_CHARS`.
LIMITS = re.compile(r"(?:^|_)(?:MOST|LEAST|LONGEST|FEWEST|WIDEST)(?:_|$)")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
# "is no list", "is none of these": the reader has to turn the sentence round. "There is no file" says it as it is.
TURNED = re.compile(r"(?<![Tt]here )\b(?:is|are) (?:no|none of)\b(?! longer)")
PAGES = sorted(
    path
    for pattern in ("README.md", "docs/*.md", *(f"{room}/**/README.md" for room in ROOMS))
    for path in ROOT.glob(pattern)
)


def docstrings(path: Path) -> list[tuple[int, str]]:
    found = []
    rest: list[Any] = [ast.parse(path.read_text())]
    while rest:
        node = rest.pop()
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            rest += inner if isinstance(inner, list) else []  # an expression has none
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 1), text))
    return sorted(found)


def numbers(path: Path) -> list[tuple[int, str]]:
    """Names of constants that are numbers, of modules and classes, by line."""
    tree = ast.parse(path.read_text())
    blocks = [tree.body, *(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef))]
    found = []
    for node in (node for block in blocks for node in block if isinstance(node, ast.Assign)):
        names, values = (part.elts if isinstance(part, ast.Tuple) else [part] for part in (node.targets[0], node.value))
        for name, value in zip(names, values, strict=False):
            is_number = any(
                isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in ast.walk(value)
            )
            if isinstance(name, ast.Name) and name.id.isupper() and is_number:
                found.append((node.lineno, name.id))
    return found


def prose(path: Path) -> list[tuple[int, str]]:
    """Strings with spaces, and comments, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
    return [
        (token.start[0] + number, line)
        for token in tokens
        if token.type in (tokenize.STRING, tokenize.COMMENT)
        for number, line in enumerate(token.string.split("\n"))
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_first_sentence_begins_with_a_noun_or_a_verb(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in FILES
        if path.is_relative_to(ROOT / room)
        for line, text in docstrings(path)
        if re.split(r"\W", text, maxsplit=1)[0] in PRONOUNS
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_words_that_stand_for_others_are_not_used(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in FILES
        if path.is_relative_to(ROOT / room)
        if WORDS.search(path.read_text())
        for number, line in prose(path)
        if WORDS.search(line)
    ]
    assert wrong == []


def said(path: Path) -> list[tuple[int, str]]:
    """Strings of a module by line, but for those that are statements, as docstrings are."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    statements = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    strings = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(node.lineno, node.value) for node in strings if id(node) not in statements]  # type: ignore[misc]


@pytest.mark.parametrize("room", ROOMS)
def test_messages_say_what_something_is_not(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        if path.is_relative_to(ROOT / room)
        if TURNED.search(path.read_text())
        for line, text in said(path)
        if TURNED.search(text)
    ]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_do_not_use_them(page: Path) -> None:
    lines = enumerate(page.read_text().splitlines(), 1)
    wrong = [f"{n}: {line}" for n, line in lines if WORDS.search(line) or TURNED.search(line)]
    assert wrong == []


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in ("kernels", "helm")])
def test_limits_are_named_max_and_min(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        if path.is_relative_to(ROOT / room)
        for line, name in numbers(path)
        if LIMITS.search(name)
    ]
    assert wrong == []
