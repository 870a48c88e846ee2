"""Docstrings of the standard library, as JSON: texts that every Python has.

python -m bench.lengths.docstrings
"""

import importlib
import inspect
import json
import sys
import warnings

# Modules of the standard library that have many documented functions, and whose import does nothing.
MODULES = "argparse ast asyncio calendar collections copy csv datetime decimal difflib email fractions functools glob"
MODULES += " hashlib heapq html http inspect io itertools json logging math mimetypes operator os pathlib pickle random"
MODULES += " re shutil socket sqlite3 statistics string subprocess tarfile tempfile textwrap threading time tokenize"
MODULES += (
    " traceback types typing unittest urllib.parse urllib.request uuid wave weakref xml.dom xml.etree.ElementTree"
)
MODULES += " zipfile"


def docstrings() -> dict[str, str]:
    """Docstrings of the functions and methods of `MODULES`, by qualified name."""
    found: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in MODULES.split():
            module = importlib.import_module(name)
            holders: list[tuple[str, object]] = [(name, module)]
            holders += [(f"{name}.{n}", c) for n, c in vars(module).items() if inspect.isclass(c) and n[0] != "_"]
            for prefix, holder in holders:
                for member, value in vars(holder).items():
                    doc = inspect.getdoc(value) if callable(value) and member[0] != "_" else None
                    if doc and 60 <= len(doc) <= 900:
                        found.setdefault(doc, f"{prefix}.{member}")
    return {name: doc for doc, name in found.items()}


if __name__ == "__main__":
    json.dump(docstrings(), sys.stdout)
