"""pydantic-ai: agents with text, tools and each way of typed output, by chat completions, Responses and Messages."""

from typing import Any

from pydantic_ai import Agent, NativeOutput, ToolOutput, UsageLimitExceeded, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.forecast import QUESTION, Forecast, forecast

checks = Checks()
GREEDY: Any = {"temperature": 0, "max_tokens": 16}
TYPED: Any = {"temperature": 0, "max_tokens": 150, "parallel_tool_calls": False}


def _chat(at: ServedModel) -> Any:
    return OpenAIChatModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="none"))


def _responses(at: ServedModel) -> Any:
    return OpenAIResponsesModel(at.model, provider=OpenAIProvider(base_url=at.v1, api_key="none"))


def _messages(at: ServedModel) -> Any:
    return AnthropicModel(at.model, provider=AnthropicProvider(base_url=at.url, api_key="none"))


@checks("text with instructions and history: chat, Responses, Messages")
def text(at: ServedModel) -> None:
    for model in (_chat(at), _responses(at), _messages(at)):
        agent = Agent(model, instructions="Be brief.", model_settings=GREEDY)
        first = agent.run_sync("Hello!")
        second = agent.run_sync("And then?", message_history=first.all_messages())
        assert first.output and second.output and second.usage.input_tokens > 0


@checks("run_stream")
def stream(at: ServedModel) -> None:
    result = Agent(_chat(at), model_settings=GREEDY).run_stream_sync("Hello!")
    *_, last = result.stream_text()
    assert last == result.get_output()


@checks("output by a tool: chat, Responses, Messages")
def output_tool(at: ServedModel) -> None:
    for model in (_chat(at), _responses(at), _messages(at)):
        agent: Any = Agent(model, output_type=ToolOutput(Forecast, strict=True), model_settings=TYPED)
        assert isinstance(agent.run_sync(QUESTION).output, Forecast)


@checks("NativeOutput: chat, Responses")
def native(at: ServedModel) -> None:
    for model in (_chat(at), _responses(at)):
        agent: Any = Agent(model, output_type=NativeOutput(Forecast), model_settings=TYPED)
        assert isinstance(agent.run_sync(QUESTION).output, Forecast)


@checks("an agent with a tool: the call is run, its result comes back: chat, Responses, Messages")
def tool(at: ServedModel) -> None:
    called: list[int] = []

    def weather(days: int) -> str:
        """The weather of the next days."""
        called.append(days)
        return forecast("Paris", days)

    # A small model must be asked to call, each time: so the second request, with the result, is the last one.
    asked = {"tool_choice": "required"}, {"tool_choice": "required"}, {"tool_choice": {"type": "any"}}
    for model, extra_body in zip((_chat(at), _responses(at), _messages(at)), asked, strict=True):
        agent: Any = Agent(model, tools=[weather], model_settings=TYPED | {"extra_body": extra_body})
        before = len(called)
        try:
            agent.run_sync(QUESTION, usage_limits=UsageLimits(request_limit=2))
        except UsageLimitExceeded:
            assert len(called) > before + 1, model
