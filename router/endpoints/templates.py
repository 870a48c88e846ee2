"""Templates: calls of a program that follow each other on one branch, sent as one request.

    prompt │ answer 0 │ template[0].prompt │ answer 1 │ template[1].prompt │ answer 2

The router begins a call as soon as the answer before it has ended, so no call waits for the client. Each is what it
would be as a request of its own: the same tokens, sampling and constraint. One grammar over all of it would not be:
its masks would let the text that follows decide where an answer ends.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from time import perf_counter

import msgspec

from router.access.rate_limits import Ticket
from router.endpoints.completion_writer import CompletionFormat
from router.generation import NO_USAGE, Generation
from router.prepare.prepared_request import PreparedRequest
from router.service import Service
from router.streaming.deadline import within
from router.streaming.sse import Emit
from router.wire.errors import invalid
from router.wire.requests import CompletionRequest, TemplateCall
from router.wire.responses import Usage

Prepare = Callable[[CompletionRequest, float], Awaitable[PreparedRequest]]  # with the `perf_counter` of its beginning


def template_calls(request: CompletionRequest) -> list[CompletionRequest]:
    """The calls of a request, each as a request of its own: the request without its template, then those of the
    template. Raises ApiError (400)."""
    program = request.program
    if program is None or program.template is None:
        return [request]
    options = request.stream_options
    if options is None or not options.whole_choices:
        message = "A template needs 'stream' and 'stream_options.whole_choices': each answer is one event."
        raise invalid(message, "program.template")
    if program.forks is not None:
        raise invalid("Forks have no template: send a request for each branch.", "program.template")
    calls = [request]
    calls += [
        msgspec.structs.replace(request, **{name: getattr(call, name) for name in TemplateCall.__struct_fields__})
        for call in program.template
    ]
    return [
        msgspec.structs.replace(
            call,
            program=msgspec.structs.replace(
                program,
                template=None,
                then=program.then if number == len(calls) - 1 else None,
                remaining=None if program.remaining is None else max(0, program.remaining - number),
                # Later calls continue what the one before has left.
                continues=program.continues or number > 0,
                parent=None if number else program.parent,
                held=None if number else program.held,
            ),
        )
        for number, call in enumerate(calls)
    ]


class TemplateStream:
    """The answers of a template as one stream. The call of number n is the choice of index n."""

    def __init__(
        self,
        service: Service,
        calls: Sequence[CompletionRequest],
        first: PreparedRequest,
        prepare: Prepare,
        name: str,
        ticket: Ticket,
        timeout_s: float | None,
    ) -> None:
        """`first`: the first of `calls`, prepared; `prepare` does so with the others, each in its turn. `name`,
        `ticket`, `timeout_s`: as `Generation` has them."""
        self._service = service
        self._calls = calls
        self._first = first
        self._prepare = prepare
        self._name = name
        self._ticket = ticket
        self._timeout_s = timeout_s

    async def stream(self, emit: Emit) -> None:
        """Emits server-sent events: one for each answer, then the sum of their tokens. Raises ApiError."""
        usage = NO_USAGE
        prepared = self._first
        async with within(self._timeout_s, prepared.arrived, self._service.missed_deadline):
            for number, call in enumerate(self._calls):
                if number > 0:
                    prepared = replace(
                        await self._prepare(call, perf_counter()), id=prepared.id, created=prepared.created
                    )
                prepared = replace(
                    prepared, sequences=[replace(sequence, index=number) for sequence in prepared.sequences]
                )
                form = _CallFormat(prepared, self._service, usage, is_last=number == len(self._calls) - 1)
                await Generation(self._service, prepared, form, self._name, self._ticket).stream(emit)
                usage = form.usage


class _CallFormat(CompletionFormat):
    """Writes one answer of a template. `usage`: the tokens of this call and those before, once it has ended."""

    def __init__(self, prepared: PreparedRequest, service: Service, before: Usage, is_last: bool) -> None:
        super().__init__(prepared, service.model, service.tokenizer)
        self.usage = before
        self._is_last = is_last

    def closing(self, usage: Usage) -> bytes:
        self.usage += usage
        return super().closing(self.usage) if self._is_last else b""
