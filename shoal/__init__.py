"""Shoal's public face: the `shoal` command and what it needs to talk to a running server, and the Python API.

Owns: the command line (`shoal serve | chat | pull | status | bench`), and `Engine` (`engine.py`), which runs a model
inside a program. Knows nothing of how a request is scheduled: it configures the cluster (`cluster`) and speaks HTTP to
it. Read `shoal/cli.py` first.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine import Engine as Engine
    from shoal.engine import EngineError as EngineError
    from shoal.engine import GeneratedText as GeneratedText
    from shoal.engine import RequestError as RequestError

__version__ = "0.1.0"

# The public names, and the modules that define them. A module is imported when one of its names is first used, so that
# `import shoal` takes no time.
_PUBLIC = {
    "Engine": "shoal.engine",
    "EngineError": "shoal.engine",
    "GeneratedText": "shoal.engine",
    "RequestError": "shoal.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PUBLIC[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
