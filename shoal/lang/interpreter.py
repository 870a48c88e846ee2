"""Runs expressions: a `Branch` is one line of text that grows, a `ProgramRun` is a run of a program with its branches.

A program only appends expressions to branches, and never waits for that. A branch runs its expressions in order, in a
task that exists while there are any. So independent calls run at the same time, and when a call starts, the expressions
after it are often known already: the branch tells the backend (`Call.then`, `Call.remaining`).

| thing | owner |
| --- | --- |
| text, messages, variables | the `Branch` |
| ids, defaults, the first error | the `ProgramRun` |
| what is kept of a branch's text (`Branch.held` says how much) | the backend |
"""

import asyncio
import itertools
import math
import random
import re
import uuid
from collections import deque
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from shoal.lang.backend import Backend, Call, Generated, RoleFormat
from shoal.lang.errors import NotSupported, ProgramError
from shoal.lang.ir import (
    ConstantText,
    Expr,
    ExprList,
    Gen,
    GenParams,
    Image,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    Unordered,
    VarScopeBegin,
    VarScopeEnd,
    Video,
    names_set_by,
)
from shoal.lang.media import image_part, video_part
from shoal.lang.reasoning import split_reasoning
from shoal.lang.statements import (
    ForkPoint,
    JoinPoint,
    Segment,
    Statement,
    Variable,
    VariableRef,
    place_of,
    program_line,
)
from shoal.lang.timeline import CallRecord, record

PREFETCH_CHARS = 512  # a shorter text is computed in the same step as what follows it


class ProgramRun:
    """A run of a program on a backend, with all of its branches."""

    def __init__(self, backend: Backend, defaults: GenParams, arguments: dict[str, Any], stream: bool) -> None:
        self.backend = backend
        self.roles: RoleFormat | None = None  # asked for with the first message
        self.defaults = defaults
        self.arguments = arguments
        self.stream = stream
        self.loop = asyncio.get_running_loop()
        self.id = uuid.uuid4().hex
        self.branches: list[Branch] = []
        self.calls: list[CallRecord] = []
        self.error: BaseException | None = None
        self.task: asyncio.Task[None]  # in which the program's function runs
        self._numbers = itertools.count()

    def new_branch(self) -> "Branch":
        branch = Branch(self, len(self.branches))
        self.branches.append(branch)
        return branch

    def new_id(self) -> str:
        return str(next(self._numbers))

    async def finish(self) -> None:
        """Waits until all branches have run all their expressions."""
        for branch in self.branches:  # grows while forks are executed
            await branch.drained()

    def fail(self, error: Exception, name: str) -> None:
        """Records that the program's function has raised."""
        if not isinstance(error, ProgramError):
            place = place_of(error)
            error, cause = ProgramError(f"{place or name}: {type(error).__name__}: {error}"), error
            error.__cause__ = cause
        self.error = self.error or error
        for branch in self.branches:
            branch.error = branch.error or error
            branch.notify()

    def cancel(self) -> None:
        """Ends all calls that run; no more expressions will come."""
        for branch in self.branches:
            branch.cancel()
            branch.close()


@dataclass
class _Message:
    """A message that is being written. `parts` are those of OpenAI's form; text is taken from the branch's."""

    role: str
    start: int  # where its text begins
    parts: list[dict[str, Any]] = field(default_factory=list)
    text_from: int = 0  # the branch's text from here on is in no part yet


