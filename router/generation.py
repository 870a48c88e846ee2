"""All sequences of an HTTP request, run concurrently and written as one answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from router.errors import ApiError, program_unknown
from router.output_text import OutputText, Piece, TokenText
from router.prepared_request import Choice, PreparedRequest
from router.programs import BranchUnknown, Held, Programs, Turn, kept_tokens
from router.responses import ChunkUsage, PromptTokensDetails, Usage
from router.service import Service
from router.sse import DONE, Emit
from router.structure import STRUCTURE
from worker.messages import Output

OnPiece = Callable[[Piece], Awaitable[None]]


class Format(Protocol):
    """How pieces of text become bytes for the client. `continues`: whether the text continues the prompt."""

    continues: bool

    def opening(self, index: int, usage: ChunkUsage) -> bytes: ...

    def chunk(self, index: int, piece: Piece, usage: ChunkUsage) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, answers: list[Piece], usage: Usage) -> bytes: ...


class Generation:
    """Runs a prepared request. When one of its sequences fails, or the caller is cancelled, all are stopped at once."""

    def __init__(self, service: Service, job: PreparedRequest, form: Format, name: str) -> None:
        """`name`: the request's unique name, for replicas and logs."""
        self._service = service
        self._job = job
        self._form = form
        self._name = name
        self._transcripts: list[OutputText] = []
        self._cached_tokens = 0

    async def stream(self, emit: Emit) -> None:
        """Emits server-sent events: chunks of all choices as they come, and at the end the usage if the client asked
        for it. Raises ApiError."""
        always: ChunkUsage = None if self._job.include_usage else UNSET

        async def follow(sequence: Choice) -> None:
            begun = False

            async def on_piece(piece: Piece) -> None:
                nonlocal begun
                usage = self._usage() if self._job.usage_so_far else always
                data = self._form.chunk(sequence.index, piece, usage)
                if not begun:
                    begun = True
                    data = self._form.opening(sequence.index, usage) + data
                if data:
                    await emit(data)

            await self._follow(sequence, on_piece)

        await _together([follow(sequence) for sequence in self._job.sequences])
        await emit((self._form.usage(self._usage()) if self._job.include_usage else b"") + DONE)

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises ApiError."""
        answers = [Piece() for _ in self._job.sequences]

        async def follow(sequence: Choice) -> None:
            answer = answers[sequence.index]
            text: list[str] = []

            async def on_piece(piece: Piece) -> None:
                text.append(piece.text)
                answer.tokens += piece.tokens
                answer.token_ids += piece.token_ids
                answer.finish_reason = piece.finish_reason
                answer.embedding = piece.embedding

            await self._follow(sequence, on_piece)
            answer.text = "".join(text)

        await _together([follow(sequence) for sequence in self._job.sequences])
        return self._form.whole(answers, self._usage())

    async def _follow(self, sequence: Choice, on_piece: OnPiece) -> None:
        """Runs one sequence, and passes each piece of its text to `on_piece`."""
        if self._job.held is None:
            await self._run(sequence, on_piece)
        else:
            await self._continue(self._job.held, sequence, on_piece)

    async def _continue(self, held: Held, sequence: Choice, on_piece: OnPiece) -> None:
        """Runs the sequence of a request that continues a branch. The branch holds its text before the client has the
        end of it."""
        programs, prompt = self._service.programs, sequence.prompt
        text: list[str] = []

        async def keep(piece: Piece) -> None:
            turn.previous = None  # from now on, the client may have text
            text.append(piece.text)
            if piece.finish_reason is not None:
                (transcript,) = self._transcripts
                answer = "".join(text)
                kept = kept_tokens(transcript.token_ids, transcript.ends, answer, transcript.is_cut)
                branch = held.branch.extended(prompt.text or "", prompt.token_ids, answer, *kept)
                programs.end(turn, branch)
                if sequence.call is not None and sequence.call.then:
                    self._service.prefetch(f"{self._name}-then", branch, sequence.call)
            await on_piece(piece)

        with turn_on(programs, held) as turn:
            await self._run(sequence, keep)

    async def _run(self, sequence: Choice, on_piece: OnPiece) -> None:
        job = self._job
        transcript = OutputText(
            self._service.tokenizer,
            stop=job.stop,
            include_stop=job.include_stop,
            min_tokens=sequence.sampling.min_tokens,
            skip_special_tokens=job.skip_special_tokens,
            continues=self._form.continues and not job.echo,
            wants_logprobs=job.wants_logprobs,
            wants_ends=job.held is not None,
        )
        self._transcripts.append(transcript)
        outputs = self._service.generate(
            f"{self._name}-{sequence.index}",
            sequence.prompt.token_ids,
            sequence.sampling,
            job.priority,
            job.arrived,
            sequence.call,
        )
        begun = False
        ending = "abandoned"
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if not begun:
                        begun = True
                        if sequence.first:
                            self._cached_tokens += output.cached_tokens or 0
                        if job.echo:
                            prompt = sequence.prompt
                            await on_piece(transcript.echo(prompt.token_ids, prompt.text, output.prompt_logprobs))
                        elif output.prompt_logprobs is not None:
                            token_ids = sequence.prompt.token_ids[sequence.sampling.prompt_logprobs_start :]
                            scores = zip(token_ids, output.prompt_logprobs, strict=True)
                            await on_piece(Piece(tokens=[TokenText(0, *score) for score in scores]))
                    piece = transcript.push(_without_tokens(output) if job.discard else output)
                    if piece.finish_reason is not None:
                        ending = piece.finish_reason
                    await on_piece(piece)
                    if piece.finish_reason is not None:
                        break
        except ApiError as error:
            ending = "error" if error.status < 500 else "failed"
            if error.param == "prompt":  # the replicas' name for it
                error.param = job.prompt_param
            elif error.param in STRUCTURE and job.grammar_param is not None:
                error.param = job.grammar_param
            raise
        except OSError:  # the client's connection broke
            raise
        except Exception:
            ending = "failed"
            raise
        finally:
            self._service.metrics.sequences.labels(ending).inc()

    def _usage(self) -> Usage:
        prompt, completion = self._job.prompt_tokens, sum(transcript.num_tokens for transcript in self._transcripts)
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(self._cached_tokens))


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


def _without_tokens(output: Output) -> Output:
    return msgspec.structs.replace(output, token_ids=[], logprobs=[], finish_reason="length", stop_token_id=None)


async def _together(sequences: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all sequences concurrently. When one raises, stops the others, then raises its error."""
    if len(sequences) == 1:
        return await sequences[0]
    try:
        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                group.create_task(sequence)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
