"""The version of this program."""

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """The version that is installed; `unknown` where none is: run from a checkout."""
    try:
        return metadata.version("shoal")
    except metadata.PackageNotFoundError:
        return "unknown"
