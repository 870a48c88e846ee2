"""Many measurements of one benchmark, each kept in the result file as soon as it is made: a sweep that was interrupted
goes on where it was."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import results
from bench.results import Figure


class Points:
    """What was found out, by key: once for each."""

    def __init__(self) -> None:
        self.points: dict[str, Any] = {}

    def point(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` returns, or returned when this key was asked for first."""
        if key not in self.points:
            self.points[key] = make()
        return self.points[key]


class Sweep(Points):
    """The points of a result file. Those that an earlier run with the same settings made are not made again."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any], fresh: bool = False) -> None:
        """`settings`: all that a point depends on and its key does not say, as JSON holds it. With `fresh`, what an
        earlier run made is not looked at. Raises ValueError for a name that no result can have, and for a file that was
        made with other settings, or cannot be read."""
        super().__init__()
        results.check_name(name)
        self.name, self.folder = name, folder
        self.path = folder / f"{name}.json"
        self.settings = json.loads(json.dumps(settings))
        self.figures: list[Figure] = []
        self.raw: dict[str, Any] = {}
        self.commit = results.commit() or "unknown"
        self.commits: dict[str, str] = {}  # under which each point was made
        if not fresh:
            self._resume()

    def point(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self.points:
            self.points[key] = _rounded(make())
            self.commits[key] = self.commit
            self.write()
        return self.points[key]

    def write(self) -> Path:
        """The result file, with all that there is so far."""
        raw = {"settings": self.settings, **self.raw, "points": self.points, "commits": self.commits}
        return results.write(self.name, self.figures, raw, folder=self.folder)

    def _resume(self) -> None:
        try:
            saved = json.loads(self.path.read_text())
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.path} cannot be read: {error}; --fresh begins anew") from error
        there = saved.get("settings", {})
        if different := sorted(
            key for key in there.keys() | self.settings.keys() if there.get(key) != self.settings.get(key)
        ):
            made = f"{self.path} was made with another {', '.join(different)}"
            raise ValueError(f"{made}: --name makes a file beside it, --fresh replaces it")
        self.points = saved.get("points", {})
        made = saved.get("commits", {})
        self.commits = {key: made.get(key) or saved.get("commit") or "unknown" for key in self.points}
        if self.points:
            say(f"{len(self.points)} points of {self.path.name} are there already")
        # Two that have changes on top need not be the same code.
        if others := sorted({of for of in self.commits.values() if of != self.commit or of.endswith("-dirty")}):
            say(f"  they were made at {', '.join(others)}, and this is {self.commit}: --fresh measures them again")


def _rounded(made: Any) -> Any:
    """With six digits of every number: more was not measured."""
    if isinstance(made, dict):
        return {key: _rounded(value) for key, value in made.items()}
    if isinstance(made, list):
        return [_rounded(value) for value in made]
    return float(f"{made:.6g}") if isinstance(made, float) else made


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)
