"""dspy: programs over chat completions and Responses, adapters, tools, streams."""

import asyncio
from typing import Any, Literal

import dspy

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.director import Director
from bench.correctness.clients.forecast import QUESTION, forecast

checks = Checks()


class Weather(dspy.Signature):
    """Answer."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()


# What the adapter reads, which a model of any size then writes.
CHAT = {"guided_choice": ["[[ ## city ## ]]\nParis\n\n[[ ## completed ## ]]"]}


def _lm(at: ServedModel, **options: Any) -> dspy.LM:
    asked: dict[str, Any] = {"api_base": at.v1, "api_key": "none", "temperature": 0, "max_tokens": 200}
    return dspy.LM(f"openai/{at.model}", **asked | {"cache": False, "num_retries": 0} | options)


@checks("LM: a text by chat and by Responses, several turns")
def text(at: ServedModel) -> None:
    for kind in ("chat", "responses"):
        lm = _lm(at, model_type=kind)
        said = lm("Hello!")
        assert said and said[0], said
        turns = [{"role": "user", "content": "Hello!"}, {"role": "assistant", "content": "Yes?"}]
        assert lm(messages=[*turns, {"role": "user", "content": "Again!"}])


@checks("Predict and ChainOfThought with ChatAdapter")
def predict(at: ServedModel) -> None:
    with dspy.context(lm=_lm(at, extra_body=CHAT), adapter=dspy.ChatAdapter()):
        assert dspy.Predict(Weather)(question=QUESTION).city == "Paris"


@checks("Predict with JSONAdapter, whose answer the server holds to a form")
def json_adapter(at: ServedModel) -> None:
    form = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    held = {"response_format": None, "guided_json": form | {"additionalProperties": False}}
    with dspy.context(lm=_lm(at, extra_body=held), adapter=dspy.JSONAdapter()):
        assert dspy.Predict(Weather)(question=QUESTION).city in ("Paris", "Rome")


def _fields(**values: str) -> str:
    """An answer as ChatAdapter reads it."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in [*values.items(), ("completed", "")])


@checks("ReAct: a tool is called, and its result sent back")
def react(at: ServedModel) -> None:
    adapter = dspy.ChatAdapter()
    with Director(at.url) as director, dspy.context(lm=_lm(at, api_base=f"{director.url}/v1"), adapter=adapter):
        asked = '{"city": "Paris", "days": 3}'
        director.say(_fields(next_thought="I look.", next_tool_name="forecast", next_tool_args=asked))
        director.say(_fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"))
        director.say(_fields(reasoning="It says so.", city="Paris"))
        assert dspy.ReAct(Weather, tools=[forecast])(question=QUESTION).city == "Paris"
        director.told()
        assert "In Paris, the sky is blue" in str(director.exchanges[1].sent) and not director.refused


@checks("streamify")
def stream(at: ServedModel) -> None:
    async def go() -> list[Any]:
        program = dspy.streamify(dspy.Predict(Weather))
        return [piece async for piece in program(question=QUESTION)]

    with dspy.context(lm=_lm(at, extra_body=CHAT), adapter=dspy.ChatAdapter()):
        pieces = asyncio.run(go())
    assert isinstance(pieces[-1], dspy.Prediction) and pieces[-1].city == "Paris"


@checks("a full context is the package's own error")
def full_context(at: ServedModel) -> None:
    error = refused(Exception, lambda: _lm(at)(at.long_text))
    assert "ContextWindow" in type(error).__name__, repr(error)[:500]  # the class has moved between versions
