"""Calls that are known to follow each other on a branch, sent as one request.

When a call starts, the interpreter often knows what follows it: constant text, another call, and so on. The server is
told all of it, and begins a call as soon as the answer before it has ended. The answers come one by one, and each is
given to the call of the program that it belongs to.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from shoal.lang.backend import Call, Generated
from shoal.lang.errors import BackendError
from shoal.lang.ir import GenParams

MAX_CALLS = 64  # of one request


@dataclass(frozen=True)
class AnnouncedCall:
    """A call of a template: the constant text between the answer before and its own, and its parameters."""

    prompt: str
    params: GenParams


Body = dict[str, Any]
Answers = Callable[[Call, Body, Sequence[AnnouncedCall], str], AsyncGenerator[tuple[int, Generated], None]]


class TemplateRuns:
    """The templates that run. `answers` runs a call, with its parameters as the server takes them, and those that
    follow it, with the text after the last of them. It yields numbers and results in their order. `tasks` are those of
    the requests."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._runs: dict[str, dict[str, _TemplateRun]] = {}  # by program and branch
        self.tasks: set[asyncio.Task[None]] = set()

    async def next_answer(self, call: Call) -> Generated | None:
        """The result of a call that a template has announced; None for any other, and where the template was broken
        off before it."""
        run = self._runs.get(call.program, {}).get(call.branch)
        return None if run is None else await self._taken(run, call)

    async def begin(self, call: Call, body: Body) -> Generated | None:
        """The result of a call, with which a template begins if calls are known to follow; else None. `body`: its
        parameters, as the server takes them."""
        following, rest = _following(call.template)
        if not following:
            return None
        run = _TemplateRun(call, following)
        self._runs.setdefault(call.program, {})[call.branch] = run
        run.task = asyncio.ensure_future(self._run(run, self._answers(call, body, following, rest)))
        self.tasks.add(run.task)
        run.task.add_done_callback(self.tasks.discard)
        return await self._taken(run, call)

    def end_program(self, program: str) -> None:
        """Ends what runs for a program."""
        for run in self._runs.pop(program, {}).values():
            run.end()

    async def _taken(self, run: "_TemplateRun", call: Call) -> Generated | None:
        """The next answer of a template, if it is that of the call. The template ends with its last answer, and with
        any that it does not have."""
        result = None
        try:
            result = await run.take(call)
            return result
        finally:
            if result is None or run.is_taken:
                run.end()
                branches = self._runs.get(call.program, {})
                if branches.get(call.branch) is run:
                    del branches[call.branch]
                    if not branches:
                        del self._runs[call.program]

    async def _run(self, run: "_TemplateRun", answers: AsyncGenerator[tuple[int, Generated], None]) -> None:
        try:
            async with aclosing(answers) as results:
                async for _, result in results:
                    run.add(result)
        except BackendError:
            pass  # calls without an answer are made by themselves, and meet what is wrong
        except Exception as error:
            run.fail(error)
        finally:
            run.fail(None)


class _TemplateRun:
    """A request with its calls. Answers come in the order of the calls, and are taken in this order."""

    def __init__(self, first: Call, following: Sequence[AnnouncedCall]) -> None:
        loop = asyncio.get_running_loop()
        self.task: asyncio.Task[None] | None = None
        self._expected = [AnnouncedCall(first.text, first.params), *following]
        self._answers: list[asyncio.Future[Generated | None]] = [loop.create_future() for _ in self._expected]
        self._text = ""  # up to the end of the last answer that was taken
        self._num_taken = self._num_come = 0

    @property
    def is_taken(self) -> bool:
        """Whether all answers have been taken."""
        return self._num_taken == len(self._expected)

    async def take(self, call: Call) -> Generated | None:
        """The next answer; None if the call is not the one that was announced, or has no answer."""
        expected, answer = self._expected[self._num_taken], self._answers[self._num_taken]
        if call.text != self._text + expected.prompt or call.params != expected.params:
            return None
        result = await answer
        if result is not None:
            self._num_taken += 1
            self._text = call.text + result.texts[0]
        return result

    def add(self, result: Generated) -> None:
        if not self._answers[self._num_come].done():
            self._answers[self._num_come].set_result(result)
        self._num_come += 1

    def fail(self, error: Exception | None) -> None:
        """Ends all calls that have no answer: the next with an error if there is one, the others without a result."""
        for answer in self._answers:
            if answer.done():
                continue
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)
                error = None

    def end(self) -> None:
        """Ends the request, unless all of its answers have come: the end of its stream frees the connection."""
        if self.task is not None and self._num_come < len(self._expected):
            self.task.cancel()


def _following(template: Sequence[str | GenParams]) -> tuple[list[AnnouncedCall], str]:
    """The calls of a template that one request can have, and the constant text after the last."""
    calls: list[AnnouncedCall] = []
    text = ""
    for part in template:
        if isinstance(part, str):
            text += part
            continue
        if len(calls) == MAX_CALLS or part.stop_regex or (part.n or 1) > 1:
            break
        calls.append(AnnouncedCall(text, part))
        text = ""
    return calls, text
