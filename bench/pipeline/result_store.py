"""Measurements of one benchmark, each written to the result file as soon as it is made, so that an interrupted sweep
continues where it was."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import results
from bench.results import Figure


class Points:
    """Results by key, each made once."""

    def __init__(self) -> None:
        self.points: dict[str, Any] = {}

    def point(self, key: str, make: Callable[[], Any]) -> Any:
        """The result for `key`. `make` is called the first time only."""
        if key not in self.points:
            self.points[key] = make()
        return self.points[key]


class ResultStore(Points):
    """The points of a result file. Points that an earlier run with the same settings made are not made again."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], fresh: bool = False) -> None:
        """`settings`: everything on which points depend and that is not in their keys, as JSON holds it. `fresh`:
        ignores the results of an earlier run.

        Raises ValueError for a name that no result can have, and for a file that was made with other settings or cannot
        be read.
        """
        super().__init__()
        results.check_name(name)
        self.name, self.folder = name, folder
        self.path = folder / f"{name}.json"
        self.settings = json.loads(json.dumps(settings))
        self.figures: list[Figure] = []
        self.raw: dict[str, Any] = {}
        self.commit = results.commit() or "unknown"
        self.commits: dict[str, str] = {}  # commit at which each point was made
        if not fresh:
            self._resume()

    def point(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.points:
            self.points[key] = _rounded(make())
            self.commits[key] = self.commit
            self.write()
        return self.points[key]

    def write(self) -> Path:
        """Writes the result file with everything found so far. Returns its path."""
        raw = {"settings": self.settings, **self.raw, "points": self.points, "commits": self.commits}
        return results.write(self.name, self.figures, raw, folder=self.folder)

    def _resume(self) -> None:
        try:
            saved = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}; --fresh starts over") from error
        there = saved.get("settings", {})
        if different := sorted(
            key for key in there.keys() | self.settings.keys() if there.get(key) != self.settings.get(key)
        ):
            made = f"{self.path} was made with another {', '.join(different)}"
            raise ValueError(f"{made}: --name makes another file, --fresh replaces it")
        self.points = saved.get("points", {})
        made = saved.get("commits", {})
        self.commits = {key: made.get(key) or saved.get("commit") or "unknown" for key in self.points}
        if self.points:
            say(f"{len(self.points)} points of {self.path.name} are there already")
        # Two dirty trees of one commit need not be the same code.
        if others := sorted({of for of in self.commits.values() if of != self.commit or of.endswith("-dirty")}):
            say(f"  they were made at {', '.join(others)}, and this is {self.commit}: --fresh measures them again")


def _rounded(made: Any) -> Any:
    """The result with all numbers rounded to six significant digits: more are not measured."""
    if isinstance(made, dict):
        return {key: _rounded(value) for key, value in made.items()}
    if isinstance(made, list):
        return [_rounded(value) for value in made]
    return float(f"{made:.6g}") if isinstance(made, float) else made


def say(line: str) -> None:
    """Prints a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
