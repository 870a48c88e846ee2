"""Folders on disk."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """The folder for files that Shoal can make again."""
    if own := os.environ.get("SHOAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"


@contextmanager
def replaced(file: Path) -> Iterator[Path]:
    """Yields a path of this process to write, which then takes the place of `file` at once: half of it is never read,
    and of several processes the last one wins. What an error leaves half written is removed. Makes the folder. Raises
    OSError if it cannot be written."""
    file.parent.mkdir(parents=True, exist_ok=True)
    half = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        yield half
        half.replace(file)
    except BaseException:
        half.unlink(missing_ok=True)
        raise
