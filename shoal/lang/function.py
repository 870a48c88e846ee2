"""`@shoal.function` makes a program of a Python function."""

from collections.abc import Callable
from typing import Any

from shoal.lang.compiler import CompiledProgram
from shoal.lang.program import Program


class Function(Program):
    """A program that runs statement by statement, as its function makes them."""

    def compile(self) -> CompiledProgram:
        """The program, run by its graph: see `shoal.lang.compiler`. Traces it on placeholders, so bind the arguments
        that decide which way it takes."""
        return CompiledProgram(self.func, self.num_api_spec_tokens, self.bound)


def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """Makes a program of a function whose first parameter is the state `s`: `@shoal.function`, or
    `@shoal.function(num_api_spec_tokens=64)`."""
    if func is not None:
        return Function(func, num_api_spec_tokens)
    return lambda func: Function(func, num_api_spec_tokens)
