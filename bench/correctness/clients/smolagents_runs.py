"""smolagents: agents that call tools, agents that write code, streams, structured output."""

from typing import Any

from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool

from bench.correctness.clients.checks import Checks, ServedModel
from bench.correctness.clients.director import Director
from bench.correctness.clients.forecast import QUESTION, Forecast

checks = Checks()
HELLO: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}]


@tool
def forecast(city: str, days: int) -> str:
    """The weather of a city in the next days.

    Args:
        city: the city.
        days: their number.
    """
    return f"In {city}, the sky is blue for {days} days."


def _model(at: ServedModel, url: str = "", **options: Any) -> OpenAIModel:
    base = f"{url or at.url}/v1"
    return OpenAIModel(model_id=at.model, api_base=base, api_key="none", temperature=0, max_tokens=120, **options)


@checks("a text, whole and streamed")
def text(at: ServedModel) -> None:
    model = _model(at)
    whole = model(HELLO)
    pieces = list(model.generate_stream(HELLO))
    assert whole.content and "".join(piece.content or "" for piece in pieces) == whole.content
    assert whole.token_usage.output_tokens == sum(p.token_usage.output_tokens for p in pieces if p.token_usage) > 0


@checks("ToolCallingAgent: a tool is called, its result sent back, and the answer given; whole and streamed")
def tool_calling(at: ServedModel) -> None:
    for streams in (False, True):
        with Director(at.url) as director:
            director.call("forecast", {"city": "Oslo", "days": 3})
            director.call("final_answer", {"answer": "blue"})
            agent = ToolCallingAgent(
                tools=[forecast], model=_model(at, director.url), stream_outputs=streams, verbosity_level=0
            )
            assert agent.run(QUESTION) == "blue"
            director.told()
            assert not director.refused and len(director.exchanges) == 2
            assert "In Oslo, the sky is blue" in str(director.exchanges[1].sent["messages"])


@checks("ToolCallingAgent: a second turn, without a reset")
def turns(at: ServedModel) -> None:
    with Director(at.url) as director:
        agent = ToolCallingAgent(tools=[forecast], model=_model(at, director.url), verbosity_level=0)
        for reset in (True, False):
            director.call("final_answer", {"answer": "blue"})
            assert agent.run(QUESTION, reset=reset) == "blue"
        assert not director.refused and len(str(director.exchanges[1].sent)) > len(str(director.exchanges[0].sent))


@checks("CodeAgent: the code that the model writes is run, free and in a given form")
def code(at: ServedModel) -> None:
    written: Any = {"extra_body": {"guided_choice": ["Thought: I answer.\n<code>\nfinal_answer('blue')\n</code>"]}}
    assert CodeAgent(tools=[], model=_model(at, **written), verbosity_level=0).run(QUESTION) == "blue"
    form: dict[str, Any] = {
        "type": "object",
        "properties": {"thought": {"const": "x"}, "code": {"const": "final_answer('blue')"}},
    }
    form |= {"required": ["thought", "code"], "additionalProperties": False}
    narrowed: Any = {"extra_body": {"response_format": None, "guided_json": form}}
    agent = CodeAgent(tools=[], model=_model(at, **narrowed), use_structured_outputs_internally=True, verbosity_level=0)
    assert agent.run(QUESTION) == "blue"


@checks("response_format")
def response_format(at: ServedModel) -> None:
    schema = {"name": "forecast", "schema": Forecast.model_json_schema(), "strict": True}
    answer = _model(at)(HELLO, response_format={"type": "json_schema", "json_schema": schema})
    Forecast.model_validate_json(answer.content)
