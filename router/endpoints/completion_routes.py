"""The routes of texts: chat completions, completions, scores of choices, and the ends of programs."""

from time import perf_counter

from fastapi import APIRouter, Depends, Request, Response

from router import openapi
from router.access.auth import Keys, client_of
from router.access.rate_limits import RateLimits
from router.endpoints.answering import answered
from router.endpoints.chat_writer import ChatFormat
from router.endpoints.choices import ChoicesFormat, prepare_choices
from router.endpoints.completion_writer import CompletionFormat
from router.endpoints.templates import TemplateStream, template_calls
from router.models import Models
from router.prepare.prepared_request import PreparedRequest, prepare_chat, prepare_completion
from router.prepare.program_calls import branch_call, continued_branches, held_branch, program_key
from router.programs import BranchText
from router.streaming.sse import EventStream
from router.wire.requests import ChatRequest, ChoicesRequest, CompletionRequest
from router.wire.responses import ChatChunk, ChatCompletion, Completion, ScoredChoices

# What a sequence costs to prepare, in bytes of text that cost as much: a body of few bytes may ask for thousands.
BYTES_A_SEQUENCE = 256
ERRORS = (400, 401, 404, 408, 413, 415, 429, 500, 502, 503, 504)


def completion_routes(models: Models, keys: Keys, limits: RateLimits) -> APIRouter:
    """The routes."""
    return _CompletionRoutes(models, keys, limits).routes()


class _CompletionRoutes:
    """The handlers of requests."""

    def __init__(self, models: Models, keys: Keys, limits: RateLimits) -> None:
        self._models, self._keys, self._limits = models, keys, limits

    def routes(self) -> APIRouter:
        routes = APIRouter(tags=["generation"])
        admitted, passing_on = [Depends(self._limits.admit)], self._models.passing_on
        routes.post(
            "/v1/chat/completions",
            dependencies=admitted,
            openapi_extra=openapi.body(ChatRequest),
            responses=openapi.answers(ChatCompletion, *ERRORS, stream=ChatChunk),
        )(passing_on(self.chat_completions))
        routes.post(
            "/v1/completions",
            dependencies=admitted,
            openapi_extra=openapi.body(CompletionRequest),
            responses=openapi.answers(Completion, *ERRORS, 409, stream=Completion),
        )(passing_on(self.completions))
        routes.post(
            "/v1/choices",
            dependencies=admitted,
            openapi_extra=openapi.body(ChoicesRequest),
            responses=openapi.answers(ScoredChoices, *ERRORS, 409),
        )(passing_on(self.choices))
        routes.delete("/v1/programs/{program_id:path}", status_code=204, responses=openapi.errors(401))(
            self.end_program
        )
        return routes

    async def chat_completions(self, request: Request) -> Response:
        """Answers a conversation, as a whole or as a stream."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, ChatRequest)
        service.check_priority(body.priority, client_of(request))
        body = service.defaults.complete(body)
        prepared = await service.in_thread(
            request,
            size + BYTES_A_SEQUENCE * (body.n or 1),
            prepare_chat,
            body,
            service.output_format,
            service.tokenizer,
            service.context_length,
            service.config.max_prompts,
            arrived,
            branch_call(body.program, self._keys.tenant(request)),
            service.config.clamp_max_tokens,
        )
        return await answered(
            request, service, bool(body.stream), prepared, ChatFormat(prepared, service.model, service.tokenizer)
        )

    async def completions(self, request: Request) -> Response:
        """Continues prompts, as a whole or as a stream."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, CompletionRequest)
        service.check_priority(body.priority, client_of(request))

        async def prepare(call: CompletionRequest, arrived: float) -> PreparedRequest:
            continued = continued_branches(service.programs, call, self._keys.tenant(request))
            held = sum(branch.held.branch.text_bytes for branch in continued)
            return await service.in_thread(
                request,
                size + held + BYTES_A_SEQUENCE * _num_sequences(call),
                prepare_completion,
                call,
                service.tokenizer,
                service.context_length,
                service.config.max_prompts,
                arrived,
                continued,
                service.config.clamp_max_tokens,
            )

        calls = [service.defaults.complete(call) for call in template_calls(body)]
        prepared = await prepare(calls[0], arrived)
        if len(calls) == 1:
            form = CompletionFormat(prepared, service.model, service.tokenizer)
            return await answered(request, service, bool(body.stream), prepared, form)
        state = request.state
        state.also_named(prepared.id)
        template = TemplateStream(service, calls, prepared, prepare, state.name, state.ticket, state.timeout_s)
        return EventStream(template.stream)

    async def choices(self, request: Request) -> Response:
        """Scores choices: the log probabilities of their tokens after the prompt."""
        arrived = perf_counter()
        service, body, size = await self._models.read(request, ChoicesRequest)
        branch = BranchText()
        if body.program is not None:
            branch = held_branch(service.programs, body.program, self._keys.tenant(request)).branch
        prepared = await service.in_thread(
            request,
            (size + branch.text_bytes) * len(body.choices),
            prepare_choices,
            body,
            service.tokenizer,
            service.context_length,
            service.config.max_prompts,
            arrived,
            branch_call(body.program, self._keys.tenant(request)),
            branch,
        )
        return await answered(request, service, False, prepared.request, ChoicesFormat(prepared, service.model))

    async def end_program(self, request: Request, program_id: str) -> Response:
        """Ends a program: what its branches hold is forgotten, and its leases end."""
        for service in self._models.services:
            service.end_program(program_key(self._keys.tenant(request), program_id))
        return Response(status_code=204)


def _num_sequences(call: CompletionRequest) -> int:
    """The sequences that a request asks for."""
    prompts = len(call.prompt) if isinstance(call.prompt, list) and not isinstance(call.prompt[:1], int) else 1
    return prompts * (call.n or 1)
