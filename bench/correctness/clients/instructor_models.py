"""instructor: pydantic models by tools, by JSON schema, by JSON, by Responses; streamed in parts."""

import json
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from instructor.core import InstructorRetryException

from bench.correctness.clients.checks import Checks, ServedModel, refused
from bench.correctness.clients.forecast import PARAMETERS, QUESTION, Forecast

checks = Checks()
ASKED: Any = [{"role": "user", "content": QUESTION}]


def _client(at: ServedModel, mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=at.v1, api_key="none", max_retries=0), mode=mode)


def _ask(at: ServedModel, mode: instructor.Mode, **options: Any) -> Any:
    return _client(at, mode).create(
        model=at.model, response_model=Forecast, messages=ASKED, temperature=0, max_tokens=120, max_retries=0, **options
    )


@checks("Mode.TOOLS, and by from_provider")
def tools(at: ServedModel) -> None:
    assert isinstance(_ask(at, instructor.Mode.TOOLS), Forecast)
    client: Any = instructor.from_provider(f"openai/{at.model}", base_url=at.v1, api_key="none")
    made = client.create(response_model=Forecast, messages=ASKED, temperature=0, max_tokens=120, max_retries=0)
    assert isinstance(made, Forecast)


@checks("Mode.TOOLS_STRICT")
def tools_strict(at: ServedModel) -> None:
    assert isinstance(_ask(at, instructor.Mode.TOOLS_STRICT), Forecast)


@checks("Mode.PARALLEL_TOOLS")
def parallel_tools(at: ServedModel) -> None:
    # The mode leaves it to the model whether it calls. A small one must be asked to.
    one_call: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    options: Any = {"temperature": 0, "max_tokens": 120, "max_retries": 0, "extra_body": one_call}
    made = _client(at, instructor.Mode.PARALLEL_TOOLS).create(
        model=at.model, messages=ASKED, response_model=Iterable[Forecast], **options
    )
    assert [type(each) for each in made] == [Forecast]


@checks("Mode.JSON_SCHEMA")
def json_schema(at: ServedModel) -> None:
    assert isinstance(_ask(at, instructor.Mode.JSON_SCHEMA), Forecast)


@checks("Mode.JSON, with the model's schema as response_format; MD_JSON, with it as guided_json")
def json_modes(at: ServedModel) -> None:
    # These modes only describe the schema to the model. A small one must be held to it.
    form = {"type": "json_schema", "json_schema": {"name": "forecast", "schema": PARAMETERS}}
    assert isinstance(_ask(at, instructor.Mode.JSON, extra_body={"response_format": form}), Forecast)
    assert isinstance(_ask(at, instructor.Mode.MD_JSON, extra_body={"guided_json": PARAMETERS}), Forecast)


@checks("Mode.JSON as it is: an object")
def json_object(at: ServedModel) -> None:
    # What the object has is left to the model, and a small one only repeats the schema.
    error: Any = refused(InstructorRetryException, lambda: _ask(at, instructor.Mode.JSON))
    assert isinstance(json.loads(error.last_completion.choices[0].message.content), dict)


@checks("Mode.RESPONSES_TOOLS")
def responses_tools(at: ServedModel) -> None:
    assert isinstance(_ask(at, instructor.Mode.RESPONSES_TOOLS), Forecast)


@checks("create_partial, create_iterable")
def streamed(at: ServedModel) -> None:
    client = _client(at, instructor.Mode.TOOLS)
    options: Any = {"model": at.model, "messages": ASKED, "temperature": 0, "max_tokens": 120}
    *_, last = client.create_partial(response_model=Forecast, **options)
    assert last.city in ("Paris", "Rome") and last.days
    assert all(isinstance(each, Forecast) for each in client.create_iterable(response_model=Forecast, **options))
