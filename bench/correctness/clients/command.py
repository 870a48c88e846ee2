"""`shoal bench clients`: what works of which client, as a table and as a result file."""

import json
import subprocess
import sys
import tempfile
import urllib.request
import venv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import results
from bench.correctness.clients.catalog import CLIENTS
from bench.correctness.clients.checks import CheckedFeature
from bench.results import Figure
from shoal.help import Parser

ROOT = Path(results.__file__).parents[1]
EXAMPLES = """\
examples:
  shoal bench clients --client openai,anthropic                    with what is installed here
  shoal bench clients --environments ~/clients --folder MODEL      all clients, each in an environment of its own
  shoal bench clients --environments ~/clients --client codex      an agent, which npm installs: its prompts are long.
                        Without a GPU, serve a model that costs nothing to compute, of
                        python -m bench.correctness.clients.made_model SMOLLM2_FOLDER NEW_FOLDER
"""


WORKS = "works"


class ClientError(Exception):
    """A client that cannot be tried. The message says what to do."""


def tried(versions: dict[str, str], outcomes: Iterable[CheckedFeature]) -> dict[str, Any]:
    """The part of a result that is one client's: what it needs, in the versions that were there, and what became of
    each feature."""
    features = {each.feature: each.error or WORKS for each in outcomes}
    return {"commit": results.commit(), "versions": versions, "features": features}


def working(client: Mapping[str, Any]) -> float:
    """The share of a client's features that work."""
    return [*client["features"].values()].count(WORKS) / len(client["features"])


def known(path: Path) -> dict[str, dict[str, Any]]:
    """The clients of a result, by name, each with the commit at which it was tried. Empty if there is none."""
    if not path.exists():
        return {}
    result = json.loads(path.read_text())
    return {name: {"commit": result["commit"]} | client for name, client in result["clients"].items()}


def environment(folder: Path, client: str) -> Path:
    """The Python of a client's environment below `folder`, which is made if it is not there or needs other packages.
    Raises ClientError with what pip said."""
    shipped = CLIENTS[client]
    wanted = "\n".join([*shipped.requirements, *shipped.packages])
    place = folder / client
    python, stamp = place / "bin" / "python", place / ".requirements"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    venv.create(place, with_pip=True, clear=True)
    if shipped.requirements:
        _install(client, [str(python), "-m", "pip", "install", "--quiet", *shipped.requirements])
    if shipped.packages:
        (place / "package.json").write_text("{}")  # npm would otherwise look for one above
        _install(client, ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), *shipped.packages])
        for script in shipped.setup:
            _install(client, ["node", str(place / "node_modules" / script)])
    stamp.write_text(wanted)
    return python


def _install(client: str, command: list[str]) -> None:
    """Runs a command that installs a part of a client. Raises ClientError with what it said if it fails."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except FileNotFoundError:
        raise ClientError(f"{client} needs {command[0]}, which is not installed here") from None
    if done.returncode != 0:
        raise ClientError(f"cannot install {client}: {done.stdout.strip()[-2000:]}")


def attempt(client: str, python: Path, url: str, model: str, folder: Path | None) -> Iterator[dict[str, Any]]:
    """The lines that `one.py` writes in an environment. Raises ClientError if it fails."""
    command = [str(python), "-m", "bench.correctness.clients.one", client, url, model, str(folder or "")]
    with tempfile.TemporaryFile("w+") as said:
        with subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            cwd=ROOT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                yield json.loads(line)
        if process.returncode != 0:
            said.seek(0)
            raise ClientError(f"{client}: {said.read().strip()[-2000:]}")


def first_model(url: str) -> str:
    """The name of the first model that a server lists. Raises ClientError if there is no server."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, LookupError) as error:
        raise ClientError(f"{url} lists no model ({error}): is it the URL of a server, without /v1?") from None


def parser() -> Parser:
    p = Parser("shoal bench clients", __doc__, epilog=EXAMPLES)
    p.add_argument("--url", default="http://127.0.0.1:8000", help="of the server, without /v1 (default: %(default)s)")
    p.add_argument("--model", help="default: the first one that the server lists")
    p.add_argument(
        "--client", type=_clients, default=[*CLIENTS], metavar="A,B", help=f"any of {', '.join(CLIENTS)} (default: all)"
    )
    p.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        help="make an environment for each client below this folder, with the versions that its checks were written "
        "for; by default clients run in the environment of this command",
    )
    p.add_argument(
        "--folder", type=Path, help="folder of the model's files, which guidellm and lm-eval need to compare with"
    )
    p.add_argument(
        "--add", action="store_true", help="the result keeps the clients that it has; those tried now are added to it"
    )
    results.add_options(p, "clients")
    return p


def _clients(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in CLIENTS]:
        raise ValueError(f"no client {unknown[0]!r}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Tries all clients, prints a table, writes the result file after each. Returns the exit code: 1 if a feature
    fails."""
    args = parser().parse_args(argv)
    url = args.url.rstrip("/").removesuffix("/v1")
    made = None if args.environments is None else args.environments.expanduser().resolve()
    clients = known(args.out / f"{args.name}.json") if args.add else {}
    try:
        model = args.model or first_model(url)
        for client in args.client:
            python = Path(sys.executable) if made is None else environment(made, client)
            folder = None if args.folder is None else args.folder.expanduser().resolve()
            head, *rest = _printed(client, attempt(client, python, url, model, folder))
            clients[client] = tried(head["versions"], [CheckedFeature(**line) for line in rest])
            path = results.write(args.name, _figures(clients), {"model": model, "clients": clients}, folder=args.out)
    except ClientError as error:
        print(f"shoal bench clients: {error}", file=sys.stderr)
        return 1
    print(f"written: {path.name}")
    return 0 if all(working(each) == 1 for each in clients.values()) else 1


def _figures(clients: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    return [Figure(f"clients.{name}.working", working(each), "ratio", True) for name, each in clients.items()]


def _printed(client: str, lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if "feature" in line:
            error = line["error"]
            found = "works" if error is None else f"FAILS: {error}"
            print(f"{client:12} {line['seconds']:6.1f} s  {line['feature']:60} {found}", flush=True)
        else:
            print(", ".join(f"{name} {version}" for name, version in line["versions"].items()) or client, flush=True)
        yield line


if __name__ == "__main__":
    sys.exit(main())
