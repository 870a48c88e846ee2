"""All sequences of an HTTP request, run concurrently and written as one answer."""

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from router.access.rate_limits import Ticket
from router.chat.deltas import CallBegin, CallEnd, Delta, TextDelta
from router.formats.lexer import Lexer
from router.metrics import request_log
from router.prepare.answer_syntax import AnswerSyntax
from router.prepare.prepared_request import Choice, PreparedRequest
from router.prepare.sampling import sequence_seed
from router.prepare.structure import STRUCTURE
from router.programs import BranchUnknown, Held, Programs, Turn, kept_tokens
from router.service import Service, SharedReplica
from router.streaming.deadline import within
from router.streaming.sse import Emit
from router.text.output_text import OutputText, Piece, TokenText
from router.text.tokenizer import Tokenizer
from router.text.visible_stop import VisibleStop
from router.wire.errors import ApiError, program_unknown
from router.wire.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from worker.messages import Output, SamplingParams, SchemaCheck, TokenLogprobs

# With a keyword that half of the answers violate, one in 16 is still invalid then.
_MAX_SAMPLED_AGAIN = 3
# Sequences of one request that run at once: a request of 2,048 texts must not fill the queues of replicas.
_MAX_SEQUENCES_AT_ONCE = 512

NO_USAGE = Usage(0, 0, 0, PromptTokensDetails(0))
OnPiece = Callable[[Piece], Awaitable[None]]


class Format(Protocol):
    """How pieces of text become bytes for the client. `continues`: whether the text continues the prompt.

    | method | bytes |
    | --- | --- |
    | `opening` | of a stream, before the first piece of a choice |
    | `chunk` | of a stream, one piece of a choice |
    | `closing` | of a stream, after all choices |
    | `whole` | the answer as one JSON object |

    `usage`: the tokens so far; for a chunk that is not the first, only with the request's `usage_so_far`.
    """

    continues: bool

    def opening(self, index: int, usage: Usage) -> bytes: ...

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes: ...

    def closing(self, usage: Usage) -> bytes: ...

    def whole(self, answers: list[Piece], usage: Usage) -> bytes: ...


class WholeFormat:
    """The parts of a format that has no stream."""

    continues = False

    def opening(self, index: int, usage: Usage) -> bytes:
        return b""

    def chunk(self, index: int, piece: Piece, usage: Usage) -> bytes:
        return b""

    def closing(self, usage: Usage) -> bytes:
        return b""