class Branch:
    """A line of text, its messages and variables, and the expressions that wait to be run on it."""

    def __init__(self, run: ProgramRun, number: int) -> None:
        self.run = run
        self.number = number
        self.id = run.new_id()
        self.parent: str | None = None
        self.held = 0
        self.segments: list[Segment] = []
        self.text = ""
        self.messages: list[dict[str, Any]] = []
        self.variables: dict[str, Variable] = {}
        self.fork_start = 0
        self.error: BaseException | None = None
        self._message: _Message | None = None
        self._scopes: dict[str, int] = {}
        self._pending: deque[Statement] = deque()
        self._task: asyncio.Task[None] | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._begun = True  # False until the parent has reached the fork
        self._closed = False

    # ------------------------------------------------------------ what programs do

    def submit(self, expr: Expr, place: str = "") -> None:
        """Appends an expression. Callable from any thread. Returns at once. `place` is the program's line, by default
        that of the caller."""
        statement = Statement(expr, place or program_line())
        for name in names_set_by(expr):
            self.variables[name] = Variable()
        if _on_loop(self.run.loop):
            self._enqueue(statement)
        else:
            self.run.loop.call_soon_threadsafe(self._enqueue, statement)

    def fork(self, size: int) -> "list[Branch]":
        """New branches that begin with what is here once all expressions so far have run."""
        children = [self.run.new_branch() for _ in range(size)]
        for child in children:
            child._begun = False
        self.submit(ForkPoint(tuple(children)))
        return children

    def close(self) -> None:
        """No more expressions will come."""
        self._closed = True
        self.notify()

    def set_variable(self, name: str, value: Any) -> None:
        self.variables[name] = Variable(value, done=True)

    async def get(self, name: str, to_the_end: bool = False) -> Any:
        """The value of a variable, once it is whole. Raises ProgramError if the branch has failed, and KeyError for a
        variable that no expression so far sets, or `to_the_end` of the program."""
        return (await self._variable(name, to_the_end)).value

    async def meta(self, name: str, to_the_end: bool = False) -> Any:
        """Details of a variable's generation (`Generated.meta`), as `get`."""
        return (await self._variable(name, to_the_end)).meta

    async def drained(self) -> None:
        """Waits until all expressions so far have run, or one has failed."""
        while not self.is_idle:
            await self._changed()

    async def synced(self) -> "Branch":
        """As `drained`, and raises the error of this branch."""
        await self.drained()
        if self.error is not None:
            raise self.error
        return self

    async def pieces(self, name: str | None) -> AsyncIterator[tuple[str, Any]]:
        """The text (or a variable's) as it grows, each piece with the variable's details so far."""
        sent = 0
        while True:
            variable = self.variables.get(name) if name is not None else None
            text = self.text if name is None else (variable.value if variable is not None else "")
            over = (variable is not None and variable.done) if name is not None else self._is_over()
            if isinstance(text, str) and len(text) > sent:
                new, sent = text[sent:], len(text)
                yield new, variable.meta if variable is not None else None
                continue  # the branch went on meanwhile
            if over or self.error is not None:
                break
            if name is not None and self._is_over():
                if name not in self.variables:
                    raise KeyError(self._unknown(name))
                break
            await self._changed()
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        self._pending.clear()
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ the queue

    def _enqueue(self, statement: Statement) -> None:
        if self.error is not None:
            return
        self._pending.append(statement)
        self._start()

    def _start(self) -> None:
        if self._begun and self._pending and self._task is None:
            self._task = self.run.loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._pending:
                statement = self._pending.popleft()
                try:
                    await self._execute(statement)
                except Exception as error:
                    self._fail(error, statement.place)
        finally:
            self._task = None
            self.notify()

    def _fail(self, error: Exception, place: str) -> None:
        if isinstance(error, ProgramError):
            self.error = error  # of another branch
        else:
            self.error = ProgramError(f"{place}: {type(error).__name__}: {error}")
            self.error.__cause__ = error
        if self.run.error is None:
            self.run.error = self.error
        for statement in self._pending:
            if isinstance(statement.expr, ForkPoint):
                self._begin_children(statement.expr)
        self._pending.clear()

    def notify(self) -> None:
        """Wakes all who wait for a change."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _changed(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    @property
    def is_idle(self) -> bool:
        """Whether everything so far has run, or something has failed."""
        return self.error is not None or (self._begun and not self._pending and self._task is None)

    def _is_over(self) -> bool:
        return self._closed and self.is_idle

    async def _variable(self, name: str, to_the_end: bool) -> Variable:
        while True:
            variable = self.variables.get(name)
            if variable is not None and variable.done:
                return variable
            if self.error is not None:
                raise self.error
            if variable is None and (self._is_over() if to_the_end else self.is_idle):
                raise KeyError(self._unknown(name))
            await self._changed()

    def _unknown(self, name: str) -> str:
        known = ", ".join(sorted(self.variables)) or "none"
        return f"the program sets no variable {name!r} here; it has {known}"

    # ------------------------------------------------------------ expressions

    async def _execute(self, statement: Statement) -> None:
        expr = statement.expr
        if isinstance(expr, ConstantText):
            self._append(expr.value)
        elif isinstance(expr, ExprList | Unordered):
            # One after the other at the head of the queue, where a call sees what follows it.
            self._pending.extendleft(Statement(part, statement.place) for part in reversed(expr.parts))
        elif isinstance(expr, Gen):
            await self._timed(self._generate(expr), expr.name, statement.place)
        elif isinstance(expr, Select):
            await self._timed(self._select(expr), expr.name, statement.place)
        elif isinstance(expr, RoleBegin):
            await self._begin_message(expr.role)
        elif isinstance(expr, RoleEnd):
            self._end_message(expr.role)
        elif isinstance(expr, Image):
            message = self._message_with("images")
            self._add_part(message, await asyncio.to_thread(image_part, expr.source))
        elif isinstance(expr, Video):
            message = self._message_with("video")
            self._add_part(message, await asyncio.to_thread(video_part, expr.source, expr.num_frames))
        elif isinstance(expr, VarScopeBegin):
            self._scopes[expr.name] = len(self.text)
        elif isinstance(expr, VarScopeEnd):
            self._set(expr.name, self.text[self._scopes.pop(expr.name) :])
        elif isinstance(expr, ForkPoint):
            self._begin_children(expr)
        elif isinstance(expr, JoinPoint):
            await self._join(expr)
        elif isinstance(expr, SeparateReasoning):
            self._separate(expr)
        elif isinstance(expr, VariableRef):
            await self._refer(expr)
        else:
            raise TypeError(f"a state cannot take {expr!r}")
        self.notify()

    def _append(self, text: str, generated: bool = False, name: str | None = None) -> None:
        if text:
            self.segments.append(Segment(text, generated, name))
            self.text += text

    def _set(self, name: str | None, value: Any, meta: Any = None) -> None:
        if name is not None:
            self.variables[name] = Variable(value, meta, done=True)

    # ---- calls

    def _call(self, params: GenParams) -> Call:
        message = self._message
        then, remaining = self._ahead()
        return Call(
            program=self.run.id,
            branch=self.id,
            parent=self.parent,
            held=self.held,
            text=self.text,
            messages=list(self.messages),
            role=None if message is None else message.role,
            partial="" if message is None else self.text[message.start :],
            has_media=any(isinstance(old["content"], list) for old in self.messages),
            params=params,
            then=then,
            remaining=remaining,
            template=() if message is None else self._template(),
        )

    def _ahead(self) -> tuple[str, int]:
        """The lookahead: the constant text up to the next call, and the number of calls."""
        texts: list[str] = []
        constant, calls = True, 0
        role, roles = None if self._message is None else self._message.role, self.run.roles
        for statement in self._pending:
            for part in _flat(statement.expr):
                if isinstance(part, Gen | Select):
                    calls += 1
                    constant = False
                elif not constant:
                    continue
                elif isinstance(part, ConstantText):
                    texts.append(part.value)
                elif isinstance(part, RoleEnd) and roles is not None and role is not None:
                    texts.append(roles.suffix[role])
                    role = None
                elif isinstance(part, RoleBegin) and roles is not None and part.role in roles.prefix:
                    texts.append(roles.prefix[part.role])
                    role = part.role
                elif not isinstance(part, VarScopeBegin | VarScopeEnd | ForkPoint):
                    constant = False
        return "".join(texts), calls

    def _template(self) -> tuple[str | GenParams, ...]:
        """The parts that are known to follow in this message: constant texts, and the parameters of calls."""
        parts: list[str | GenParams] = []
        for statement in self._pending:
            for part in _flat(statement.expr):
                if isinstance(part, ConstantText):
                    parts.append(part.value)
                elif isinstance(part, Gen):
                    parts.append(part.params.over(self.run.defaults))
                elif not isinstance(part, VarScopeBegin | VarScopeEnd | ForkPoint):
                    return tuple(parts)
        return tuple(parts)

    async def _timed(self, call: Coroutine[Any, Any, Any], name: str | None, place: str) -> None:
        """Runs a call, and records it."""
        begun_s = perf_counter()
        meta = await call
        self.run.calls.append(record(self.number, name, place, begun_s, perf_counter() - begun_s, meta))

    async def _generate(self, expr: Gen) -> Any:
        """Runs a call. Returns its details."""
        params = expr.params.over(self.run.defaults)
        if self._message is not None and self.run.roles is not None and not self.run.backend.is_chat_model:
            params = GenParams(stop=(*(params.stop or ()), *self.run.roles.stop)).over(params)
        if params.dtype in ("int", "float") and not params.stop:
            params = GenParams(stop=(" ", "\n")).over(params)  # white space ends a number
        if params.n is not None and params.n > 1 and (self.run.stream or params.stop_regex):
            raise NotSupported("n > 1 cannot be streamed, nor ended by stop_regex")
        self.run.backend.check(GenParams(stop_regex=()).over(params))
        self._check_place()
        call = self._call(params)
        if self.run.stream or params.stop_regex:
            return await self._generate_stream(expr, call)
        result = await self.run.backend.generate(call)
        self._append(result.texts[0], generated=True, name=expr.name)
        self._note_held(result)
        many = params.n is not None and params.n > 1
        self._set(expr.name, result.texts if many else result.texts[0], result.meta if many else result.meta[0])
        return result.meta

    async def _generate_stream(self, expr: Gen, call: Call) -> Any:
        """Runs a call as a stream, so that its text can be read while it grows, or be ended by `stop_regex`."""
        self.run.backend.check_feature("stream")
        ends = [re.compile(pattern) for pattern in call.params.stop_regex or ()]
        variable = Variable("", {})
        if expr.name is not None:
            self.variables[expr.name] = variable
        before = self.text
        text, held = "", False
        async with aclosing(self.run.backend.stream(call)) as pieces:
            async for piece in pieces:
                text += piece.text
                variable.meta = _merged(variable.meta, piece.meta)
                held = piece.held
                stops = [match.start() for end in ends if (match := end.search(text))]
                if stops:
                    text, held = text[: min(stops)], False
                    variable.meta["finish_reason"] = "stop"
                variable.value, self.text = text, before + text
                self.notify()
                if stops:
                    break
        self.text = before
        self._append(text, generated=True, name=expr.name)
        if held:
            self.held = len(self.text)
            self.parent = None
        variable.done = True
        return variable.meta

    def _note_held(self, result: Generated) -> None:
        if result.held:
            self.held = len(self.text)
            self.parent = None

    def _check_place(self) -> None:
        """Raises NotSupported where a conversation's backend cannot generate."""
        backend, message = self.run.backend, self._message
        if not backend.is_chat_model:
            return
        if message is None or message.role != "assistant":
            raise NotSupported(f"{backend.name} takes conversations: gen must be within assistant(...)")
        if len(self.text) > message.start:
            backend.check_feature("prefill")

    async def _select(self, expr: Select) -> Any:
        """Chooses. Returns details of the choice."""
        self.run.backend.check_feature("select")
        call = self._call(self.run.defaults)
        scores = await self.run.backend.score(call, expr.choices, expr.method.needs_unconditional)
        values = expr.method.values(scores)
        chosen = max(range(len(values)), key=values.__getitem__)
        if expr.temperature > 0:
            best = values[chosen]
            weights = [math.exp((value - best) / expr.temperature) for value in values]
            chosen = random.choices(range(len(values)), weights)[0]
        self._append(expr.choices[chosen], generated=True, name=expr.name)
        meta = {
            "values": values,
            "input_token_logprobs": [
                [(p, token, None) for p, token in zip(score.logprobs, score.token_ids, strict=True)] for score in scores
            ],
        }
        self._set(expr.name, expr.choices[chosen], meta)
        return meta

    async def _refer(self, expr: VariableRef) -> None:
        """Appends another branch's variable. While it is not there, the text before it is computed."""
        variable = expr.branch.variables.get(expr.name)
        if (variable is None or not variable.done) and len(self.text) - self.held >= PREFETCH_CHARS:
            await self.run.backend.prefetch(self.run.id, self.text)
        self._append(str(await expr.branch.get(expr.name)))

    # ---- messages

    async def _begin_message(self, role: str) -> None:
        if self.run.roles is None:
            self.run.roles = await self.run.backend.roles()
        roles = self.run.roles
        if self._message is not None:
            raise ValueError(f"roles cannot be nested: {role!r} begins within {self._message.role!r}")
        if role not in roles.prefix:
            raise ValueError(f"the model has no role {role!r}: use {', '.join(sorted(roles.prefix))}")
        if not self.messages and role != "system":
            self._append(roles.default_system)
        self._append(roles.prefix[role])
        self._message = _Message(role, len(self.text), text_from=len(self.text))

    def _end_message(self, role: str) -> None:
        message = self._message
        if message is None or message.role != role:
            raise ValueError(f"a message of {role!r} ends that has not begun")
        rest = self.text[message.text_from :]
        if message.parts:
            if rest:
                message.parts.append({"type": "text", "text": rest})
            self.messages.append({"role": role, "content": message.parts})
        else:
            self.messages.append({"role": role, "content": rest.lstrip()})
        self._message = None
        assert self.run.roles is not None
        self._append(self.run.roles.suffix[role])

    def _message_with(self, feature: str) -> _Message:
        """The message that a picture or a film goes into."""
        self.run.backend.check_feature(feature)
        if self._message is None:
            raise NotSupported("a picture or a film must be within a message: user(image(...) + ...)")
        return self._message

    def _add_part(self, message: _Message, part: dict[str, Any]) -> None:
        if text := self.text[message.text_from :]:
            message.parts.append({"type": "text", "text": text})
        message.parts.append(part)
        message.text_from = len(self.text)

    def _separate(self, expr: SeparateReasoning) -> None:
        for name in expr.names:
            variable = self.variables[name]
            whole = str(variable.value)
            reasoning, answer = split_reasoning(whole, expr.model_type)
            self._set(name, answer, variable.meta)
            self._set(SeparateReasoning.reasoning_name(name), reasoning)
            at = self.text.rfind(whole)
            if whole and answer != whole and at >= 0:  # models do not want their earlier reasoning in the prompt
                self.text = self.text[:at] + answer + self.text[at + len(whole) :]
                self.segments = [
                    Segment(answer, True, name) if part.name == name and part.text == whole else part
                    for part in self.segments
                ]
                if at < self.held:  # what the backend holds is not the text any more
                    self.held, self.parent = 0, None

    # ---- forks

    def _begin_children(self, expr: ForkPoint) -> None:
        """Gives the children all that is here. What is here goes on under a new id: the children's parent stays as it
        is now, for a backend that keeps it."""
        for child in expr.children:
            child._take_over(self)
        if expr.children and self.held:
            self.parent, self.id = self.id if self.parent is None else self.parent, self.run.new_id()

    def _take_over(self, parent: "Branch") -> None:
        self.text, self.segments = parent.text, list(parent.segments)
        self.messages = list(parent.messages)
        if parent._message is not None:
            old = parent._message
            self._message = _Message(old.role, old.start, list(old.parts), old.text_from)
        self._scopes = dict(parent._scopes)
        self.variables = {name: value for name, value in parent.variables.items() if value.done} | self.variables
        self.fork_start = len(parent.text)
        self.held = parent.held
        if parent.held:
            self.parent = parent.id if parent.parent is None else parent.parent
        self.error = parent.error
        self._begun = True
        self._start()
        self.notify()

    async def _join(self, expr: JoinPoint) -> None:
        for branch in expr.branches:
            await branch.synced()
        if expr.append:
            self._append("".join(branch.text[branch.fork_start :] for branch in expr.branches))
            return
        before = set(self.variables)
        gathered: dict[str, list[Any]] = {}
        for branch in expr.branches:
            for name, variable in branch.variables.items():
                if name not in before:
                    gathered.setdefault(name, []).append(variable.value)
        for name, values in gathered.items():
            self._set(name, values)


def _flat(expr: Expr) -> list[Expr]:
    if isinstance(expr, ExprList | Unordered):
        return [part for outer in expr.parts for part in _flat(outer)]
    return [expr]


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Details of a stream so far, with those of its next piece: lists go on, other values are replaced."""
    joined = dict(old)
    for key, value in new.items():
        joined[key] = joined.get(key, []) + value if isinstance(value, list) else value
    return joined


def _on_loop(loop: asyncio.AbstractEventLoop) -> bool:
    try:
        return asyncio.get_running_loop() is loop
    except RuntimeError:
        return False
