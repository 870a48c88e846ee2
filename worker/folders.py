"""Folders on disk."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder for files that Shoal can make again."""
    if own := os.environ.get("SHOAL_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shoal"
