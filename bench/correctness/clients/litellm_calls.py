"""LiteLLM: its OpenAI, vLLM and Anthropic providers, streams, tools, structured output, embeddings, Responses, and a
router."""

import json
from typing import Any

import litellm

from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.forecast import PARAMETERS, QUESTION, Forecast

checks = Checks()
HELLO: Any = [{"role": "user", "content": "Hello!"}]
ASKED: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"type": "function", "function": {"name": "forecast", "parameters": PARAMETERS, "strict": True}}]
GREEDY: Any = {"temperature": 0, "max_tokens": 8}
ONE_CALL: Any = {"temperature": 0, "max_tokens": 120, "tools": TOOLS, "tool_choice": "required"}


def _at(at: ServedModel, provider: str = "openai") -> Any:
    url = at.url if provider == "anthropic" else at.v1
    return {"model": f"{provider}/{at.model}", "api_base": url, "api_key": "none", "num_retries": 0}


@checks("completion: openai/, hosted_vllm/, anthropic/")
def completion(at: ServedModel) -> None:
    for provider in ("openai", "hosted_vllm", "anthropic"):
        made = litellm.completion(**_at(at, provider), messages=HELLO, **GREEDY)
        assert made.choices[0].message.content and made.usage.completion_tokens > 0, provider


@checks("completion: streamed, with usage: openai/, hosted_vllm/, anthropic/")
def stream(at: ServedModel) -> None:
    for provider in ("openai", "hosted_vllm", "anthropic"):
        whole = litellm.completion(**_at(at, provider), messages=HELLO, **GREEDY)
        chunks = list(
            litellm.completion(
                **_at(at, provider), messages=HELLO, stream=True, stream_options={"include_usage": True}, **GREEDY
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content, provider


@checks("completion: tools, and the result sent back: openai/, anthropic/")
def tools(at: ServedModel) -> None:
    for provider in ("openai", "anthropic"):
        made = litellm.completion(**_at(at, provider), messages=ASKED, parallel_tool_calls=False, **ONE_CALL)
        (call,) = made.choices[0].message.tool_calls
        Forecast.model_validate_json(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"sky": "blue"})}
        messages = [*ASKED, made.choices[0].message, result]
        said = litellm.completion(**_at(at, provider), messages=messages, tools=TOOLS, tool_choice="none", **GREEDY)
        assert said.choices[0].message.content, provider


@checks("completion: streamed tools, joined by stream_chunk_builder")
def tools_stream(at: ServedModel) -> None:
    chunks = list(litellm.completion(**_at(at), messages=ASKED, stream=True, parallel_tool_calls=False, **ONE_CALL))
    made: Any = litellm.stream_chunk_builder(chunks, messages=ASKED)
    (call,) = made.choices[0].message.tool_calls
    Forecast.model_validate_json(call.function.arguments)


@checks("completion: response_format, a pydantic model and json_object")
def response_format(at: ServedModel) -> None:
    made = litellm.completion(**_at(at), messages=ASKED, response_format=Forecast, temperature=0, max_tokens=80)
    Forecast.model_validate_json(made.choices[0].message.content)
    form = {"type": "json_object"}
    made = litellm.completion(**_at(at), messages=ASKED, response_format=form, temperature=0, max_tokens=8)
    assert made.choices[0].message.content.lstrip().startswith("{")


@checks("text_completion, Router")
def others(at: ServedModel) -> None:
    place = _at(at) | {"model": f"text-completion-openai/{at.model}"}
    assert litellm.text_completion(**place, prompt="One, two,", **GREEDY).choices[0].text
    router = litellm.Router([{"model_name": "mine", "litellm_params": _at(at)}])
    assert router.completion("mine", messages=HELLO, **GREEDY).choices[0].message.content


@checks("embedding")
def embedding(at: ServedModel) -> None:
    made = litellm.embedding(**_at(at), input=["Hello!", "Bye!"])
    assert len(made.data) == 2 and made.usage.prompt_tokens > 0


@checks("rerank: hosted_vllm/")
def rerank(at: ServedModel) -> None:
    place = {"model": f"hosted_vllm/{at.model}", "api_base": at.url, "api_key": "none"}
    made = litellm.rerank(**place, query="cats", documents=["dogs", "cats"], top_n=1)
    assert made.results[0]["index"] == 1, made


@checks("responses, streamed too")
def responses(at: ServedModel) -> None:
    options: Any = {"input": "Hello!", "temperature": 0, "max_output_tokens": 16}
    assert litellm.responses(**_at(at), **options).output[0].content[0].text
    *_, last = litellm.responses(**_at(at), stream=True, **options)
    assert last.type in ("response.completed", "response.incomplete"), last
