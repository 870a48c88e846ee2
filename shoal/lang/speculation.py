"""API speculative execution: a call generates past its stop string, and later calls are served from the rest.

Endpoints that are paid by the token bill a program of three `gen`s for its whole text three times. Here the first call
is made without its stop string and with at least `num_tokens`. Its text is a `Draft`. A later call is served from a
draft as far as the program's text since then is the draft's, constant texts and variables alike. At the first
difference it becomes a call of its own, with the program's text, and a draft of its own.

No variable differs from that of a plain run on an endpoint that always gives the same answer to the same text:

- Text: what a program holds and what a draft says is the same, character for character.
- Length: a `gen` has at most its `max_tokens`, counted in the tokens that the endpoint tells, or else by bounds that
  hold for any tokens. Where neither decides, the call is made, and the run's later ones ask for no more than theirs.
- End: an output ends by a stop string or with the answer; never where the draft was cut off.
- Sampling: temperature, top_p, top_k and min_p are those of the draft. Calls with penalties, constraints, stop tokens,
  log probabilities, `stop_regex` or several outputs are made as they are.
- Tokens: a served output begins with a token, as far as the endpoint tells them, or else where tokenizers cut. So a
  constant that ends with a space (`"Year: "`) is seldom followed by an output that can be served.
- Chance: above temperature 0 a draft serves only the branch that made it, so that forks do not get the same sample.

Chat endpoints that do not continue an assistant's message cannot be called in the middle of one. There a draft is a
whole message. It is asked for up to `MAX_TRIES` times until it fits all that is known of the message. An answer without
the program's text in its place is an error.
"""

import asyncio
import dataclasses
import logging
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from shoal.lang.backend import NEUTRAL, Backend, Call, Generated, OutputPiece, RoleFormat
from shoal.lang.choices import ChoiceScore
from shoal.lang.errors import BackendError, NotSupported
from shoal.lang.ir import GenParams
from shoal.lang.stops import first_stop, held_back

log = logging.getLogger(__name__)

MAX_TRIES = 3
MAX_DRAFTS = 64  # of one run, and of any branch, that calls of other branches are compared with
MAX_SHOWN_CHARS = 60  # characters of a text in an error

_SAMPLING = ("temperature", "top_p", "top_k", "min_p")
_SERVED = frozenset({"max_new_tokens", "stop", *_SAMPLING})
_LOGPROBS = ("output_token_logprobs", "output_top_logprobs")


class Cut(NamedTuple):
    """Where an output ends in a draft, and why: "stop" or "length"."""

    end: int
    finish_reason: str


