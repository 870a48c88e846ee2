"""Agents that are command-line programs, run as a user would: each with its own home folder, through a director."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.correctness.clients import programs
from bench.correctness.clients.checks import ServedModel
from bench.correctness.clients.director import Director, Exchange

WAIT_S = 240
SAID = "Hello!"  # by the made-up model
MARK = "shoal-was-here"  # what the agent's tool prints, so that the model reads it


@dataclass
class Agent:
    """A program's surroundings. `home`: its home folder; `work`: the folder that it works in."""

    director: Director
    model: str
    home: Path
    work: Path

    def run(self, *command: str, ends: tuple[int, ...] = (0,), **variables: str) -> str:
        """The output of a program. Raises AssertionError with the end of it if the program takes too long, or ends with
        another code than one of `ends`."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "NODE_OPTIONS") if name in os.environ}
        folders = {"HOME": str(self.home), "XDG_CONFIG_HOME": str(self.home / ".config"), "TMPDIR": str(self.home)}
        variables = kept | folders | {"NO_COLOR": "1"} | variables
        return programs.finish(command, self.work, variables, WAIT_S, ends, self.answers)

    def answers(self) -> list[str]:
        """The requests so far, in short, for errors."""
        return [f"{each.path} {each.status} {each.answer[:200]}" for each in self.director.exchanges]

    def all_taken(self) -> list[Exchange]:
        """The requests, all of which must have been answered with 200."""
        refused = [f"{each.path} {each.status}: {each.answer[:500]}" for each in self.director.refused]
        assert not refused, refused
        assert self.director.exchanges, "nothing was asked"
        return self.director.exchanges


@contextmanager
def agent(at: ServedModel) -> Iterator[Agent]:
    """Surroundings for a program, which end with it."""
    with Director(at.url) as director, tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        subprocess.run(["git", "init", "--quiet"], cwd=work, check=True)
        yield Agent(director, at.model, home, work)


def program(name: str) -> str:
    """The path of a program that npm has installed in this environment. Raises AssertionError if it is not there."""
    own = Path(sys.prefix) / "node_modules" / ".bin" / name
    found = str(own) if own.exists() else shutil.which(name)
    assert found is not None, f"there is no {name}: run with --environments, or have npm install it"
    return found


def results_of(exchange: Exchange) -> str:
    """The results of tools that a request sends back, as JSON."""
    found: list[Any] = []
    for message in [*exchange.sent.get("messages", ()), *exchange.sent.get("input", ())]:
        if not isinstance(message, dict):
            continue
        if message.get("role") == "tool" or message.get("type") == "function_call_output":
            found.append(message)
        if isinstance(message.get("content"), list):
            found += [part for part in message["content"] if part.get("type") == "tool_result"]
    return json.dumps(found)


def came_back(exchanges: list[Exchange], text: str = MARK) -> bool:
    """Whether a request sends back the result of a tool with this text in it."""
    return any(text in results_of(exchange) for exchange in exchanges)
