"""Imports run one way between the rooms, as docs/DESIGN.md says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels", "bench")
# What each room may import besides itself. A dotted name allows that module alone.
ALLOWED = {
    "shoal": {"cluster", "bench"},
    "cluster": {"router", "worker"},
    "router": {"radix", "worker.messages"},
    "worker": {"pipeline", "radix", "kernels"},
    "pipeline": set(),
    "radix": set(),
    "kernels": set(),
    "bench": {"shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ROOMS}


@pytest.mark.parametrize("room", ROOMS)
def test_imports_run_one_way(room: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in sorted(imported(path))
        if name.split(".")[0] != room
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in ALLOWED[room])
    ]
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_what_it_owns(room: str) -> None:
    doc = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    assert doc is not None and len(doc.split()) > 15
