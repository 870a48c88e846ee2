"""openai-agents: agents by chat completions and by Responses, streams, tools, sessions, structured output."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import agents
import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, SQLiteSession

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.forecast import QUESTION, Forecast, forecast

checks = Checks()
agents.set_tracing_disabled(True)
GREEDY = ModelSettings(temperature=0)
ONE_CALL = ModelSettings(temperature=0, tool_choice="required", parallel_tool_calls=False)
BOTH = (OpenAIChatCompletionsModel, OpenAIResponsesModel)


def _each(at: ServedModel, use: Callable[[Any], Awaitable[None]]) -> None:
    """Uses the model by both of the server's endpoints."""

    async def go() -> None:
        async with openai.AsyncOpenAI(base_url=at.v1, api_key="none", max_retries=0) as client:
            for kind in BOTH:
                await use(kind(model=at.model, openai_client=client))

    asyncio.run(go())


@checks("a run, and a streamed one")
def run(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        agent = Agent(name="A", instructions="Be brief.", model=model, model_settings=GREEDY)
        whole = await Runner.run(agent, "Hello!")
        streamed = Runner.run_streamed(agent, "Hello!")
        events = [event async for event in streamed.stream_events()]
        assert events and whole.final_output == streamed.final_output != ""
        assert whole.context_wrapper.usage.output_tokens > 0

    _each(at, use)


@checks("a tool is called and its result sent back, whole and streamed")
def tools(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        agent = Agent(name="A", model=model, model_settings=ONE_CALL, tools=[agents.function_tool(forecast)])
        whole = await Runner.run(agent, QUESTION)
        streamed = Runner.run_streamed(agent, QUESTION)
        async for _ in streamed.stream_events():
            pass
        for made in (whole, streamed):
            outputs = [item for item in made.new_items if item.type == "tool_call_output_item"]
            assert len(outputs) == 1 and "the sky is blue" in str(outputs[0].output) and made.final_output, (
                made.new_items
            )

    _each(at, use)


@checks("second turns: a session, and a list with everything that was said")
def turns(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        agent = Agent(name="A", model=model, model_settings=ONE_CALL, tools=[agents.function_tool(forecast)])
        session = SQLiteSession("one")
        first = await Runner.run(agent, QUESTION, session=session)
        assert (await Runner.run(agent, "And then?", session=session)).final_output
        assert (await Runner.run(agent, [*first.to_input_list(), {"role": "user", "content": "And?"}])).final_output

    _each(at, use)


@checks("responses: previous_response_id")
def previous(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        if isinstance(model, OpenAIResponsesModel):
            agent = Agent(name="A", model=model, model_settings=GREEDY)
            first = await Runner.run(agent, "Hello!")
            assert (await Runner.run(agent, "Again!", previous_response_id=first.last_response_id)).final_output

    _each(at, use)


@checks("output_type")
def output_type(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        agent = Agent(name="A", model=model, model_settings=GREEDY, output_type=Forecast)
        assert isinstance((await Runner.run(agent, QUESTION)).final_output, Forecast)

    _each(at, use)


@checks("a handoff to another agent")
def handoff(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        other = Agent(name="Other", model=model, model_settings=GREEDY)
        first = Agent(name="First", model=model, model_settings=ONE_CALL, handoffs=[other])
        assert (await Runner.run(first, "Hello!")).last_agent.name == "Other"

    _each(at, use)


@checks("hints: store, verbosity, prompt_cache_retention, metadata")
def hints(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        settings = ModelSettings(
            store=True, verbosity="low", prompt_cache_retention="24h", metadata={"a": "b"}, include_usage=True
        )
        assert (await Runner.run(Agent(name="A", model=model, model_settings=settings), "Hello!")).final_output

    _each(at, use)


@checks("a full context has its own code")
def full_context(at: ServedModel) -> None:
    async def use(model: Any) -> None:
        error: Any
        (error,) = await asyncio.gather(Runner.run(Agent(name="A", model=model), at.long_text), return_exceptions=True)
        assert isinstance(error, openai.BadRequestError) and error.code == "context_length_exceeded", error

    _each(at, use)


@checks("conversations: the error says what to use")
def conversations(at: ServedModel) -> None:
    client = openai.OpenAI(base_url=at.v1, api_key="none", max_retries=0)
    assert "previous_response_id" in str(refused(openai.NotFoundError, client.conversations.create))
