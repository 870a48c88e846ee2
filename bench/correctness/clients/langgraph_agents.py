"""LangGraph: agents over chat completions and Responses, with tools, streams and a memory of threads."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.director import Director
from bench.correctness.clients.forecast import QUESTION, Forecast
from bench.correctness.clients.forecast import forecast as the_forecast

checks = Checks()
forecast = tool(the_forecast)
ARGUMENTS = {"city": "Paris", "days": 3}
ASKED: Any = {"messages": [("user", QUESTION)]}


def _chats(at: ServedModel, url: str = "") -> Iterator[ChatOpenAI]:
    """The model by both of the server's endpoints."""
    for responses in (False, True):
        yield ChatOpenAI(
            base_url=f"{url or at.url}/v1",
            api_key="none",
            model=at.model,
            temperature=0,
            max_retries=0,
            use_responses_api=responses,
        )


@checks("create_react_agent: a text, whole and streamed")
def text(at: ServedModel) -> None:
    for chat in _chats(at):
        agent = create_react_agent(chat, [forecast])
        whole = agent.invoke({"messages": [("user", "Hello!")]})["messages"][-1].text
        pieces = [piece for piece, _ in agent.stream({"messages": [("user", "Hello!")]}, stream_mode="messages")]
        assert whole and "".join(piece.text for piece in pieces) == whole


@checks("create_react_agent: a tool is called and its result sent back, whole and streamed")
def tools(at: ServedModel) -> None:
    with Director(at.url) as director:
        for chat in _chats(at, director.url):
            agent = create_react_agent(chat, [forecast])
            director.call("forecast", ARGUMENTS)
            messages = agent.invoke(ASKED)["messages"]
            assert isinstance(messages[-2], ToolMessage) and "blue" in messages[-2].text and messages[-1].text
            director.call("forecast", ARGUMENTS)
            steps = list(agent.stream(ASKED, stream_mode="updates"))
            assert [name for step in steps for name in step] == ["agent", "tools", "agent"]
        director.told()
        assert not director.refused


@checks("create_react_agent: threads remember, and a second turn sends the first one back")
def threads(at: ServedModel) -> None:
    with Director(at.url) as director:
        for chat in _chats(at, director.url):
            agent = create_react_agent(chat, [forecast], checkpointer=InMemorySaver())
            thread: Any = {"configurable": {"thread_id": "1"}}
            director.call("forecast", ARGUMENTS)
            before = len(agent.invoke(ASKED, thread)["messages"])
            assert len(agent.invoke({"messages": [("user", "And then?")]}, thread)["messages"]) == before + 2
        assert not director.refused


@checks("create_react_agent: response_format")
def response_format(at: ServedModel) -> None:
    for chat in _chats(at):
        made = create_react_agent(chat, [], response_format=Forecast).invoke(ASKED)
        assert isinstance(made["structured_response"], Forecast)


@checks("a full context is the package's own error")
def full_context(at: ServedModel) -> None:
    for chat in _chats(at):
        refused(ContextOverflowError, partial(chat.invoke, at.long_text))
