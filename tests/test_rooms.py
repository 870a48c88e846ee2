"""Imports run one way between folders, as docs/DESIGN.md says, test modules import none of each other, and every folder
says what it owns."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels", "bench")
# What each folder may import besides itself, for type checking too. A top folder stands for all of its folders, unless
# it is marked with a colon: then for the files of that folder alone.
ALLOWED = {
    "shoal": {"cluster", "bench", "shoal.lang"},
    "shoal.lang": set(),
    "shoal.lang.backends": {"shoal.lang:"},
    "cluster": {"router", "worker"},
    "router": {
        "radix", "worker.client_turns", "worker.niceness", "worker.formats", "worker.messages", "router.wire",
        "router.chat", "router.formats", "router.text", "router.fleet", "router.metrics", "router.replicas",
        "router.streaming", "router.access", "router.http", "router.prepare", "router.endpoints", "router.page",
    },
    "router.wire": {"worker.messages"},
    "router.chat": set(),
    "router.formats": {"router.chat", "worker.formats"},
    "router.text": {"router.wire", "router.chat", "router.formats", "worker.formats", "worker.messages"},
    "router.fleet": {"router.wire", "router.programs", "worker.messages", "radix"},
    "router.metrics": {"router.programs", "worker.messages", "worker.sparse_log"},
    "router.replicas": {
        "router.wire", "router.fleet", "router.metrics", "worker.curve", "worker.messages", "worker.sparse_log",
    },
    "router.streaming": {"router.wire"},
    "router.access": {
        "router.wire", "router.config", "router.metrics", "router.replicas", "router.streaming", "worker.messages",
        "worker.sparse_log",
    },
    "router.http": {
        "router.wire", "router.config", "router.metrics", "router.streaming", "router.access",
        "worker.sparse_log",
    },
    "router.prepare": {
        "router.wire", "router.chat", "router.formats", "router.text", "router.config", "router.programs",
        "router.http.body", "worker.messages",
    },
    "router.page": {"router.wire", "router.metrics", "router.service", "router.models", "router.openapi"},
    "router.endpoints": {
        "router.wire", "router.chat", "router.formats.format", "router.text", "router.streaming", "router.access",
        "router.prepare", "router.programs", "router.service", "router.generation", "router.models", "router.openapi",
        "worker.messages",
    },
    "router.endpoints.embeddings": {
        "router.wire", "router.text", "router.streaming", "router.access", "router.prepare", "router.service",
        "router.generation", "router.models", "router.openapi", "router.endpoints.answering", "worker.messages",
    },
    "router.endpoints.messages": {
        "router.wire", "router.chat", "router.formats.format", "router.text", "router.streaming", "router.access",
        "router.prepare", "router.generation", "router.models", "router.openapi", "router.endpoints.answering",
    },
    "router.endpoints.responses": {
        "router.wire", "router.chat", "router.formats.format", "router.text", "router.config", "router.metrics",
        "router.streaming", "router.access", "router.http.body", "router.prepare", "router.generation",
        "router.models", "router.openapi", "router.endpoints.answering", "router.endpoints.logprobs",
        "worker.client_turns", "worker.niceness",
    },
    "worker": {"pipeline:", "radix"},
    "worker.formats": set(),
    "worker.engine": {
        "worker:", "worker.scheduler", "worker.executor", "worker.models", "worker.sampling", "worker.parallel",
        "worker.structured_output", "worker.drafts", "worker.lengths", "pipeline", "radix",
    },
    "worker.scheduler": {
        "worker:", "worker.structured_output", "worker.drafts", "worker.lengths", "pipeline", "radix",
    },
    "worker.lengths": {"worker:"},
    "worker.drafts": {"worker:", "worker.structured_output", "pipeline"},
    "worker.executor": {
        "worker:", "worker.checkpoint", "worker.models", "worker.parallel", "pipeline", "kernels",
    },
    "worker.checkpoint": {"worker:", "worker.models", "kernels"},
    "worker.models": {"worker:", "worker.models.families", "worker.parallel", "pipeline", "kernels"},
    "worker.models.families": {"worker.models:", "kernels"},
    "worker.parallel": {"worker:", "kernels.comm", "kernels.ops"},
    "worker.sampling": {"worker:", "worker.structured_output", "kernels"},
    "worker.structured_output": {
        "worker:", "worker.formats.token_bytes", "worker.structured_output.matching",
        "worker.structured_output.compiling",
    },
    "worker.structured_output.rules": {"worker.structured_output.error", "worker.structured_output.tokens"},
    "worker.structured_output.json_schema": {"worker.structured_output.error", "worker.structured_output.rules"},
    "worker.structured_output.matching": {
        "worker.messages", "worker.structured_output.error", "worker.structured_output.tokens",
        "worker.structured_output.rules", "worker.structured_output.json_schema",
    },
    "worker.structured_output.conversion": {
        "worker.structured_output.error", "worker.structured_output.tokens", "worker.structured_output.rules",
        "worker.structured_output.json_schema", "worker.structured_output.matching.intersections",
    },
    "worker.structured_output.tool_calls": {
        "worker.formats", "worker.structured_output.error", "worker.structured_output.tokens",
        "worker.structured_output.rules", "worker.structured_output.json_schema", "worker.structured_output.conversion",
        "worker.structured_output.matching.intersections",
    },
    "worker.structured_output.compiling": {
        "worker.formats", "worker:", "worker.structured_output.error", "worker.structured_output.tokens",
        "worker.structured_output.rules", "worker.structured_output.json_schema", "worker.structured_output.matching",
        "worker.structured_output.conversion", "worker.structured_output.tool_calls",
    },
    "pipeline": set(),
    "radix": set(),
    "kernels": set(),
    "kernels.attention": {"kernels:"},
    "kernels.attention.cpu": {"kernels:", "kernels.attention"},
    "kernels.linear": {"kernels:", "kernels.ops"},
    "kernels.lora": {"kernels:"},
    "kernels.experts": {"kernels:", "kernels.linear", "kernels.ops"},
    "kernels.recurrent": {"kernels:"},
    "kernels.delta_rule": {"kernels:", "kernels.ops", "kernels.recurrent"},
    "kernels.ssd": {"kernels:", "kernels.recurrent"},
    "kernels.ops": {"kernels:"},
    "kernels.comm": {"kernels:"},
    "bench": set(),
    "bench.load": {"bench:", "shoal", "worker"},
    "bench.replica": {"bench:", "bench.load", "shoal", "cluster", "worker", "pipeline", "kernels"},
    "bench.placement": {"bench:", "bench.load", "bench.replica", "shoal"},
    "bench.chaos": {"bench:", "bench.load", "bench.replica", "shoal", "cluster", "worker"},
    "bench.door": {"bench:", "bench.load", "bench.replica", "shoal"},
    "bench.fleet": {
        "bench:", "bench.load", "bench.replica.dummy_models", "shoal", "router", "worker", "pipeline", "radix",
    },
    "bench.overhead": {"bench:", "bench.load", "bench.replica", "shoal", "cluster", "router", "worker"},
    "bench.lengths": {"bench:", "bench.load", "bench.pipeline", "shoal", "cluster", "worker", "pipeline"},
    "bench.correctness": {"bench:", "bench.load", "bench.replica", "shoal", "cluster", "worker", "pipeline"},
    "bench.correctness.clients": {"bench:", "shoal"},
    "bench.schemas": {"bench:", "bench.load", "bench.replica", "shoal", "cluster", "worker"},
    "bench.programs": {"bench:", "bench.load", "bench.replica", "shoal", "cluster"},
    "bench.pipeline": {"bench:", "bench.load", "bench.replica", "shoal", "cluster", "worker", "pipeline", "radix"},
}  # fmt: skip
# `shoal.Engine` has the name that offline users know from other engines; the replica's own one is inside.
SHARED_NAMES = {"Engine": ["shoal.engine", "worker.engine.engine"]}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for room in ROOMS
    for path in sorted((ROOT / room).rglob("*.py"))
}


def folder(module: str) -> str:
    return ".".join(MODULES[module].relative_to(ROOT).parent.parts)


@dataclass(frozen=True)
class Source:
    """What a file says that these tests ask for; its whole tree would be large to keep."""

    doc: str | None
    imports: list[ast.Import | ast.ImportFrom]
    classes: list[str]


@cache
def read(path: Path) -> Source:
    tree = ast.parse(path.read_text())
    found = list(statements(tree.body))
    imports = [each for each in found if isinstance(each, ast.Import | ast.ImportFrom)]
    return Source(ast.get_docstring(tree), imports, [each.name for each in found if isinstance(each, ast.ClassDef)])


def statements(block: list[Any]) -> Iterator[ast.stmt]:
    """Those of a block and of all within them."""
    for each in block:
        if isinstance(each, ast.stmt):
            yield each
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            if inner := getattr(each, name, None):
                yield from statements(inner)


@cache
def imported(path: Path) -> frozenset[str]:
    names: set[str] = set()
    for node in read(path).imports:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        else:
            assert node.level == 0 and node.module is not None, f"{path}: relative import"
            below = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else node.module for name in below}
    return frozenset(names & MODULES.keys())


def is_allowed(own: str, module: str) -> bool:
    if folder(module) == own:
        return True
    allowed = ALLOWED[own]
    return (
        f"{folder(module)}:" in allowed
        or module in allowed
        or any(folder(module) == name or folder(module).startswith(f"{name}.") for name in allowed)
    )


@pytest.mark.parametrize("own", sorted({folder(module) for module in MODULES}))
def test_imports_run_one_way(own: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for module, path in MODULES.items()
        if folder(module) == own
        for name in sorted(imported(path))
        if not is_allowed(own, name)
    ]
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    arrows = {module: imported(path) - {module} for module, path in MODULES.items()}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        raise AssertionError(f"modules import each other: {error.args[1]}") from None


def layer(module: str) -> str:
    """A folder without further ones is one layer; each file of another folder is one."""
    own = folder(module)
    return module if any(name.startswith(f"{own}.") for name in ALLOWED) else own


def test_no_folder_imports_itself_by_way_of_others() -> None:
    arrows: dict[str, set[str]] = defaultdict(set)
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            arrows[layer(module)] |= {layer(name) for name in imported(path)} - {layer(module)}
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        raise AssertionError(f"folders import each other: {error.args[1]}") from None


def test_no_test_module_imports_another() -> None:
    """What tests share lies in modules of its own, which a test that moves or goes does not take along."""
    wrong: list[str] = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in read(path).imports:
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("tests.")]
            elif node.level or (node.module or "").split(".")[0] == "tests":
                names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
            modules = {part for name in names for part in name.split(".") if part.startswith("test_")}
            wrong += [f"{path.relative_to(ROOT)} imports {module}" for module in sorted(modules)]
    assert wrong == []


def test_no_class_is_defined_twice() -> None:
    """Somebody who searches for a class finds one."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, path in MODULES.items():
        for name in read(path).classes:
            found[name].append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == SHARED_NAMES


@pytest.mark.parametrize("own", sorted({folder(module) for module in MODULES}))
def test_a_folder_says_what_it_owns_and_where_to_begin(own: str) -> None:
    doc = read(MODULES[own]).doc
    assert doc is not None and len(doc.split()) > 15
    assert re.search(r"Read\s+`\S+\.py` first", doc), "it does not say which file to read first"
