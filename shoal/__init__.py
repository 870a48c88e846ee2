"""Shoal's public face: the `shoal` command, the language of programs, and the Python API.

Owns: the command line (`shoal serve | chat | pull | status | doctor | bench`), `Engine` (`engine.py`), which runs a
model inside a Python process, and the language (`lang/`). Knows nothing of how a request is scheduled: it configures
the cluster (`cluster`) and speaks HTTP to it. Read `cli.py` first for the command, `lang/function.py` for the language.

`import shoal` loads a name's module when the name is first used, so it is light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.engine import Engine as Engine
    from shoal.engine import EngineError as EngineError
    from shoal.engine import GeneratedText as GeneratedText
    from shoal.engine import RequestError as RequestError
    from shoal.runtime import Runtime as Runtime

__version__ = "0.1.0"

_NAMES = {
    "shoal.engine": "Engine EngineError GeneratedText RequestError",
    "shoal.runtime": "Runtime",
    "shoal.lang.api": (
        "assistant assistant_begin assistant_end flush_cache gen gen_int gen_string get_server_info image select "
        "separate_reasoning system system_begin system_end unordered user user_begin user_end video"
    ),
    "shoal.lang.backends.anthropic": "Anthropic",
    "shoal.lang.backends.openai": "OpenAI",
    "shoal.lang.backends.shoal_server": "ShoalServer RuntimeEndpoint",
    "shoal.lang.choices": (
        "ChoicesDecision ChoicesSamplingMethod greedy_token_selection token_length_normalized "
        "unconditional_likelihood_normalized"
    ),
    "shoal.lang.errors": "BackendError NotSupported ProgramError",
    "shoal.lang.function": "Function function",
    "shoal.lang.loop": "in_thread",
    "shoal.lang.program": "global_config set_default_backend",
    "shoal.lang.state": "ProgramState",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'shoal' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
