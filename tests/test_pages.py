"""Pages written by hand: their links lead somewhere, what they name is there, and they stay short."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels", "bench", "helm")
GENERATED = {ROOT / "docs" / "REFERENCE.md", ROOT / "bench" / "RESULTS.md"}
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", *(f"{room}/**/*.md" for room in ROOMS))
    for path in ROOT.glob(pattern)
    if path not in GENERATED
)
MAX_WORDS = 30_000  # of all of them
MAX_DESIGN_LINES = 300
MAX_CELL_WORDS = 30  # of MECHANISMS
PARTS = {
    path.name for room in (*ROOMS, "tests") for path in (ROOT / room).rglob("*") if "__pycache__" not in path.parts
}
# Private parts of other packages.
PRIVATE = re.compile(
    r"^(?:ray|torch|transformers|xgrammar|flashinfer|numba|vllm)\b.*(?:\._|\bgguf_pytorch_utils|\.jit\b)|^_get_"
)
# Names in documentation that stand for something else.
OF_OTHERS = re.compile(
    r"^(?:integrations|modeling_|configuration_|conversion_mapping|1_Pooling|/|~|http|\.|\$)|[*<>{}…]|^[A-Z]+/|^extra-openai"
)


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.replace("`", "")).lower().replace(" ", "-") for head in heads}


def rows(page: Path) -> list[list[str]]:
    """The cells of all tables but their heads."""
    lines = page.read_text().splitlines()
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines if line.startswith("|")]
    return [
        row for row, after in zip(cells, [*cells[1:], [""]], strict=True) if not is_rule(row) and not is_rule(after)
    ]


def is_rule(row: list[str]) -> bool:
    return all(re.fullmatch("-+:?", cell) for cell in row)


@pytest.mark.parametrize("page", [*PAGES, *sorted(GENERATED)], ids=ids)
def test_links_lead_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = (page.parent / name).resolve() if name else page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            wrong.append(target)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_files_and_folders_that_are_named_are_there(page: Path) -> None:
    """From the root, from the page's folder, or, without a folder, anywhere."""
    text = re.sub(r"```.*?```|^ {4}.*$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    wrong = []
    for name in re.findall(r"`([\w./-]+(?:\.py|\.html|\.tpl|\.yaml|/))`", text):
        there = (ROOT / name).exists() or (page.parent / name).exists()
        if not there and not OF_OTHERS.search(name) and ("/" in name.rstrip("/") or name.rstrip("/") not in PARTS):
            wrong.append(name)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_results_and_methods_that_are_named_are_there(page: Path) -> None:
    results = {path.stem for path in (ROOT / "bench" / "results").glob("*.json")}
    figures = (ROOT / "bench" / "RESULTS.md").read_text()
    first = {name.split(".")[0] for name in results if "." in name}
    wrong = []
    for name in re.findall(r"`([a-z][\w-]*(?:\.[\w*-]+)+)`", page.read_text()):
        if name.split(".")[0] in first - {"schemas"} and not re.search(r"\.(py|json|md|yaml)$", name):
            stem = name.removesuffix("*").rstrip(".")
            if not any(result.startswith(stem) for result in results) and f"| {stem}" not in figures:
                wrong.append(name)
    classes = members()
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text()):
        if owner in classes and member not in classes[owner]:
            wrong.append(f"{owner}.{member}")
    assert wrong == []


@cache
def members() -> dict[str, set[str]]:
    """Names within the classes of the product, those that methods set included."""
    found: dict[str, set[str]] = {}
    for room in ROOMS[:-1]:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    own = found.setdefault(node.name, set())
                    for inner in ast.walk(node):
                        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                            own.add(inner.name)
                        elif isinstance(inner, ast.Attribute):
                            own.add(inner.attr)
                        elif isinstance(inner, ast.Name):
                            own.add(inner.id)
    return found


def test_pages_stay_short() -> None:
    words = {ids(page): len(page.read_text().split()) for page in PAGES}
    assert sum(words.values()) <= MAX_WORDS, sorted(words.items(), key=lambda item: -item[1])
    assert len((ROOT / "docs" / "DESIGN.md").read_text().splitlines()) <= MAX_DESIGN_LINES


def test_a_cell_about_a_mechanism_is_short() -> None:
    cells = [cell for row in rows(ROOT / "docs" / "MECHANISMS.md") for cell in row]
    assert len(cells) > 100
    assert [cell for cell in cells if len(cell.split()) > MAX_CELL_WORDS] == []


def test_the_glossary_is_in_order() -> None:
    words = [row[0].strip("`").lower() for row in rows(ROOT / "docs" / "GLOSSARY.md")]
    assert words == sorted(words) and len(words) == len(set(words))


def test_every_family_is_in_the_table_of_models() -> None:
    from worker.models.families import FAMILIES  # imports torch

    page = (ROOT / "docs" / "MODELS.md").read_text().split("## What is served")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in page.splitlines() if row.startswith("|"))))
    assert FAMILIES.keys() - named == set()


def test_private_parts_of_dependencies_are_on_the_page_about_upgrades() -> None:
    page = (ROOT / "docs" / "UPGRADING.md").read_text()
    users = set()
    for room in ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                elif isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                    names = [ast.unparse(node)]
                else:
                    continue
                if any(PRIVATE.search(name) for name in names):
                    users.add(ids(path))
    assert len(users) > 8
    assert {name for name in users if f"`{name}`" not in page} == set()
