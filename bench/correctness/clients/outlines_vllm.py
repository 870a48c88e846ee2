"""outlines with a server of vLLM's kind: its constraints travel as `structured_outputs`."""

import json
import re
from typing import Any, Literal

import openai
import outlines
from pydantic import BaseModel, Field

from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()
PROMPT = "Which city is the capital of France, and how many days would you stay there?"


class Stay(BaseModel):
    city: Literal["Paris", "Rome"]
    days: int = Field(ge=1, le=9)


def _model(at: ServedModel) -> Any:
    client = openai.OpenAI(base_url=at.v1, api_key="none", max_retries=0)
    return outlines.from_vllm(client, at.model)


@checks("from_vllm, text")
def text(at: ServedModel) -> None:
    assert _model(at)("Hello!", max_tokens=8)


@checks("from_vllm, stream")
def stream(at: ServedModel) -> None:
    assert "".join(_model(at).stream("Hello!", max_tokens=8))


@checks("from_vllm, pydantic model")
def pydantic_model(at: ServedModel) -> None:
    Stay.model_validate_json(_model(at)(PROMPT, Stay, max_tokens=60))


@checks("from_vllm, streamed pydantic model")
def streamed_pydantic_model(at: ServedModel) -> None:
    Stay.model_validate_json("".join(_model(at).stream(PROMPT, Stay, max_tokens=60)))


@checks("from_vllm, JSON schema")
def json_schema(at: ServedModel) -> None:
    schema = outlines.json_schema(json.dumps(Stay.model_json_schema()))
    Stay.model_validate_json(_model(at)(PROMPT, schema, max_tokens=60))


@checks("from_vllm, regular expression")
def regular_expression(at: ServedModel) -> None:
    answer = _model(at)("An IP address:", outlines.regex(r"([0-9]{1,3}\.){3}[0-9]{1,3}"), max_tokens=40)
    assert re.fullmatch(r"([0-9]{1,3}\.){3}[0-9]{1,3}", answer), answer


@checks("from_vllm, Literal")
def literal(at: ServedModel) -> None:
    answer = _model(at)("Is the sky blue?", Literal["yes", "no"], max_tokens=8)
    assert answer in ("yes", "no"), answer


@checks("from_vllm, int")
def integer(at: ServedModel) -> None:
    int(_model(at)("Two plus two is", int, max_tokens=40))


@checks("from_vllm, grammar")
def grammar(at: ServedModel) -> None:
    answer = _model(at)("Is the sky blue?", outlines.cfg('root ::= "yes" | "no"'), max_tokens=8)
    assert answer in ("yes", "no"), answer


@checks("from_vllm, several samples")
def several_samples(at: ServedModel) -> None:
    answers = _model(at)("Is the sky blue?", Literal["yes", "no"], n=2, max_tokens=8)
    assert len(answers) == 2 and set(answers) <= {"yes", "no"}, answers