class Draft:
    """A text that an endpoint generates, or has generated, after the text of a call.

    | field | meaning |
    | --- | --- |
    | `before` | the text (for chat models, that of the current message) before it |
    | `limit` | the most tokens that were asked for; `num_tokens`: how many came, once `done` |
    | `ends` | where tokens end in the text, as far as the endpoint tells them and they make up the text |
    | `tells_tokens` | whether it tells any |
    | `indent` | the white space with which the text must begin, if that of a message does not count |
    """

    def __init__(self, call: Call, before: str, limit: int, indent: str | None) -> None:
        self.call = call
        self.before = before
        self.limit = limit
        self.text = ""
        self.ends: list[int] = []
        self.tells_tokens = False
        self.meta: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.num_tokens: int | None = None
        self.done = False
        self.error: Exception | None = None
        self._indent = indent
        self._blank = ""  # white space at the beginning, for which `indent` will stand
        self._tokens: deque[str] = deque()  # whose text has not come yet
        self._grown = asyncio.Event()

    # ------------------------------------------------------------ growing

    async def fill(self, pieces: AsyncGenerator[OutputPiece, None]) -> None:
        """Takes an endpoint's answer. A failure is kept in `error`."""
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    self._add(piece)
        except Exception as error:
            self.error = error
        finally:
            self.done = True
            self._notify()

    def _add(self, piece: OutputPiece) -> None:
        text = piece.text
        if self._indent is not None:
            text, self._blank = self._blank + text, ""
            if text.strip():
                text, self._indent = self._indent + text.lstrip(), None
            else:
                text, self._blank = "", text
        self.text += text
        tokens = piece.meta.get("output_token_logprobs")
        if tokens:
            self.tells_tokens = True
            self._tokens.extend(token for _, _, token in tokens)
        while self._tokens:
            at = self.ends[-1] if self.ends else 0
            token = self._tokens[0]
            if not token or not self.text.startswith(token, at):
                break  # not here yet, or not what the text is made of
            self.ends.append(at + len(token))
            self._tokens.popleft()
        self.meta |= {name: value for name, value in piece.meta.items() if name not in _LOGPROBS}
        self.finish_reason = self.meta.get("finish_reason")
        self.num_tokens = self.meta.get("completion_tokens")
        self._notify()

    def _notify(self) -> None:
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    async def grown(self) -> None:
        """Waits for more text, or the end."""
        await self._grown.wait()

    # ------------------------------------------------------------ serving

    async def position(self, text: str) -> int | None:
        """Where in the draft the program's text ends; None if the program has another text."""
        if not text.startswith(self.before):
            return None
        since = text[len(self.before) :]
        return len(since) if await self.has(since, 0) else None

    async def has(self, text: str, at: int) -> bool:
        """Whether a text stands at a position."""
        while not self.done and at + len(text) > len(self.text) and text.startswith(self.text[at:]):
            await self.grown()
        return self.text.startswith(text, at)

    async def cut(self, start: int, params: GenParams) -> Cut | None:
        """The end of the output that begins at `start`; None if the draft does not tell."""
        while True:
            found = self._cut(start, params)
            if found is not None or self.done:
                return found
            await self.grown()

    def _cut(self, start: int, params: GenParams) -> Cut | None:
        limit = params.max_new_tokens
        assert limit is not None  # `run` has a default
        stop = first_stop(self.text, params.stop or (), start)
        end = len(self.text) if stop is None else stop[1]
        if stop is not None and self._fits(start, end, limit):
            return Cut(stop[0], "stop")
        last = bisect_right(self.ends, start) + limit - 1
        if last < len(self.ends) and self.ends[last] < end + (stop is None):
            return Cut(self.ends[last], "length")
        if stop is not None or not self.done or self.error is not None:
            return None
        if start == 0 and self.limit == limit and self.finish_reason in ("stop", "length"):
            return Cut(end, self.finish_reason)
        # An answer that ends with its last token ends for its length: there must be room for another.
        if self.finish_reason == "stop" and self._fits(start, end, limit - 1):
            return Cut(end, "stop")
        return None

    def _fits(self, start: int, end: int, limit: int) -> bool:
        """Whether a part of the text has certainly no more than `limit` tokens."""
        if self.limit <= limit or (self.done and self.num_tokens is not None and self.num_tokens <= limit):
            return True
        last = bisect_left(self.ends, end)
        if last < len(self.ends):
            return last - bisect_right(self.ends, start) + 1 <= limit
        return len(self.text[start:end].encode()) <= limit  # a token has at least a byte

    def begins_token(self, at: int) -> bool:
        """Whether a token begins at a position. If the endpoint does not tell, then where tokenizers cut: before the
        space in front of a word, and at the beginning of a line."""
        if at == 0:
            return True
        if self.tells_tokens:
            number = bisect_left(self.ends, at)
            return number < len(self.ends) and self.ends[number] == at
        before, after = self.text[at - 1], self.text[at : at + 1]
        return not after or (after == " " and not before.isspace()) or (before == "\n" and not after.isspace())


