"""Scores of choices against `transformers`, in float32, whatever is cached."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from .conftest import MODEL, WAIT_S, Whole

TEXT = st.text("ab é🦊", min_size=1, max_size=40)


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def http(whole: Whole) -> Any:
    with httpx.Client(base_url=whole.url, timeout=WAIT_S) as client:
        yield client


def logprobs(model: Any, token_ids: list[int]) -> np.ndarray:
    """float32 [len(token_ids) - 1, vocab]: of every token, after those before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([token_ids])).logits[0, :-1]
    return torch.log_softmax(logits, dim=1).numpy()


def check(model: Any, choice: dict[str, Any], prompt_ids: list[int]) -> None:
    tokens = choice["tokens"]
    expected = logprobs(model, prompt_ids + tokens)[-len(tokens) :]
    own = expected[np.arange(len(tokens)), tokens]
    assert choice["logprobs"] == pytest.approx(own.tolist(), abs=1e-4)
    assert choice["top_logprob"] == pytest.approx(expected.max(axis=1).tolist(), abs=1e-4)
    assert choice["greedy"] == [
        bool(token == best) for token, best in zip(tokens, expected.argmax(axis=1), strict=True)
    ]
    if choice["unconditional_logprobs"] is not None:
        first, *alone = choice["unconditional_logprobs"]
        assert first is None  # this tokenizer puts nothing before a text
        if alone:
            expected = logprobs(model, tokens)
            own = expected[np.arange(len(tokens) - 1), tokens[1:]]
            assert alone == pytest.approx(own.tolist(), abs=1e-4)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXT, choices=st.lists(TEXT, min_size=1, max_size=4), repeats=st.integers(1, 3), alone=st.booleans())
@pytest.mark.slow
def test_scores_are_those_of_transformers(
    whole: Whole, http: httpx.Client, reference: Any, prompt: str, choices: list[str], repeats: int, alone: bool
) -> None:
    """`repeats` makes prompts of several pages, with beginnings that other examples have cached."""
    prompt *= repeats
    body = {"model": MODEL, "prompt": prompt, "choices": choices, "unconditional": alone}
    answer = http.post("/v1/choices", json=body)
    assert answer.status_code == 200, answer.text
    tokenizer = whole.service.tokenizer
    for text, choice in zip(choices, answer.json()["choices"], strict=True):
        assert choice["tokens"] == tokenizer.encode(text)  # a token for each byte: none merge
        assert (choice["unconditional_logprobs"] is not None) == alone
        check(reference, choice, tokenizer.encode(prompt))


def test_choices_of_a_program(whole: Whole, http: httpx.Client, reference: Any) -> None:
    """The generated text before the choices is part of their prompt."""
    call = {"id": "judge", "branch": "b"}
    body = {"model": MODEL, "prompt": "The essay is good. " * 4, "program": call, "max_tokens": 20, "temperature": 0}
    generated = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    call["continues"] = True
    body = {"model": MODEL, "prompt": " So it is", "choices": [" good", " bad"], "program": call}
    answer = http.post("/v1/choices", json=body).json()
    encode = whole.service.tokenizer.encode
    held = whole.service.programs.look("/judge", "b", None, continues=True).branch
    assert whole.service.tokenizer.decode(held.token_ids.tolist()).endswith(generated) and not held.tail
    for choice in answer["choices"]:
        check(reference, choice, held.token_ids.tolist() + encode(" So it is"))
    whole.service.programs.remove("/judge")
