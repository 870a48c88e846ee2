"""Pages written by hand: their links lead somewhere, what they name is there, and they stay short."""

import ast
import json
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
# Private parts of other packages, imported or called.
PACKAGES = r"(?:ray|torch|transformers|xgrammar|flashinfer|numba)"
PRIVATE = re.compile(
    rf"^ *(?:from|import) {PACKAGES}\b(?:\S*(?:\._|\.jit\b|_gguf_)|[\w.]* import .*\b_[a-z]\w*)"
    rf"|\b{PACKAGES}(?:\.\w+)*\._[a-zA-Z]\w*",
    re.MULTILINE,
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


def test_pages_that_the_code_names_are_there() -> None:
    kinds = {".py", ".yaml", ".tpl"}
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.suffix in kinds]
    named = {(ids(path), name) for path in files for name in re.findall(r"docs/[A-Z_]+\.md", path.read_text())}
    assert len(named) > 8
    assert {where for where in named if not (ROOT / where[1]).exists()} == set()


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
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", page.read_text()):
        known = members(owner)
        if known is not None and member not in known:
            wrong.append(f"{owner}.{member}")
    assert wrong == []


@cache
def members(owner: str) -> set[str] | None:
    """Names within a class of the product; None if there is none of that name."""
    for text in sources().values():
        if f"class {owner}" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and node.name == owner:
                inner = list(ast.walk(node))
                functions = {it.name for it in inner if isinstance(it, ast.FunctionDef | ast.AsyncFunctionDef)}
                attributes = {it.attr for it in inner if isinstance(it, ast.Attribute)}
                return functions | attributes | {it.id for it in inner if isinstance(it, ast.Name)}
    return None


@cache
def sources() -> dict[str, str]:
    """The product's modules."""
    rooms = ROOMS[: ROOMS.index("bench")]
    return {ids(path): path.read_text() for room in rooms for path in sorted((ROOT / room).rglob("*.py"))}


def test_the_figures_of_the_readme_were_measured() -> None:
    """Each number is in the file that stands next to it: as it is, in percent, or in thousandths."""
    figures = [row for row in rows(ROOT / "README.md") if len(row) == 4]
    assert len(figures) == 5
    for _, value, command, file in figures:
        result = json.loads((ROOT / "bench" / "results" / file.strip("`")).read_text())
        measured = [figure["value"] * scale for figure in result["figures"] for scale in (1, 100, 1000)]
        for number in re.findall(r"[\d,]*\d(?:\.\d+)?", value):
            assert any(float(number.replace(",", "")) == pytest.approx(it, rel=0.01) for it in measured), number
        assert re.match("`shoal bench ", command)


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
    page = (ROOT / "docs" / "MODELS.md").read_text().split("## What is served")[1].split("\n## ")[0]
    named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in page.splitlines() if row.startswith("|"))))
    families = set()
    for name, text in sources().items():
        if name.startswith("worker/models/families/"):
            for node in ast.parse(text).body:
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAMILIES":
                    families |= {key.value for key in getattr(node.value, "keys", []) if isinstance(key, ast.Constant)}
    assert len(families) > 60
    assert families - named == set()


def test_private_parts_of_dependencies_are_on_the_page_about_upgrades() -> None:
    page = (ROOT / "docs" / "UPGRADING.md").read_text()
    users = {name for name, text in sources().items() if PRIVATE.search(text)}
    assert len(users) > 8
    assert {name for name in users if f"`{name}`" not in page} == set()
