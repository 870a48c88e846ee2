"""Runs the expressions of a branch, one after the other: appends texts, makes calls, writes messages.

A call sees the expressions that wait behind it. So it tells the backend which text follows its answer, and how many
calls (`Call.template`, `Call.remaining`).
"""

import asyncio
import re
from collections.abc import Coroutine
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from shoal.lang.backend import Call, Generated
from shoal.lang.branch import Branch
from shoal.lang.choices import decided, needs_unconditional
from shoal.lang.errors import NotSupported
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
)
from shoal.lang.media import image_part, video_part
from shoal.lang.reasoning import split_reasoning
from shoal.lang.statements import ForkPoint, JoinPoint, Segment, Statement, Variable, VariableRef
from shoal.lang.timeline import record

PREFETCH_CHARS = 512  # a shorter text is computed in the same step as what follows it


@dataclass
class _Message:
    """A message that is being written. `parts` are those of OpenAI's form; text is taken from the branch's."""

    role: str
    start: int  # where its text begins
    parts: list[dict[str, Any]] = field(default_factory=list)
    text_from: int = 0  # the branch's text from here on is in no part yet


class Interpreter:
    """Runs expressions on one branch: `execute`. Keeps the message that is being written, and open scopes."""

    def __init__(self, branch: Branch) -> None:
        self._branch = branch
        self._run = branch.run
        self._message: _Message | None = None
        self._scopes: dict[str, int] = {}

    def take_over(self, parent: "Interpreter") -> None:
        """Goes on where the parent branch is."""
        if parent._message is not None:
            old = parent._message
            self._message = _Message(old.role, old.start, list(old.parts), old.text_from)
        self._scopes = dict(parent._scopes)

    async def execute(self, statement: Statement) -> None:
        """Runs a statement. Raises what it fails with."""
        expr = statement.expr
        if isinstance(expr, ConstantText):
            self._branch.append(expr.value)
        elif isinstance(expr, ExprList | Unordered):
            # One after the other at the head of the queue, where a call sees what follows it.
            self._branch.pending.extendleft(Statement(part, statement.place) for part in reversed(expr.parts))
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
            self._scopes[expr.name] = len(self._branch.text)
        elif isinstance(expr, VarScopeEnd):
            self._branch.set(expr.name, self._branch.text[self._scopes.pop(expr.name) :])
        elif isinstance(expr, ForkPoint):
            self._branch.begin_children(expr)
        elif isinstance(expr, JoinPoint):
            await self._join(expr)
        elif isinstance(expr, SeparateReasoning):
            self._separate(expr)
        elif isinstance(expr, VariableRef):
            await self._refer(expr)
        else:
            raise TypeError(f"a state cannot take {expr!r}")
        self._branch.notify()

    # ---- calls

    def _call(self, params: GenParams) -> Call:
        message = self._message
        template, remaining = self._lookahead()
        return Call(
            program=self._run.id,
            branch=self._branch.id,
            parent=self._branch.parent,
            held=self._branch.held,
            text=self._branch.text,
            messages=list(self._branch.messages),
            role=None if message is None else message.role,
            partial="" if message is None else self._branch.text[message.start :],
            has_media=any(isinstance(old["content"], list) for old in self._branch.messages),
            params=params,
            remaining=remaining,
            template=template,
        )

    def _lookahead(self) -> tuple[tuple[str | GenParams, ...], int]:
        """Looks at what follows: constant texts and the parameters of calls, up to the first expression that is
        neither; and the number of all calls."""
        parts: list[str | GenParams] = []
        known, calls = True, 0
        role = None if self._message is None else self._message.role
        for statement in self._branch.pending:
            for expr in _flat(statement.expr):
                calls += isinstance(expr, Gen | Select)
                if not known:
                    continue
                if isinstance(expr, Gen):
                    parts.append(self._params(expr, role))
                elif (text := self._constant(expr, role)) is None:
                    known = False
                elif text:
                    parts.append(text)
                if isinstance(expr, RoleBegin | RoleEnd):
                    role = expr.role if isinstance(expr, RoleBegin) else None
        return tuple(parts), calls

    def _constant(self, expr: Expr, role: str | None) -> str | None:
        """The text that an expression within a message of `role` will append; None if that is not known. To a backend
        that takes conversations, the end of a message is no text."""
        run = self._run
        if isinstance(expr, ConstantText):
            return expr.value
        if isinstance(expr, VarScopeBegin | VarScopeEnd):
            return ""
        if run.backend.is_chat_model:
            return "" if isinstance(expr, ForkPoint) else None
        if isinstance(expr, RoleEnd) and run.roles is not None and role is not None:
            return run.roles.suffix[role]
        has_begun = self._message is not None or bool(self._branch.messages)
        if isinstance(expr, RoleBegin) and run.roles is not None and has_begun:
            return run.roles.prefix.get(expr.role)
        return None

    def _params(self, expr: Gen, role: str | None) -> GenParams:
        """The parameters of a call within a message of `role`."""
        params = expr.params.over(self._run.defaults)
        if role is not None and self._run.roles is not None and not self._run.backend.is_chat_model:
            params = GenParams(stop=(*(params.stop or ()), *self._run.roles.stop)).over(params)
        if params.dtype in ("int", "float") and not params.stop:
            params = GenParams(stop=(" ", "\n")).over(params)  # white space ends a number
        return params

    async def _timed(self, call: Coroutine[Any, Any, Any], name: str | None, place: str) -> None:
        """Runs a call, and records it."""
        begun_s = perf_counter()
        meta = await call
        self._run.calls.append(record(self._branch.number, name, place, begun_s, perf_counter() - begun_s, meta))

    async def _generate(self, expr: Gen) -> Any:
        """Runs a call. Returns its details."""
        params = self._params(expr, None if self._message is None else self._message.role)
        if params.n is not None and params.n > 1 and (self._run.stream or params.stop_regex):
            raise NotSupported("n > 1 cannot be streamed, nor ended by stop_regex")
        self._run.backend.check(GenParams(stop_regex=()).over(params))
        self._check_place("gen")
        call = self._call(params)
        if self._run.stream or params.stop_regex:
            return await self._generate_stream(expr, call)
        result = await self._run.backend.generate(call)
        self._branch.append(result.texts[0], generated=True, name=expr.name)
        self._note_held(result)
        many = params.n is not None and params.n > 1
        self._branch.set(expr.name, result.texts if many else result.texts[0], result.meta if many else result.meta[0])
        return result.meta

    async def _generate_stream(self, expr: Gen, call: Call) -> Any:
        """Runs a call as a stream, so that its text can be read while it grows, or be ended by `stop_regex`."""
        self._run.backend.check_feature("stream")
        ends = [re.compile(pattern) for pattern in call.params.stop_regex or ()]
        variable = Variable("", {})
        if expr.name is not None:
            self._branch.variables[expr.name] = variable
        before = self._branch.text
        text, held = "", False
        async with aclosing(self._run.backend.stream(call)) as pieces:
            async for piece in pieces:
                text += piece.text
                variable.meta = _merged(variable.meta, piece.meta)
                held = piece.held
                stops = [match.start() for end in ends if (match := end.search(text))]
                if stops:
                    text, held = text[: min(stops)], False
                    variable.meta["finish_reason"] = "stop"
                variable.value, self._branch.text = text, before + text
                self._branch.notify()
                if stops:
                    break
        self._branch.text = before
        self._branch.append(text, generated=True, name=expr.name)
        if held:
            self._branch.held = len(self._branch.text)
            self._branch.parent = None
        variable.done = True
        return variable.meta

    def _note_held(self, result: Generated) -> None:
        if result.held:
            self._branch.held = len(self._branch.text)
            self._branch.parent = None

    def _check_place(self, what: str) -> None:
        """Raises NotSupported where a conversation's backend cannot generate. `what`: the expression's name."""
        backend, message = self._run.backend, self._message
        if not backend.is_chat_model:
            return
        if message is None or message.role != "assistant":
            raise NotSupported(f"{backend.name} takes conversations: {what} must be within assistant(...)")
        if len(self._branch.text) > message.start:
            backend.check_feature("prefill")

    async def _select(self, expr: Select) -> Any:
        """Chooses. Returns details of the choice."""
        self._run.backend.check_feature("select")
        self._check_place("select")
        call = self._call(self._run.defaults)
        scores = await self._run.backend.score(call, expr.choices, needs_unconditional(expr.method))
        chosen, meta = decided(expr.method, expr.choices, scores, expr.temperature)
        self._branch.append(expr.choices[chosen], generated=True, name=expr.name)
        self._branch.set(expr.name, expr.choices[chosen], meta)
        return meta

    async def _refer(self, expr: VariableRef) -> None:
        """Appends another branch's variable. While it is not there, the text before it is computed."""
        variable = expr.branch.variables.get(expr.name)
        if (variable is None or not variable.done) and len(self._branch.text) - self._branch.held >= PREFETCH_CHARS:
            await self._run.backend.prefetch(self._run.id, self._branch.text)
        self._branch.append(str(await expr.branch.get(expr.name)))

    # ---- messages

    async def _begin_message(self, role: str) -> None:
        if self._run.roles is None:
            self._run.roles = await self._run.backend.roles()
        roles = self._run.roles
        if self._message is not None:
            raise ValueError(f"roles cannot be nested: {role!r} begins within {self._message.role!r}")
        if role not in roles.prefix:
            raise ValueError(f"the model has no role {role!r}: use {', '.join(sorted(roles.prefix))}")
        if not self._branch.messages and role != "system":
            self._branch.append(roles.default_system)
        self._branch.append(roles.prefix[role])
        self._message = _Message(role, len(self._branch.text), text_from=len(self._branch.text))

    def _end_message(self, role: str) -> None:
        message = self._message
        if message is None or message.role != role:
            raise ValueError(f"a message of {role!r} ends that has not begun")
        rest = self._branch.text[message.text_from :]
        if message.parts:
            if rest:
                message.parts.append({"type": "text", "text": rest})
            self._branch.messages.append({"role": role, "content": message.parts})
        else:
            self._branch.messages.append({"role": role, "content": rest.lstrip()})
        self._message = None
        assert self._run.roles is not None
        self._branch.append(self._run.roles.suffix[role])

    def _message_with(self, feature: str) -> _Message:
        """The message that a picture or a film goes into."""
        self._run.backend.check_feature(feature)
        if self._message is None:
            raise NotSupported("a picture or a film must be within a message: user(image(...) + ...)")
        return self._message

    def _add_part(self, message: _Message, part: dict[str, Any]) -> None:
        if text := self._branch.text[message.text_from :]:
            message.parts.append({"type": "text", "text": text})
        message.parts.append(part)
        message.text_from = len(self._branch.text)

    def _separate(self, expr: SeparateReasoning) -> None:
        for name in expr.names:
            variable = self._branch.variables[name]
            whole = str(variable.value)
            reasoning, answer = split_reasoning(whole, expr.model_type)
            self._branch.set(name, answer, variable.meta)
            self._branch.set(SeparateReasoning.reasoning_name(name), reasoning)
            at = self._branch.text.rfind(whole)
            if whole and answer != whole and at >= 0:  # models do not want their earlier reasoning in the prompt
                self._branch.text = self._branch.text[:at] + answer + self._branch.text[at + len(whole) :]
                self._branch.segments = [
                    Segment(answer, True, name) if part.name == name and part.text == whole else part
                    for part in self._branch.segments
                ]
                if at < self._branch.held:  # what the backend holds is not the text any more
                    self._branch.held, self._branch.parent = 0, None

    async def _join(self, expr: JoinPoint) -> None:
        for branch in expr.branches:
            await branch.synced()
        if expr.append:
            self._branch.append("".join(branch.text[branch.fork_start :] for branch in expr.branches))
            return
        before = set(self._branch.variables)
        gathered: dict[str, list[Any]] = {}
        for branch in expr.branches:
            for name, variable in branch.variables.items():
                if name not in before:
                    gathered.setdefault(name, []).append(variable.value)
        for name, values in gathered.items():
            self._branch.set(name, values)


def _flat(expr: Expr) -> list[Expr]:
    if isinstance(expr, ExprList | Unordered):
        return [part for outer in expr.parts for part in _flat(outer)]
    return [expr]


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Details of a stream so far, with those of its next piece: lists go on, other values are replaced."""
    joined = dict(old)
    for key, value in new.items():
        joined[key] = joined.get(key, []) + value if isinstance(value, list) else value
    if "output_token_logprobs" in joined:
        joined["output_token_logprobs_length"] = len(joined["output_token_logprobs"])
    return joined