class Generation:
    """Runs a prepared request. When one of its sequences fails, or the caller is cancelled, all are stopped at once."""

    def __init__(
        self,
        service: Service,
        prepared: PreparedRequest,
        form: Format,
        name: str,
        ticket: Ticket,
        timeout_s: float | None = None,
    ) -> None:
        """`name`: the request's unique name, for replicas and logs. `ticket`: the client's, with which the request was
        admitted. Its priority is lowered to what the client may have. `timeout_s`: seconds after its arrival in which
        all sequences must have ended."""
        self.ticket = ticket
        self._timeout_s = timeout_s
        self._priority = min(prepared.priority, service.highest_priority(ticket.client))
        self._cache_salt = ticket.client.cache_salt(prepared.cache_salt)
        self._service = service
        self._prepared = prepared
        self._form = form
        self._name = name
        self._answers: list[Answer] = []
        self._shared = SharedReplica() if prepared.together else None
        self._sends_at_once = True  # text is sent before its answer has ended

    async def stream(self, emit: Emit) -> None:
        """Emits server-sent events: chunks of all choices as they come. Raises ApiError."""

        async def follow_whole(sequence: Choice) -> None:
            answer = self._answer(sequence)
            whole = await self._collected(sequence, answer)
            await emit(self._form.chunk(sequence.index, whole, self._usage(answer)))

        async def follow(sequence: Choice) -> None:
            begun = False

            async def on_piece(piece: Piece) -> None:
                nonlocal begun
                nothing_told = begun and not self._prepared.usage_so_far
                usage = NO_USAGE if nothing_told else self._usage()
                data = self._form.chunk(sequence.index, piece, usage)
                if not begun:
                    begun = True
                    data = self._form.opening(sequence.index, usage) + data
                if data:
                    await emit(data)

            await self._follow(sequence, self._answer(sequence), on_piece)

        one = follow_whole if self._prepared.whole_choices else follow
        self._sends_at_once = not self._prepared.whole_choices
        self._begin()
        await self._run_all([one(sequence) for sequence in self._prepared.sequences])
        if data := self._form.closing(self._usage()):
            await emit(data)

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises ApiError."""
        answers = [Piece() for _ in self._prepared.sequences]
        self._sends_at_once = False

        async def follow(sequence: Choice) -> None:
            answers[sequence.index] = await self._collected(sequence, self._answer(sequence))

        self._begin()
        await self._run_all([follow(sequence) for sequence in self._prepared.sequences])
        return self._form.whole(answers, self._usage())

    def _begin(self) -> None:
        self.ticket.add_tokens(prompt=self._prepared.prompt_tokens)
        # Each sequence counts as a request of its own would: of a prompt, cached tokens count, too.
        all_prompts = sum(len(sequence.prompt.token_ids) for sequence in self._prepared.sequences)
        self.ticket.add_again(all_prompts - self._prepared.prompt_tokens)
        if (entry := request_log.current()) is not None:
            entry.prompt_tokens += self._prepared.prompt_tokens

    async def _run_all(self, sequences: list[Coroutine[Any, Any, None]]) -> None:
        """Runs the sequences to their ends. Raises ApiError, also when the time is over."""
        async with within(self._timeout_s, self._prepared.arrived, self._service.missed_deadline):
            await _together(sequences, _MAX_SEQUENCES_AT_ONCE)

    async def _collected(self, sequence: Choice, answer: "Answer") -> Piece:
        """Runs one sequence. Returns all of its text as one piece."""
        whole = Piece()
        text: list[str] = []
        deltas: list[Delta] = []

        async def on_piece(piece: Piece) -> None:
            text.append(piece.text)
            whole.tokens += piece.tokens
            whole.token_ids += piece.token_ids
            whole.finish_reason, whole.stop, whole.stop_token_id = piece.finish_reason, piece.stop, piece.stop_token_id
            whole.prompt_logprobs = piece.prompt_logprobs or whole.prompt_logprobs
            if piece.deltas is not None:
                deltas.extend(piece.deltas)
                whole.deltas = deltas
            whole.embedding = piece.embedding
            whole.check, whole.sampled_again = piece.check, piece.sampled_again

        await self._follow(sequence, answer, on_piece)
        whole.text = "".join(text)
        return whole

    def _answer(self, sequence: Choice) -> "Answer":
        answer = Answer(
            self._service.tokenizer, self._prepared, sequence, self._form.continues and not self._prepared.echo
        )
        self._answers.append(answer)
        return answer

    async def _follow(self, sequence: Choice, answer: "Answer", on_piece: OnPiece) -> None:
        """Runs one sequence, and passes each piece of its text to `on_piece`."""
        if sequence.held is None:
            await self._run(sequence, answer, on_piece)
        else:
            await self._continue(sequence.held, sequence, answer, on_piece)

    async def _continue(self, held: Held, sequence: Choice, running: "Answer", on_piece: OnPiece) -> None:
        """Runs the sequence of a request that continues a branch. The branch holds its text before the client has the
        end of it."""
        programs, prompt = self._service.programs, sequence.prompt
        text: list[str] = []

        async def keep(piece: Piece) -> None:
            turn.previous = None  # from now on, the client may have text
            text.append(piece.text)
            if piece.finish_reason is not None:
                transcript = running.text
                answer = "".join(text)
                kept = kept_tokens(transcript.token_ids, transcript.ends, answer, transcript.is_cut)
                branch = held.branch.extended(prompt.text or "", prompt.token_ids, answer, *kept)
                programs.end(turn, branch)
                if sequence.call is not None and sequence.call.then:
                    name, user = f"{self._name}-{sequence.index}-then", self.ticket.client.user(self._prepared.user)
                    self._service.prefetch(name, branch, sequence.call, self._cache_salt, self.ticket, user)
            await on_piece(piece)

        with turn_on(programs, held) as turn:
            await self._run(sequence, running, keep)

    async def _run(self, sequence: Choice, answer: "Answer", on_piece: OnPiece) -> None:
        prepared = self._prepared
        begun = False
        ending = "abandoned"
        entry = request_log.current()
        try:
            async with contextlib.aclosing(self._outputs(sequence, answer)) as outputs:
                async for output in outputs:
                    if not begun:
                        begun = True
                        if sequence.first:
                            answer.cached_tokens = output.cached_tokens or 0
                            if entry is not None:
                                entry.cached_tokens += answer.cached_tokens
                        if prepared.prompt_logprobs is not None and output.prompt_logprobs is not None:
                            await on_piece(Piece(prompt_logprobs=output.prompt_logprobs))
                        if prepared.echo:
                            prompt = sequence.prompt
                            of_prompt = _with_top(output.prompt_logprobs, sequence.sampling.logprobs)
                            await on_piece(answer.text.echo(prompt.token_ids, prompt.text, of_prompt))
                        elif output.prompt_logprobs is not None and prepared.prompt_logprobs is None:
                            token_ids = sequence.prompt.token_ids[sequence.sampling.prompt_logprobs_start :]
                            scores = zip(token_ids, output.prompt_logprobs, strict=True)
                            await on_piece(Piece(tokens=[TokenText(0, *score) for score in scores]))
                    self.ticket.add_tokens(output=len(output.token_ids))
                    answer.num_drafted += output.num_drafted
                    answer.num_accepted += output.num_accepted
                    piece = answer.push(_without_tokens(output) if prepared.discard else output)
                    if piece.finish_reason is not None:
                        ending = piece.finish_reason
                    await on_piece(piece)
                    if piece.finish_reason is not None:
                        break
        except ApiError as error:
            ending = "error" if error.status < 500 else "failed"
            if error.param == "prompt":  # the replicas' name for it
                error.param = prepared.prompt_param
            elif error.param in STRUCTURE and prepared.grammar_param is not None:
                error.param = prepared.grammar_param
            raise
        except OSError:  # the client's connection broke
            raise
        except Exception:
            ending = "failed"
            raise
        finally:
            self._service.metrics.ended(ending)
            if entry is not None:
                entry.ended(ending)
                entry.output_tokens += answer.text.num_tokens

    def _outputs(self, sequence: Choice, answer: "Answer") -> AsyncGenerator[Output, None]:
        """The outputs of a sequence."""
        syntax, budget = self._prepared.syntax, self._prepared.thinking_budget
        if syntax is not None and budget is not None and budget < sequence.sampling.max_tokens:
            return self._within_budget(sequence, answer, syntax, budget)
        return self._after(sequence, answer, [])

    async def _within_budget(
        self, sequence: Choice, answer: "Answer", syntax: AnswerSyntax, budget: int
    ) -> AsyncGenerator[Output, None]:
        """The outputs of a sequence that may think for `budget` tokens. Longer thinking is ended for the model: the
        sequence goes on after the tokens that end it."""
        prepared, sampling = self._prepared, sequence.sampling
        produced: list[int] = []
        async with contextlib.aclosing(self._generate(sequence, sampling, budget, [])) as outputs:
            async for output in outputs:
                produced += output.token_ids
                if output.finish_reason != "length":
                    yield output
                    continue
                yield msgspec.structs.replace(output, finish_reason=None)
                if answer.is_thinking:
                    ids = syntax.end_of_thinking[: sampling.max_tokens - len(produced)]
                    logprobs = [TokenLogprobs(token_id, 0.0) for token_id in ids] if prepared.wants_logprobs else []
                    produced += ids
                    is_whole = len(produced) == sampling.max_tokens
                    yield Output(
                        request_id=output.request_id,
                        token_ids=ids,
                        logprobs=logprobs,
                        finish_reason="length" if is_whole else None,
                    )
        if len(produced) < sampling.max_tokens:
            async with contextlib.aclosing(self._after(sequence, answer, produced)) as outputs:
                async for output in outputs:
                    yield output

    def _after(self, sequence: Choice, answer: "Answer", produced: list[int]) -> AsyncGenerator[Output, None]:
        """The outputs of a sequence after the tokens `produced`."""
        sampling = sequence.sampling
        if self._sends_at_once or sampling.grammar is None or sampling.grammar.strict:
            return self._generate(sequence, sampling, sampling.max_tokens, produced)
        return self._judged(sequence, answer, produced)

    async def _judged(self, sequence: Choice, answer: "Answer", produced: list[int]) -> AsyncGenerator[Output, None]:
        """The outputs of a sequence after the tokens `produced`, all at its end. One that violates its schema is
        sampled again from the value that does, at most `_MAX_SAMPLED_AGAIN` times."""
        sampling, held, kept_ids = sequence.sampling, list[Output](), list(produced)
        while True:
            name = f"-again{answer.sampled_again}" if answer.sampled_again else ""
            new = self._generate(sequence, sampling, sampling.max_tokens, kept_ids, name)
            async with contextlib.aclosing(new) as outputs:
                async for output in outputs:
                    held.append(output)
            check = held[-1].check
            if check is None or check.valid is not False or answer.sampled_again == _MAX_SAMPLED_AGAIN:
                break
            count = sum(len(output.token_ids) for output in held)
            held = _first_tokens(held, check.kept_tokens - len(produced))
            kept_ids = [*produced, *(token_id for output in held for token_id in output.token_ids)]
            self.ticket.add_tokens(output=count + len(produced) - len(kept_ids))
            answer.sampled_again += 1
            sampling = msgspec.structs.replace(
                sampling,
                seed=sequence_seed(sampling.seed, answer.sampled_again),
                # The likeliest tokens would be the same again.
                temperature=sampling.temperature or 1.0,
                top_k=0 if sampling.top_k == 1 else sampling.top_k,
            )
        for output in held:
            yield output

    def _generate(
        self, sequence: Choice, sampling: SamplingParams, max_tokens: int, produced: list[int], name: str = ""
    ) -> AsyncGenerator[Output, None]:
        prepared = self._prepared
        if max_tokens < sampling.max_tokens:
            min_tokens = min(sampling.min_tokens, max_tokens)
            sampling = msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)
        if produced:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return self._service.generate(
            f"{self._name}-{sequence.index}" + (name or ("-answer" if produced else "")),
            sequence.prompt.token_ids,
            sampling,
            self._priority,
            prepared.arrived,
            sequence.call,
            produced,
            prepared.prediction_ids,
            self._shared,
            self.ticket.client,
            self.ticket.client.user(prepared.user),
            self._cache_salt,
        )

    def _usage(self, only: "Answer | None" = None) -> Usage:
        """The tokens of all choices so far, or of one."""
        answers = self._answers if only is None else [only]
        prompt = self._prepared.prompt_tokens if only is None else only.prompt_tokens
        completion = sum(answer.text.num_tokens for answer in answers)
        cached = sum(answer.cached_tokens for answer in answers)
        usage = Usage(prompt, completion, prompt + completion, PromptTokensDetails(cached))
        if self._prepared.syntax is not None and self._prepared.syntax.may_think:
            thinking = sum(answer.thinking_tokens for answer in answers)
            usage.completion_tokens_details = CompletionTokensDetails(thinking)
        if drafted := sum(answer.num_drafted for answer in answers):
            accepted = sum(answer.num_accepted for answer in answers)
            details = usage.completion_tokens_details or CompletionTokensDetails()
            details.accepted_prediction_tokens = accepted
            details.rejected_prediction_tokens = drafted - accepted
            usage.completion_tokens_details = details
        return usage


class Answer:
    """A sequence as it grows: its text, and what a lexer makes of it.

    With a lexer, stop strings count in the visible text alone. What was promised and is not whole at the end never
    ended with `stop`: a call that was begun, a call that had to be made, text that had to be JSON.

    | attribute | meaning |
    | --- | --- |
    | `text` | the text, before the lexer |
    | `is_thinking` | whether the text so far ends while the model thinks |
    | `thinking_tokens` | number of tokens with which it thought |
    | `prompt_tokens` | tokens of its prompt |
    | `cached_tokens` | how many of them a replica had; 0 unless it is the first choice of its prompt |
    | `num_drafted`, `num_accepted` | tokens that were drafted; how many of them were right |
    | `sampled_again` | how often a part of it was thrown away because it violated a schema |
    """

    def __init__(self, tokenizer: Tokenizer, prepared: PreparedRequest, sequence: Choice, continues: bool) -> None:
        syntax = prepared.syntax
        self.text = OutputText(
            tokenizer,
            stop=prepared.stop if syntax is None else (),
            include_stop=prepared.include_stop,
            min_tokens=sequence.sampling.min_tokens,
            skip_special_tokens=prepared.skip_special_tokens,
            continues=continues,
            wants_logprobs=prepared.wants_logprobs,
            wants_ends=sequence.held is not None,
            marker_ids=frozenset() if syntax is None else syntax.marker_ids,
        )
        self._lexer = None if syntax is None else syntax.lexer()
        self._syntax = syntax
        self._one_call = syntax is not None and not syntax.parallel
        self._stop = VisibleStop(prepared.stop, prepared.include_stop) if syntax is not None and prepared.stop else None
        self._min_tokens = sequence.sampling.min_tokens
        self._waiting: deque[TokenText] = deque()  # tokens of text that may be part of a stop string
        self._promised = prepared.promised
        self._json: list[str] = []  # the text so far, if it has to be JSON
        self._has_calls = self._in_call = False
        self.prompt_tokens = len(sequence.prompt.token_ids)
        self.cached_tokens = self.num_drafted = self.num_accepted = self.sampled_again = 0
        self._check: SchemaCheck | None = None

    @property
    def is_thinking(self) -> bool:
        return self._lexer is not None and self._lexer.is_thinking

    @property
    def thinking_tokens(self) -> int:
        return 0 if self._lexer is None else self._lexer.thinking_tokens(self.text.num_tokens)

    def push(self, output: Output) -> Piece:
        """The piece that the output adds. A sequence that may have one call ends with it."""
        if self._stop is None or len(output.token_ids) < 2:
            return self._push(output)
        # Which token completes a stop string must not depend on how many came at once.
        whole = Piece(deltas=[])
        for part in _one_by_one(output):
            piece = self._push(part)
            piece.text, piece.tokens = whole.text + piece.text, whole.tokens + piece.tokens
            piece.token_ids, piece.deltas = whole.token_ids + piece.token_ids, (whole.deltas or []) + piece.parts
            whole = piece
            if whole.finish_reason is not None:
                break
        return whole

    def _push(self, output: Output) -> Piece:
        piece = self.text.push(output)
        self._check = output.check or self._check
        piece.check, piece.sampled_again = self._check, self.sampled_again
        if self._lexer is not None and self._syntax is not None:
            self._read(piece, self._lexer, self._syntax)
        if self._promised == "json":
            self._json += (part.text for part in piece.parts if isinstance(part, TextDelta))
        if piece.finish_reason == "stop" and not self._is_whole():
            piece.finish_reason = "length"
        if self._has_calls and piece.finish_reason == "stop":
            piece.finish_reason = "tool_calls"
        if piece.finish_reason is not None and piece.stop is None:
            piece.stop_token_id = output.stop_token_id
        return piece

    def _read(self, piece: Piece, lexer: Lexer, syntax: AnswerSyntax) -> None:
        """Adds the deltas to a piece, and ends it where a stop string or the only call does."""
        found = lexer.push(piece.text, piece.marks)
        if piece.finish_reason is not None:
            is_cut = piece.finish_reason == "length"
            if lexer.begins_call(is_cut):  # markup is no text
                self._in_call = True
            elif is_cut and self._promised == "calls":
                found += (delta for delta in lexer.flush() if not isinstance(delta, TextDelta))
            else:
                found += lexer.flush()
        if self._stop is not None:
            is_last = piece.finish_reason is not None
            found = self._stop.push(found, searches=self.text.num_tokens > self._min_tokens, is_last=is_last)
            if self._stop.found is not None:
                piece.finish_reason, piece.stop = "stop", self._stop.found
            self._waiting += piece.tokens
            sent = lexer.consumed - self._stop.held
            piece.tokens = []
            while self._waiting and (self._waiting[0].offset < sent or (is_last and piece.stop is None)):
                piece.tokens.append(self._waiting.popleft())
        for number, delta in enumerate(found):
            if isinstance(delta, CallBegin | CallEnd):
                self._in_call = isinstance(delta, CallBegin)
                self._has_calls |= isinstance(delta, CallEnd)
                if self._one_call and not self._in_call:
                    found = found[: number + 1]
                    piece.finish_reason = "stop"
                    break
        piece.deltas = [syntax.with_id(delta) if isinstance(delta, CallBegin) else delta for delta in found]

    def _is_whole(self) -> bool:
        """Whether the answer, which ends here, is all that was promised."""
        if self._in_call or (self._promised == "calls" and not self._has_calls):
            return False
        return self._promised != "json" or self._has_calls or _is_json("".join(self._json))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    except RecursionError:  # nothing says that it is none
        pass
    return True


def _one_by_one(output: Output) -> Iterator[Output]:
    """The output as one of each token."""
    last = len(output.token_ids) - 1
    for number, token_id in enumerate(output.token_ids):
        part = msgspec.structs.replace(output, token_ids=[token_id], logprobs=output.logprobs[number : number + 1])
        if number < last:
            part.finish_reason = part.stop_token_id = part.check = None
        yield part


@contextlib.contextmanager
def turn_on(programs: Programs, held: Held) -> Iterator[Turn]:
    """A request on a branch, which the caller ends with `programs.end`. A request that fails before its client has
    anything changes nothing (`Turn.previous`). One that is broken off later leaves the branch unknown, because its
    client cannot know what was generated. Raises ApiError (409) if the branch is not as `held` says."""
    try:
        turn = programs.begin(held)
    except BranchUnknown as error:
        raise program_unknown(str(error)) from None
    try:
        yield turn
    except ApiError:
        programs.undo(turn)
        raise
    except BaseException:
        programs.drop(turn)
        raise


def _first_tokens(outputs: list[Output], count: int) -> list[Output]:
    """The first `count` tokens of the outputs, which then have no end."""
    kept: list[Output] = []
    for output in outputs:
        if count <= 0 and kept:
            break
        ids = output.token_ids[: max(0, count)]
        kept.append(
            msgspec.structs.replace(
                output,
                token_ids=ids,
                logprobs=output.logprobs[: len(ids)],
                finish_reason=None,
                stop_token_id=None,
                check=None,
            )
        )
        count -= len(ids)
    return kept


def _with_top(logprobs: Sequence[TokenLogprobs | None] | None, most: int | None) -> list[TokenLogprobs | None] | None:
    """The log probabilities with at most `most` of the likeliest tokens; None without that number."""
    if logprobs is None or most is None:
        return None
    return [
        entry if entry is None or len(entry.top) <= most else msgspec.structs.replace(entry, top=entry.top[:most])
        for entry in logprobs
    ]


def _without_tokens(output: Output) -> Output:
    return msgspec.structs.replace(output, token_ids=[], logprobs=[], finish_reason="length", stop_token_id=None)


async def _together(sequences: list[Coroutine[Any, Any, None]], most: int) -> None:
    """Runs all sequences, `most` of them at once. When one raises, stops the others, then raises its error."""
    if len(sequences) == 1:
        return await sequences[0]
    waiting = iter(sequences)

    async def run_some() -> None:
        for sequence in waiting:
            await sequence

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(most, len(sequences))):
                group.create_task(run_some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        for sequence in waiting:  # they were never begun
            sequence.close()
