"""The state of a program, `s`: what a program's function is called with, and what `run` returns."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from html import escape
from typing import Any

from shoal.lang import loop, timeline
from shoal.lang.branch import Branch
from shoal.lang.ir import Expr, ExprList, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd, parts_of
from shoal.lang.statements import JoinPoint, Segment
from shoal.lang.timeline import CallRecord


class ProgramState:
    """A line of text that a program extends.

    `s += text + gen("x")` appends, and returns at once. `s["x"]` waits until the variable is there. `s.text()` and what
    reads all of it waits until everything so far has run; on the state that `run` returns, until the program has ended.
    Everything that waits raises ProgramError if a statement of this state has failed. In a coroutine,
    `await s.get("x")`.
    """

    def __init__(self, branch: Branch, is_outside: bool = False) -> None:
        """`is_outside`: the state is read by a caller of the program, who waits for what the program has yet to do."""
        self._branch = branch
        self._is_outside = is_outside
        self.run = branch.run
        self.ret_value: Any = None  # what the program's function returned

    # ------------------------------------------------------------ appending

    def __iadd__(self, other: Expr | str) -> "ProgramState":
        self._submit(other)
        return self

    def append(self, other: Expr | str) -> None:
        """As `s += other`, for use within an expression."""
        self._submit(other)

    def _submit(self, other: Expr | str) -> None:
        parts = parts_of(other)
        self._branch.submit(parts[0] if len(parts) == 1 else ExprList(parts))

    def system(self, expr: Expr | str | None = None) -> AbstractContextManager[None]:
        """A message of the system: `s.system("...")`, or `with s.system(): s += ...`."""
        return self._message("system", expr)

    def user(self, expr: Expr | str | None = None) -> AbstractContextManager[None]:
        """A message of the user, as `system`."""
        return self._message("user", expr)

    def assistant(self, expr: Expr | str | None = None) -> AbstractContextManager[None]:
        """A message of the assistant, as `system`."""
        return self._message("assistant", expr)

    def _message(self, role: str, expr: Expr | str | None) -> AbstractContextManager[None]:
        if expr is not None:
            self._branch.submit(ExprList((RoleBegin(role), *parts_of(expr), RoleEnd(role))))
            return nullcontext()
        return self._between(RoleBegin(role), RoleEnd(role))

    def var_scope(self, name: str) -> AbstractContextManager[None]:
        """Sets a variable to all text that is appended within `with s.var_scope(name):`."""
        return self._between(VarScopeBegin(name), VarScopeEnd(name))

    @contextmanager
    def _between(self, begin: Expr, end: Expr) -> Iterator[None]:
        self._branch.submit(begin)
        yield
        self._branch.submit(end)

    # ------------------------------------------------------------ forks

    def fork(self, size: int = 1, position_ids_offset: list[int] | None = None) -> "ProgramStateGroup":
        """`size` states that begin with what is here, and run at the same time. `position_ids_offset` is SGLang's, and
        must be None: positions follow from the text."""
        if position_ids_offset is not None:
            raise ValueError("position_ids_offset is not supported: positions follow from the text")
        if size < 0:
            raise ValueError(f"a fork has {size} states; it may have none or more")
        return ProgramStateGroup([ProgramState(branch) for branch in self._branch.fork(int(size))], self)

    @contextmanager
    def copy(self, position_ids_offset: list[int] | None = None) -> "Iterator[ProgramState]":
        """A state that begins with what is here: `with s.copy() as other:`. Its variables are gathered at the end."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        finally:
            group.join()

    # ------------------------------------------------------------ reading

    def __getitem__(self, name: str) -> Any:
        variable = self._branch.variables.get(name)
        if variable is not None and variable.done:
            return variable.value
        return self._wait(self.get(name))

    def __setitem__(self, name: str, value: Any) -> None:
        self._branch.set_variable(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._branch.variables

    def get(self, name: str) -> Any:
        """An awaitable of a variable's value, for coroutines."""
        return self._branch.get(name, self._is_outside)

    def get_var(self, name: str) -> Any:
        """As `s[name]`."""
        return self[name]

    def set_var(self, name: str, value: Any) -> None:
        """As `s[name] = value`."""
        self[name] = value

    def variables(self) -> dict[str, Any]:
        """All variables that are whole, once everything so far has run."""
        return {name: variable.value for name, variable in self._synced().variables.items() if variable.done}

    def get_meta_info(self, name: str, timeout: float | None = None) -> Any:
        """Details of how a variable was generated: finish_reason, token counts, log probabilities. Raises TimeoutError
        after `timeout` seconds."""
        return self._wait(asyncio.wait_for(self._branch.meta(name, self._is_outside), timeout))

    def text(self) -> str:
        """All text, once everything so far has run."""
        return self._synced().text

    def messages(self) -> list[dict[str, Any]]:
        """The conversation in OpenAI's form, once everything so far has run."""
        return list(self._synced().messages)

    def segments(self) -> list[Segment]:
        """The text in its parts: which were generated, and as which variable."""
        return list(self._synced().segments)

    def sync(self) -> None:
        """Waits until everything so far has run."""
        self._synced()

    def error(self) -> BaseException | None:
        """The first failure, once everything so far has run; None if nothing has."""
        if not self._branch.has_run(self._is_outside):
            self._wait(self._branch.drained(self._is_outside))
        return self._branch.error or self._branch.run.error

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """The text, or a variable's, as it grows. Under `run(..., stream=True)` pieces come while the model generates,
        otherwise call by call."""
        pieces = self._branch.pieces(var_name)
        while True:
            piece = self._wait(_next(pieces))
            if piece is None:
                return
            yield piece[0]

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `text_iter`, for coroutines. `return_meta_data`: yields (text, details) instead of texts."""
        own, pieces = self._branch.run.loop, self._branch.pieces(var_name)
        while True:
            if asyncio.get_running_loop() is own:
                piece = await _next(pieces)
            else:
                piece = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_next(pieces), own))
            if piece is None:
                return
            yield piece if return_meta_data else piece[0]

    # ------------------------------------------------------------ showing

    def calls(self) -> list[CallRecord]:
        """The calls of the whole program so far: when, how long, and how many tokens."""
        return list(self._branch.run.calls)

    def calls_table(self) -> str:
        """The calls of the whole program as a table."""
        return timeline.table(self.calls())

    def trace_json(self) -> str:
        """The calls of the whole program as a time line that https://ui.perfetto.dev opens."""
        return timeline.trace_json(self.calls())

    def _repr_html_(self) -> str:
        """For notebooks: the text, what was generated marked, with its variable as a tip."""
        parts = [
            f'<span style="background:#d8f5d0" title="{escape(part.name or "")}">{escape(part.text)}</span>'
            if part.generated
            else escape(part.text)
            for part in self._branch.segments
        ]
        return f'<pre style="white-space:pre-wrap">{"".join(parts)}</pre>'

    def __rich__(self) -> Any:
        """For rich's print: the text, what was generated in green."""
        from rich.text import Text

        return Text.assemble(*((part.text, "green" if part.generated else "") for part in self._branch.segments))

    def _synced(self) -> Branch:
        if self._branch.has_run(self._is_outside) and self._branch.error is None:
            return self._branch
        return self._wait(self._branch.synced(self._is_outside))

    def _wait(self, awaitable: Any) -> Any:
        return loop.wait(awaitable, self._branch.run.loop)

    def __repr__(self) -> str:
        return f"ProgramState({self._branch.text!r})"


class ProgramStateGroup:
    """The states of a fork. `forks += expr` appends to all, `forks += [a, b]` to each its own, and
    `forks += lambda i: ...` what the function makes of its number."""

    def __init__(self, states: list[ProgramState], source: ProgramState) -> None:
        self.states = states
        self._source = source

    def join(self, mode: str = "gather_variable") -> None:
        """Ends the fork.

        | `mode` | effect on the state that was forked |
        | --- | --- |
        | gather_variable | each variable that the fork has set becomes the list of its values |
        | concate_and_append | the texts of the fork are appended, in order |
        """
        if mode not in ("gather_variable", "concate_and_append"):
            raise ValueError(f"mode is {mode!r}; it may be gather_variable or concate_and_append")
        for state in self.states:
            state._branch.close()
        branches = tuple(state._branch for state in self.states)
        self._source._branch.submit(JoinPoint(branches, append=mode == "concate_and_append"))

    def __getitem__(self, i: int) -> ProgramState:
        return self.states[i]

    def __setitem__(self, i: int, value: ProgramState) -> None:
        if value is not self.states[i]:  # `forks[i] += ...` sets the item that it took
            raise TypeError("a state of a fork cannot be replaced: use forks[i] += ...")

    def __len__(self) -> int:
        return len(self.states)

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, other: "Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]") -> "ProgramStateGroup":
        if isinstance(other, str | Expr):
            each: list[Any] = [other] * len(self.states)
        elif callable(other):
            each = [other(i) for i in range(len(self.states))]
        else:
            each = list(other)
            if len(each) != len(self.states):
                raise ValueError(f"{len(each)} expressions are added to a fork of {len(self.states)} states")
        for state, expr in zip(self.states, each, strict=True):
            state._submit(expr)
        return self


async def _next(pieces: AsyncIterator[tuple[str, Any]]) -> tuple[str, Any] | None:
    return await anext(pieces, None)
