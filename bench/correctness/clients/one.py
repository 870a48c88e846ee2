"""The checks of one client in this environment, for `command.py`. Each line of standard output is a JSON object: first
the versions of the installed packages, then the features as they are checked."""

import importlib
import importlib.metadata
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from bench.correctness.clients.catalog import CLIENTS, ShippedClient
from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.javascript import modules

PACKAGE = "bench.correctness.clients"


def checks_of(client: ShippedClient) -> Checks:
    """The checks of a client. Raises ImportError if its package is not installed."""
    found = importlib.import_module(f"{PACKAGE}.{client.module}").checks
    assert isinstance(found, Checks)
    return found


def installed(client: ShippedClient) -> dict[str, str]:
    """The versions of the required packages and programs that are installed."""
    names = [re.split(r"[\[=<>~!]", requirement)[0] for requirement in client.requirements]
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for package in (spec.rpartition("@")[0] for spec in client.packages):
        described = modules() / package / "package.json"
        if described.exists():
            versions[package] = json.loads(described.read_text())["version"]
    if client.program:
        said = subprocess.run(client.program, capture_output=True, text=True, check=True).stdout
        versions[Path(client.program[0]).name] = re.sub(r"^\D*", "", said).split()[0]
    return versions


def main(argv: list[str]) -> int:
    """Runs the checks of a client: its name, the server's URL, the model, and its folder or nothing."""
    name, url, model, folder = argv
    client = CLIENTS[name]
    # Clients print what they like: their words go to standard error.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    checks = checks_of(client)
    print(json.dumps({"versions": installed(client)}), file=lines)
    for outcome in checks.run(ServedModel(url, model, Path(folder) if folder else None)):
        print(json.dumps(asdict(outcome)), file=lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
