"""All sequences of one HTTP request, run beside each other and written as one answer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

import msgspec

from router.errors import ApiError
from router.job import Job, Sequence
from router.responses import PromptTokensDetails, Usage
from router.service import Service
from router.sse import DONE, Emit
from router.transcript import Piece, Transcript
from worker.messages import Output


class Format(Protocol):
    """How pieces of text become bytes for the client. `continues`: the text goes on from the prompt."""

    continues: bool

    def opening(self, index: int) -> bytes: ...

    def chunk(self, index: int, piece: Piece) -> bytes: ...

    def usage(self, usage: Usage) -> bytes: ...

    def whole(self, answers: list[Piece], usage: Usage) -> bytes: ...


class Generation:
    """Runs a job. When one of its sequences fails, or the caller is cancelled, all are stopped at once."""

    def __init__(self, service: Service, job: Job, form: Format) -> None:
        self._service = service
        self._job = job
        self._form = form
        self._completion_tokens = self._cached_tokens = 0

    async def stream(self, emit: Emit) -> None:
        """Emits server-sent events: chunks of all choices as they come, at the end the usage if it is wanted.
        Raises ApiError."""

        async def follow(sequence: Sequence) -> None:
            opening = self._form.opening(sequence.index)

            async def take(piece: Piece) -> None:
                nonlocal opening
                data = opening + self._form.chunk(sequence.index, piece)
                opening = b""
                if data:
                    await emit(data)

            await self._follow(sequence, take)

        await _together([follow(sequence) for sequence in self._job.sequences])
        await emit((self._form.usage(self._usage()) if self._job.include_usage else b"") + DONE)

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises ApiError."""
        answers = [Piece() for _ in self._job.sequences]

        async def follow(sequence: Sequence) -> None:
            answer = answers[sequence.index]
            text: list[str] = []

            async def take(piece: Piece) -> None:
                text.append(piece.text)
                answer.tokens += piece.tokens
                answer.finish_reason = piece.finish_reason

            await self._follow(sequence, take)
            answer.text = "".join(text)

        await _together([follow(sequence) for sequence in self._job.sequences])
        return self._form.whole(answers, self._usage())

    async def _follow(self, sequence: Sequence, take: Callable[[Piece], Awaitable[None]]) -> None:
        """One sequence from its first piece to its last."""
        job = self._job
        transcript = Transcript(
            self._service.tokenizer,
            stop=job.stop,
            min_tokens=sequence.sampling.min_tokens,
            skip_special_tokens=job.skip_special_tokens,
            continues=self._form.continues and not job.echo,
            wants_logprobs=job.wants_logprobs,
        )
        outputs = self._service.generate(
            f"{job.id}-{sequence.index}", sequence.prompt.token_ids, sequence.sampling, job.priority, job.arrived
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
                            await take(transcript.echo(prompt.token_ids, prompt.text, output.prompt_logprobs))
                    piece = transcript.push(_without_tokens(output) if job.discard else output)
                    if piece.finish_reason is not None:
                        ending = piece.finish_reason
                    await take(piece)
                    if piece.finish_reason is not None:
                        break
        except ApiError as error:
            ending = "error" if error.status < 500 else "failed"
            if error.param == "prompt":  # as replicas call it
                error.param = job.prompt_param
            raise
        except OSError:  # of the client's connection
            raise
        except Exception:
            ending = "failed"
            raise
        finally:
            self._service.metrics.sequences.labels(ending).inc()
            self._completion_tokens += transcript.num_tokens

    def _usage(self) -> Usage:
        prompt, completion = self._job.prompt_tokens, self._completion_tokens
        return Usage(prompt, completion, prompt + completion, PromptTokensDetails(self._cached_tokens))


def _without_tokens(output: Output) -> Output:
    return msgspec.structs.replace(output, token_ids=[], logprobs=[], finish_reason="length", stop_token_id=None)


async def _together(sequences: list[Coroutine[Any, Any, None]]) -> None:
    """Runs all; raises the first error, after the others have been stopped."""
    if len(sequences) == 1:
        return await sequences[0]
    try:
        async with asyncio.TaskGroup() as group:
            for sequence in sequences:
                group.create_task(sequence)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
