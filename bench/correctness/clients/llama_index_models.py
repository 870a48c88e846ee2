"""llama-index with a server of OpenAI's kind: text, streams, structured output, tools, an agent."""

import asyncio
from typing import Any

from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.forecast import QUESTION, Forecast, forecast

checks = Checks()
HELLO = [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hello!")]


def _model(at: ServedModel, max_tokens: int = 8, **options: Any) -> Any:
    settings: Any = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 2048} | options
    return OpenAILike(
        model=at.model, api_base=at.v1, api_key="none", temperature=0, max_tokens=max_tokens, max_retries=0, **settings
    )


@checks("complete, chat, streamed too")
def text(at: ServedModel) -> None:
    model = _model(at)
    whole = model.chat(HELLO).message.content
    *_, last = model.stream_chat(HELLO)
    assert whole and last.message.content == whole and model.complete("Hello!").text


@checks("a completion model")
def completions(at: ServedModel) -> None:
    model = _model(at, is_chat_model=False, is_function_calling_model=False)
    *_, last = model.stream_complete("One, two,")
    assert last.text == model.complete("One, two,").text


@checks("as_structured_llm: by a tool, by JSON schema")
def structured(at: ServedModel) -> None:
    for native in (False, True):
        model = _model(at, 120, should_use_structured_outputs=native)
        answer = model.as_structured_llm(Forecast).chat([ChatMessage(role="user", content=QUESTION)])
        assert isinstance(answer.raw, Forecast), answer


@checks("chat_with_tools, and the result sent back")
def tools(at: ServedModel) -> None:
    model, tool = _model(at, 120), FunctionTool.from_defaults(forecast)
    asked = ChatMessage(role="user", content=QUESTION)
    answer = model.chat_with_tools([tool], chat_history=[asked], tool_required=True, allow_parallel_tool_calls=False)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "forecast"
    result = ChatMessage(role="tool", content="The sky is blue.", additional_kwargs={"tool_call_id": call.tool_id})
    assert model.chat([asked, answer.message, result]).message.content


@checks("ReActAgent")
def agent(at: ServedModel) -> None:
    async def run() -> Any:
        react = ReActAgent(tools=[FunctionTool.from_defaults(forecast)], llm=_model(at, 40), timeout=120)
        return await react.run(QUESTION, max_iterations=3, early_stopping_method="generate")

    assert str(asyncio.run(run()))
