"""What is slow to make and the same every time, made once: by one of several processes, for the others and for later
runs. It lies in the checkout's `.pytest_cache`, under a hash of all that it depends on.
"""

import fcntl
import hashlib
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent.parent / ".pytest_cache" / "kept"
T = TypeVar("T")


def kept(depends_on: list[Any], compute: Callable[[], T]) -> T:
    """The result of `compute`, as another process or an earlier run left it if there was one with the same
    `depends_on`, which is JSON. Versions of torch and `transformers` are added to it."""
    with _alone(depends_on) as place:
        file = place.with_suffix(".pickle")
        if not file.exists():
            part = file.with_suffix(".part")
            part.write_bytes(pickle.dumps(compute()))
            part.replace(file)
    result: T = pickle.loads(file.read_bytes())
    return result


def kept_folder(depends_on: list[Any], make: Callable[[Path], object]) -> Path:
    """As `kept`, of a folder that `make` fills. Whoever wants it otherwise makes a copy."""
    with _alone(depends_on) as folder:
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.replace(folder)
    return folder


@contextmanager
def _alone(depends_on: list[Any]) -> Iterator[Path]:
    """The place of what depends on this, while no other process makes it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    key = json.dumps([*depends_on, *_versions()], sort_keys=True)
    place = FOLDER / hashlib.sha256(key.encode()).hexdigest()
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield place


@cache
def _versions() -> tuple[str, str]:
    return version("torch"), version("transformers")
