"""A stranger on the network of a server: what it can read and change without a key.

    python -m tests.deploy.stranger --out /tmp/stranger     # door.stranger.json; needs root

The server is a real `shoal serve` with keys, in a network namespace of its own, and listens on an address that the
stranger reaches from another one. The stranger tries every port on which anything listens there, whatever the address:

| port | what it tries |
| --- | --- |
| all | a connection |
| the routers' | each path of the page, with each of its methods, without a key and with a wrong one |
| all others that it reaches | ZeroMQ in plain, with a password and with keys of another secret; HTTP |

What must be reached by the server's own machines alone (docs/SECURITY.md) is on its loopback interface here.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.results import Figure, write
from tests import strangers
from tests.deploy.hosts import Host, Network
from worker.curve import REPLICA, ROUTER, SECRET_BYTES, Curve
from worker.messages import PROTOCOL, Adapter, AdapterChange, Generate, SamplingParams, Subscribe, UsageReport, encode

PORT, KEY = 8000, "sk-its-own"
# Without a key by intent: docs/LIMITS.md, "Doors".
OPEN = {"/", "/health", "/ping", "/ready", "/health_generate", "/version"}
FRAMES = [
    encode(Subscribe("stranger", "tcp://127.0.0.1:9", PROTOCOL)),
    encode(
        Generate(request_id="theirs", prompt_ids=[5, 6, 7], sampling=SamplingParams(max_tokens=3), priority=1 << 30)
    ),
    encode(UsageReport("stranger", {}, {"client": []})),
    encode(AdapterChange([Adapter("evil", "/")])),
    b"junk",
]


@dataclass
class Found:
    """What a stranger found. `reached`: ports. `read_bytes`: of messages, and of answers to what needs a key.
    `statuses`: of the answers to what needs a key, by path."""

    reached: set[int] = field(default_factory=set)
    read_bytes: int = 0
    statuses: dict[str, set[int]] = field(default_factory=dict)


@contextmanager
def served(on: Host, folder: Path, model: Path) -> Iterator[str]:
    """The address of a server with a key, which ends at the end."""
    keys = folder / "keys.yaml"
    keys.write_text(f"keys:\n  - {{key: {KEY}, name: own, admin: true}}\n")
    command = [
        "ip", "netns", "exec", on.namespace, sys.executable, "-m", "shoal.cli", "serve", "--model", str(model),
        "--host", on.address, "--replica-host", on.address, "--port", str(PORT), "--replicas", "1",
        "--kv-tokens", "16384", "--context-length", "320", "--api-key-file", str(keys),
        "--require-auth-for-metrics-endpoint", "--response-store-dir", str(folder / "responses"),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            if not any("Ctrl-C" in line for line in process.stdout):
                raise RuntimeError("the server has not started")
            yield f"http://{on.address}:{PORT}"
        finally:
            process.terminate()


def owner(url: str) -> tuple[Any, ...]:
    """What the server's owner sees: an answer, the models, and the tokens that were counted before."""
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=strangers.WAIT_MS / 1000) as at:
        counted = [line for line in at.get("/metrics").text.splitlines() if line.startswith("shoal_client_tokens")]
        models = at.get("/v1/models").json()["data"]
        asked = {"model": models[0]["id"], "prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = at.post("/v1/completions", json=asked)
        answer.raise_for_status()
        return answer.json()["choices"], [model["id"] for model in models], sorted(counted)


def paths(url: str) -> list[tuple[str, str]]:
    """Methods and paths of the page."""
    page = httpx.get(f"{url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    listed = [(method.upper(), path) for path, operations in page["paths"].items() for method in operations]
    return [*listed, ("GET", "/metrics"), ("GET", "/state"), ("GET", "/docs"), ("GET", "/openapi.json")]


def tries(address: str, ports: set[int], asked: list[tuple[str, str]]) -> Found:
    """All that the stranger tries."""
    found = Found()
    for port in sorted(ports):
        try:
            httpx.get(f"http://{address}:{port}/health", timeout=5)
        except httpx.ConnectError:
            continue
        except httpx.HTTPError:
            pass
        found.reached.add(port)
        if port == PORT:
            asks(f"http://{address}:{port}", asked, found)
            continue
        place = f"tcp://{address}:{port}"
        others = (Curve(os.urandom(SECRET_BYTES), kind) for kind in (REPLICA, ROUTER))
        for keys in (strangers.WithoutKeys(), strangers.WithAPassword(), *others):
            speakers = strangers.SPEAKERS if isinstance(keys, strangers.WithoutKeys) else strangers.SPEAKERS[:1]
            found.read_bytes += sum(strangers.read_bytes(place, keys, FRAMES, speaker) for speaker in speakers)
    return found


def asks(url: str, asked: list[tuple[str, str]], found: Found) -> None:
    """Each path without a key and with a wrong one."""
    body = {"model": "tiny-llama", "prompt": "Once", "messages": [{"role": "user", "content": "Hi"}], "input": "Hi"}
    with httpx.Client(base_url=url, timeout=strangers.WAIT_MS / 1000) as at:
        for method, path in asked:
            if path in OPEN:
                continue
            for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"X-Api-Key": "sk-wrong"}):
                answer = at.request(method, path.replace("{", "").replace("}", ""), json=body, headers=headers)
                found.statuses.setdefault(path, set()).add(answer.status_code)
                found.read_bytes += len(answer.content) if answer.status_code < 400 else 0


def within(site: Network, host: Host, does: Any, *arguments: Any) -> Any:
    """The result of a call whose sockets are a host's."""
    with ThreadPoolExecutor(1, initializer=site.enter, initargs=(host,)) as thread:
        return thread.submit(does, *arguments).result()


def visit(folder: Path, model: Path) -> tuple[Found, set[int], tuple[Any, ...], tuple[Any, ...]]:
    """What a stranger found, the ports on which anything listened, and what the owner saw before and after."""
    site = Network(f"shoal{os.getpid()}", folder)
    try:
        server, stranger = site.add("server"), site.add("stranger")
        with served(server, folder, model) as url:
            asked = within(site, server, paths, url)
            within(site, server, owner, url)
            before = within(site, server, owner, url)
            ports = server.ports()
            found = within(site, stranger, tries, server.address, ports, asked)
            return found, ports, before, within(site, server, owner, url)
    finally:
        site.close()


def main(arguments: list[str] | None = None) -> int:
    from tests.conftest import make_tiny_llama

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."), help="folder of the result, door.stranger.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        found, ports, _, _ = visit(Path(scratch), make_tiny_llama(Path(scratch) / "tiny-llama"))
    figures = [
        Figure("door.stranger.read_bytes", found.read_bytes, "bytes", False),
        Figure("door.stranger.reached", len(found.reached), "ports", False),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    about = {"listening": len(ports), "paths": {path: sorted(got) for path, got in found.statuses.items()}}
    print(write("door.stranger", figures, about, folder=options.out), found.read_bytes, sorted(found.reached))
    return 1 if found.read_bytes else 0


if __name__ == "__main__":
    sys.exit(main())