class Speculation(Backend):
    """A backend for one run of a program, which speculates on another backend."""

    def __init__(self, backend: Backend, num_tokens: int) -> None:
        super().__init__()
        if num_tokens < 1:
            raise ValueError(f"num_api_spec_tokens is {num_tokens}; it must be 1 or more")
        self.backend = backend
        self.name = backend.name
        self.num_tokens = num_tokens
        self.token_usage = backend.token_usage
        self.params = backend.params
        self.is_chat_model = backend.is_chat_model
        self.features = backend.features | {"prefill"}
        self._continues = not backend.is_chat_model or "prefill" in backend.features
        self._drafts: deque[Draft] = deque(maxlen=MAX_DRAFTS)
        self._own: dict[str, deque[Draft]] = {}  # by branch, the newest last
        self._tasks: set[asyncio.Task[None]] = set()
        self._exceeds = True  # until a call was in vain, since more tokens than its max_tokens came, uncounted
        self._tries: Counter[tuple[str, int]] = Counter()  # by branch and message

    def check(self, params: GenParams) -> None:
        self.backend.check(params)

    def check_feature(self, feature: str) -> None:
        if feature not in self.features:
            self.backend.check_feature(feature)

    async def roles(self) -> RoleFormat:
        return await self.backend.roles()

    async def score(self, call: Call, choices: Sequence[str], unconditional: bool) -> list[ChoiceScore]:
        return await self.backend.score(call, choices, unconditional)

    async def prefetch(self, program: str, text: str) -> None:
        await self.backend.prefetch(program, text)

    async def end_program(self, program: str) -> None:
        """Ends the run. Answers that still come are read to their end, so that their tokens are counted, unless the run
        is being cancelled."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            for growing in self._tasks:
                growing.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            await self.backend.end_program(program)

    async def generate(self, call: Call) -> Generated:
        if not _is_served(call.params):
            self._check_plain(call)
            return await self.backend.generate(call)
        text, meta = "", dict[str, Any]()
        async with aclosing(self._pieces(call, streaming=False)) as pieces:
            async for piece in pieces:
                text += piece.text
                meta |= piece.meta
        return Generated([text], [meta])

    async def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        served = _is_served(call.params)
        if not served:
            self._check_plain(call)
        async with aclosing(self._pieces(call, True) if served else self.backend.stream(call)) as pieces:
            async for piece in pieces:
                yield piece

    # ------------------------------------------------------------ one call

    async def _pieces(self, call: Call, streaming: bool) -> AsyncGenerator[OutputPiece, None]:
        """The output of a call: from a draft, or from a call that makes one."""
        for draft in self._drafts_for(call):
            if (found := await self._found(draft, call)) is not None:
                start, cut = found
                yield _piece(draft, start, cut, speculated=True)
                return
        if not self._continues and (call.partial or (_last_call(call.template) >= 0 and not streaming)):
            message = await self._whole_message(call, streaming)
            if message is not None:
                yield _piece(*message, speculated=False)
                return
            self._exceeds = False
        asked = call.params.max_new_tokens or 0
        draft = await self._begin(call, streaming, max(asked, self.num_tokens) if self._exceeds else asked)
        if streaming and draft.limit == call.params.max_new_tokens:
            async for piece in _as_it_grows(draft, call.params.stop or ()):
                yield piece
            return
        own = await draft.cut(0, call.params)
        if own is not None:
            yield _piece(draft, 0, own, speculated=False)
            return
        if draft.error is not None:
            raise draft.error
        self._exceeds = False
        async with aclosing(self._source(call, streaming)) as pieces:  # as in a plain run
            async for piece in pieces:
                yield piece

    def _drafts_for(self, call: Call) -> list[Draft]:
        """The drafts that may have a call's output: those of its branch, and without chance those of others."""
        own = list(reversed(self._own.get(call.branch, ())))
        if call.params.temperature:
            return own
        return own + [draft for draft in reversed(self._drafts) if draft.call.branch != call.branch]

    def _keep(self, draft: Draft) -> None:
        self._drafts.append(draft)
        self._own.setdefault(draft.call.branch, deque(maxlen=MAX_TRIES + 1)).append(draft)

    async def _found(self, draft: Draft, call: Call) -> tuple[int, Cut] | None:
        """The output of a call in a draft, if it is there."""
        params = call.params
        if any(getattr(draft.call.params, name) != getattr(params, name) for name in _SAMPLING):
            return None
        if self.is_chat_model and draft.call.messages != call.messages:
            return None
        start = await draft.position(self._text(call))
        cut = None if start is None else await draft.cut(start, params)
        if start is None or cut is None or (self._continues and not draft.begins_token(start)):
            return None
        return start, cut

    async def _whole_message(self, call: Call, streaming: bool) -> tuple[Draft, int, Cut] | None:
        """A message of the assistant in which the output of a call stands, where it begins, and its end. If there is
        none, None for a call at the beginning of a message, which can be made as it is; otherwise raises
        BackendError."""
        message = (call.branch, len(call.messages))
        limit = max(call.params.max_new_tokens or 0, self.num_tokens)
        best: tuple[int, Draft, int, Cut] | None = None
        while self._tries[message] < MAX_TRIES:
            self._tries[message] += 1
            draft = await self._begin(dataclasses.replace(call, partial=""), streaming, limit, call.partial)
            start = await draft.position(call.partial)
            cut = None if start is None else await draft.cut(start, call.params)
            if start is not None and cut is not None:
                fitting, whole = await _fitting(draft, cut, call.template)
                if best is None or fitting > best[0]:
                    best = fitting, draft, start, cut
                if whole:
                    break
            elif draft.error is not None:
                raise draft.error
            elif start is not None and draft.finish_reason != "length":
                break  # its length is not told, and will not be
            if draft.finish_reason == "length":
                limit *= 2
        if best is None and not call.partial:
            return None
        if best is None:
            why = _misfit(self._own[call.branch][-1], call)
            raise BackendError(f"{self.backend.name} does not continue messages, and the answer does not fit: {why}")
        _, draft, start, cut = best
        self._keep(draft)  # as the newest, which is looked at first
        return draft, start, cut

    # ------------------------------------------------------------ calls of the endpoint

    async def _begin(self, call: Call, streaming: bool, limit: int, message: str = "") -> Draft:
        """A new draft, whole unless it is streamed. `message`: what the program has written of it already."""
        indent = message[: len(message) - len(message.lstrip())] if message.strip() else None
        draft = Draft(call, self._text(call), limit, indent)
        self._keep(draft)
        filling = draft.fill(self._over_generated(call, streaming, limit))
        if not streaming:
            await filling
            return draft
        task = asyncio.create_task(filling)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return draft

    async def _over_generated(self, call: Call, streaming: bool, limit: int) -> AsyncGenerator[OutputPiece, None]:
        """The pieces of a call without its stop strings, with tokens if the endpoint tells them."""
        backend = self.backend
        params = dataclasses.replace(call.params, max_new_tokens=limit, stop=(), return_logprob=backend.tells_tokens)
        over = dataclasses.replace(call, params=params)
        begun = False
        try:
            async with aclosing(self._source(over, streaming)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
            return
        except BackendError as error:
            if begun or not backend.tells_tokens or error.status not in (400, 422):
                raise
            refusal = error
        without = dataclasses.replace(over, params=dataclasses.replace(params, return_logprob=False))
        async with aclosing(self._source(without, streaming)) as pieces:
            async for piece in pieces:
                if backend.tells_tokens:
                    backend.tells_tokens = False
                    log.warning("speculation goes on without tokens, which the endpoint refuses: %s", refusal)
                yield piece

    async def _source(self, call: Call, streaming: bool) -> AsyncGenerator[OutputPiece, None]:
        if streaming:
            async with aclosing(self.backend.stream(call)) as pieces:
                async for piece in pieces:
                    yield piece
        else:
            result = await self.backend.generate(call)
            yield OutputPiece(result.texts[0], result.meta[0])

    def _text(self, call: Call) -> str:
        return call.partial if self.is_chat_model else call.text

    def _check_plain(self, call: Call) -> None:
        """Raises NotSupported for a call that has to be made as it is, where that cannot be."""
        if call.partial and not self._continues:
            wrong = ", ".join(sorted(_used(call.params) - _SERVED))
            raise NotSupported(
                f"{self.backend.name} does not continue a message, so a gen with {wrong} must come first in it"
            )


def _used(params: GenParams) -> set[str]:
    """The parameters that ask for something."""
    return {name for name in params.used() if name not in NEUTRAL or getattr(params, name) != NEUTRAL[name]}


def _is_served(params: GenParams) -> bool:
    """Whether a call may be served from a draft, and may make one."""
    return _used(params) <= _SERVED and bool(params.max_new_tokens)


def _piece(draft: Draft, start: int, cut: Cut, speculated: bool) -> OutputPiece:
    meta = {"id": draft.meta.get("id")} if speculated else dict(draft.meta)
    meta |= {"finish_reason": cut.finish_reason, "speculated": speculated}
    return OutputPiece(draft.text[start : cut.end], meta)


async def _as_it_grows(draft: Draft, stops: Sequence[str]) -> AsyncGenerator[OutputPiece, None]:
    """The output of the call that made a draft with its own `max_tokens`."""
    sent = 0
    while True:
        stop = first_stop(draft.text, stops, sent)
        if stop is None and draft.done and draft.error is not None:
            raise draft.error
        if stop is not None or draft.done:
            end, reason = (stop[0], "stop") if stop is not None else (len(draft.text), str(draft.finish_reason))
            yield _piece(draft, sent, Cut(end, reason), speculated=False)
            return
        ready = len(draft.text) - held_back(draft.text[sent:], stops)
        if ready > sent:
            yield OutputPiece(draft.text[sent:ready])
            sent = ready
        await draft.grown()


async def _fitting(draft: Draft, cut: Cut, template: Sequence[str | GenParams]) -> tuple[int, bool]:
    """How many parts of what is known to follow fit the draft, and whether all do. Constant text after the last call is
    the program's own."""
    at = cut.end
    last = _last_call(template)
    for number, part in enumerate(template[: last + 1]):
        if isinstance(part, str):
            if not await draft.has(part, at):
                return number, False
            at += len(part)
        elif not _is_served(part) or (end := await draft.cut(at, part)) is None:
            return number, False
        else:
            at = end.end
    return last + 1, True


def _last_call(template: Sequence[str | GenParams]) -> int:
    """The number of the last call's part; -1 if there is none."""
    return max((number for number, part in enumerate(template) if not isinstance(part, str)), default=-1)


def _misfit(draft: Draft, call: Call) -> str:
    """Why a whole message has no output for a call."""
    expected, found, limit = call.partial, draft.text, call.params.max_new_tokens
    if draft.finish_reason == "length" and (found.startswith(expected) or expected.startswith(found)):
        return f"it is cut off after {draft.limit} tokens, before this gen ends: raise num_api_spec_tokens"
    if found.startswith(expected):
        return f"whether this gen has more than its max_tokens of {limit} is not told: give it {draft.limit}"
    pairs = zip(expected, found, strict=False)
    at = next((number for number, (own, other) in enumerate(pairs) if own != other), min(len(expected), len(found)))
    before, other = expected[max(0, at - MAX_SHOWN_CHARS) : at], found[at : at + MAX_SHOWN_CHARS]
    own = expected[at : at + MAX_SHOWN_CHARS]
    return f"after {before!r} the program's text is {own!r}, and the answer's {other!r}"
