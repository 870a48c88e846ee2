"""langchain-openai: chats, streams, structured output by each method, tools, completions, embeddings, Responses."""

from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.forecast import PARAMETERS, QUESTION, Forecast, forecast

checks = Checks()
HELLO: list[BaseMessage] = [SystemMessage("Be brief."), HumanMessage("Hello!")]
CALL_TOKENS = 120


def _chat(at: ServedModel, max_tokens: int = 8, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=at.v1, api_key="none", model=at.model, temperature=0, max_tokens=max_tokens, max_retries=0, **options
    )


@checks("invoke, batch, history")
def invoke(at: ServedModel) -> None:
    chat = _chat(at)
    answer = chat.invoke(HELLO)
    assert answer.content and answer.usage_metadata["output_tokens"] > 0
    assert [each.content for each in chat.batch([HELLO, HELLO])] == [answer.content] * 2
    assert chat.invoke([*HELLO, answer, HumanMessage("And then?")]).content


@checks("stream, with usage")
def stream(at: ServedModel) -> None:
    whole: Any = None
    for chunk in _chat(at, stream_usage=True).stream(HELLO):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == _chat(at).invoke(HELLO).content and whole.usage_metadata["output_tokens"] > 0


@checks("with_structured_output: json_schema, function_calling")
def structured(at: ServedModel) -> None:
    for method in ("json_schema", "function_calling"):
        found = _chat(at, CALL_TOKENS).with_structured_output(Forecast, method=method).invoke(QUESTION)
        assert isinstance(found, Forecast), (method, found)


@checks("with_structured_output: json_mode")
def json_mode(at: ServedModel) -> None:
    # What the object has is left to the model: the schema, as a grammar of the server, makes it short.
    chat = _chat(at, 120, extra_body={"response_format": None, "guided_json": PARAMETERS})
    chain = chat.with_structured_output(Forecast, method="json_mode")
    assert isinstance(chain.invoke(f"{QUESTION} Answer with JSON."), Forecast)


@checks("bind_tools: a call, and its result sent back")
def tools(at: ServedModel) -> None:
    chat, made = _chat(at, CALL_TOKENS), tool(forecast)
    for choice in ("any", "forecast"):
        answer = chat.bind_tools([made], tool_choice=choice, parallel_tool_calls=False, strict=True).invoke(QUESTION)
        (call,) = answer.tool_calls
        assert call["name"] == "forecast" and not answer.invalid_tool_calls
    result = made.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat.bind_tools([made], tool_choice="none").invoke([HumanMessage(QUESTION), answer, result]).content


@checks("bind_tools: a streamed call")
def tools_stream(at: ServedModel) -> None:
    bound = _chat(at, CALL_TOKENS).bind_tools([tool(forecast)], tool_choice="any", parallel_tool_calls=False)
    whole: Any = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert [call["name"] for call in whole.tool_calls] == ["forecast"]


@checks("log probabilities")
def logprobs(at: ServedModel) -> None:
    answer = _chat(at, logprobs=True, top_logprobs=2).invoke(HELLO)
    assert len(answer.response_metadata["logprobs"]["content"]) == answer.usage_metadata["output_tokens"]


@checks("completions, streamed too")
def completions(at: ServedModel) -> None:
    model = OpenAI(base_url=at.v1, api_key="none", model=at.model, temperature=0, max_tokens=8, max_retries=0)
    assert "".join(model.stream("One, two,")) == model.invoke("One, two,")


@checks("embeddings")
def embeddings(at: ServedModel) -> None:
    # By default this client counts tokens with OpenAI's own tokenizer, which it downloads.
    model = OpenAIEmbeddings(base_url=at.v1, api_key="none", model=at.model, check_embedding_ctx_length=False)
    assert len(model.embed_documents(["Hello!", "Bye!"])) == 2 and model.embed_query("Hello!")


@checks("use_responses_api: text, structured output, a tool")
def responses(at: ServedModel) -> None:
    chat = _chat(at, 80, use_responses_api=True)
    answer = chat.invoke(HELLO)
    assert isinstance(answer, AIMessage) and answer.text
    assert isinstance(chat.with_structured_output(Forecast, method="json_schema").invoke(QUESTION), Forecast)
    called = _chat(at, CALL_TOKENS, use_responses_api=True).bind_tools([tool(forecast)], tool_choice="any")
    assert called.invoke(QUESTION).tool_calls
