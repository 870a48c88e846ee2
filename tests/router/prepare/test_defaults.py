"""How a model is sampled where a request does not say: as its `generation_config.json` does."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from router.prepare.defaults import FILE, SamplingDefaults
from router.wire.requests import ChatRequest
from worker.messages import SamplingParams

# Of Qwen3, and what other models have beside it.
QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1], "max_new_tokens": 2048}
HELLO = [{"role": "user", "content": "Hello"}]


def read(folder: Path, said: Any) -> SamplingDefaults:
    (folder / FILE).write_text(said if isinstance(said, str) else json.dumps(said))
    return SamplingDefaults.read(folder, "model")


def completed(defaults: SamplingDefaults, **fields: Any) -> dict[str, Any]:
    """Of a request with these fields, what is set in the end."""
    request = msgspec.convert({"model": "m", "messages": HELLO} | fields, ChatRequest)
    made = msgspec.to_builtins(defaults.complete(request))
    return {name: value for name, value in made.items() if value is not None and name not in ("model", "messages")}


@pytest.mark.parametrize(
    ("said", "values"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.1, "top_k": 50},
            {"min_p": 0.1, "repetition_penalty": 1.1, "top_k": 50},
        ),
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.8}, {"temperature": 0, "top_p": 0.8}),
        ({"temperature": None, "top_k": None, "eos_token_id": 2}, {}),
    ],
)
def test_what_a_model_says(tmp_path: Path, said: dict[str, Any], values: dict[str, float]) -> None:
    defaults = read(tmp_path, said)
    assert (defaults.values, defaults.problems) == (values, ())
    assert SamplingDefaults.read(tmp_path, "openai") == SamplingDefaults()


def test_a_model_that_says_nothing(tmp_path: Path) -> None:
    assert SamplingDefaults.read(tmp_path, "model") == SamplingDefaults()


def test_a_card_counts_where_the_file_sets_nothing(tmp_path: Path) -> None:
    def values(said: Any, asked: Any = "model") -> Mapping[str, float]:
        (tmp_path / FILE).write_text(json.dumps(said))
        return SamplingDefaults.read(tmp_path, asked, card).values

    card = {"temperature": 0.2, "top_p": 0.9}
    assert SamplingDefaults.read(tmp_path, "model", card).values == values({"eos_token_id": 2}) == card
    assert values({"top_k": 20}) == {"top_k": 20}
    assert values({"do_sample": False}) == {"temperature": 0}
    assert values({}, "openai") == {}


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1), ("temperature", "0.6"), ("top_p", 1.5), ("top_k", 2.5), ("min_p", True)]
)
def test_a_wrong_value_is_named_and_left_out(tmp_path: Path, name: str, value: Any) -> None:
    defaults = read(tmp_path, {name: value, "repetition_penalty": 1.2})
    assert defaults.values == {"repetition_penalty": 1.2}
    (problem,) = defaults.problems
    assert f"{tmp_path / FILE}: {name} is {json.dumps(value)}" in problem


@pytest.mark.parametrize("said", ["", "{", "[1]", '{"temperature": NaN}'])
def test_a_file_that_is_broken_is_named(tmp_path: Path, said: str) -> None:
    with pytest.raises(ValueError, match=FILE):
        read(tmp_path, said)


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.2}),
        ({"temperature": None, "top_k": None}, {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.2}),
        ({"temperature": 1, "seed": 3}, {"temperature": 1, "seed": 3, "top_k": 20, "repetition_penalty": 1.2}),
        ({"top_k": 0, "repetition_penalty": 1}, {"temperature": 0.6, "top_k": 0, "repetition_penalty": 1}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1e-9, "top_p": 0.5}, {"temperature": 1e-9, "top_p": 0.5}),
    ],
)
def test_what_a_request_says_wins_and_greedy_stays_greedy(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    defaults = SamplingDefaults({"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.2})
    assert completed(defaults, **fields) == sampling


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", {"messages": HELLO}), ("completions", {"prompt": "Hello"})]
)
def test_the_replica_hears_of_it_and_the_client_can_ask(
    make_stack: Callable[..., Any], make_replica: Callable[..., Any], tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    stack = make_stack(make_replica(), defaults=read(tmp_path, QWEN))

    def heard(**fields: Any) -> SamplingParams:
        asked = {"model": "tiny", "max_tokens": 4, "seed": 1} | body | fields
        httpx.post(f"{stack.url}/v1/{path}", json=asked).raise_for_status()
        return stack.fakes["r0"].requests()[-1].sampling

    assert heard() == SamplingParams(max_tokens=4, seed=1, temperature=0.6, top_k=20, top_p=0.95)
    assert heard(temperature=0) == SamplingParams(max_tokens=4, seed=1, temperature=0)
    (model,) = stack.client.models.list().data
    assert model.default_sampling == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
