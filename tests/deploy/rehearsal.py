"""What the rehearsals of `ray up` and of the chart have in common: the time that they have, and their command line."""

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import httpx

from tests.deploy.hosts import missing

ROOT = Path(__file__).parents[2]
VENV = Path(sys.prefix)
WAIT_S = 600.0
PROMPT = "streams that last"
# A step's time: twenty tokens a second, as of a large model; with longer streams the context has to suffice.
STEP_S = 0.05
CONTEXT = 4000
POLL_S = 0.1


def step_s(stream_s: float) -> float:
    """How long a step takes for streams of this length, in seconds."""
    return max(STEP_S, stream_s / CONTEXT)


def shown(*more: Path) -> list[str]:
    """What hosts need of this machine and would not see: the checkout and its environment, if they lie in /tmp."""
    return [str(folder) for folder in (ROOT, VENV, *more) if folder.is_relative_to("/tmp")]


def made_model(folder: Path) -> Path:
    """A tiny model, which the hosts' user may read."""
    from tests.conftest import make_tiny_llama

    model = make_tiny_llama(folder / "tiny-llama")
    for file in model.iterdir():
        file.chmod(0o644)
    return model


def until(true: Callable[[], Any], what: str, within_s: float = WAIT_S, poll_s: float = POLL_S) -> Any:
    """Polls: what is waited for is another process's doing. `poll_s`: between looks, more for those that take CPU time
    from what is waited for."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if result := true():
                return result
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(poll_s)


@cache
def undisturbed(model: Path, tokens: int) -> str:
    """What the model says, computed in this process alone."""
    from tokenizers import Tokenizer

    from cluster.config import Config
    from worker.engine.engine import Engine
    from worker.messages import SamplingParams

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    settings: dict[str, Any] = {"model": str(model), "device": "cpu", "kv_tokens": 8192, "cpu_threads": 1}
    with contextlib.closing(Engine(model, Config(**settings))) as alone:
        asked = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
        (found,) = alone.generate([tokenizer.encode(PROMPT).ids], asked)
    return str(tokenizer.decode(found.token_ids))


def command(about: str, rehearsed: Callable[[Path, argparse.Namespace], dict[str, Any]], **options: float) -> int:
    """A rehearsal as a command: with streams of ten minutes unless it is told another length. `rehearsed` returns the
    figures, which are printed, and written to a file if one is named. `options`: more of them, with their defaults."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stream-s", type=float, default=600.0, help="how long a stream lasts, in seconds")
    for name, default in options.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=default, help=f"the server's {name}")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    args = parser.parse_args()
    if why := missing():
        parser.error(why)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # as `timeout` sends it: what runs in the hosts ends too
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(rehearsed(Path(folder), args), indent=2)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")
    return 0
