"""Two models behind one router, in float32: each answers as `transformers` does with it, whatever the other does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from router.text.tokenizer import Tokenizer

from .conftest import WAIT_S, serving

PROMPTS = ["a", "Hello there!", "naïve café 🦊", "the same beginning, and one end", "the same beginning, and another"]
NEW_TOKENS = 24


def said(folder: Path) -> list[str]:
    """Greedy answers to PROMPTS, each alone."""
    tokenizer = Tokenizer.from_folder(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = model.generate(ids, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
        answers.append(tokenizer.decode(out[0, ids.shape[1] :].tolist()))
    return answers


@pytest.mark.slow
def test_each_says_what_it_says_alone(tiny_model: Path, other_tiny_model: Path, tmp_path: Path) -> None:
    expected = {folder.name: said(folder) for folder in (tiny_model, other_tiny_model)}
    one, other = expected.values()
    assert not set(one) & set(other)
    with serving(tmp_path / "responses", tiny_model, other_tiny_model) as whole:
        ask_all(whole.url, expected)
        whole.settled()


def ask_all(url: str, expected: dict[str, list[str]]) -> None:
    """Asks both models everything at once, twice: the second time, prompts are cached."""
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
        ThreadPoolExecutor(10) as threads,
    ):
        assert [card.id for card in client.models.list().data] == list(expected)

        def ask(name: str, prompt: str) -> str:
            answer = client.completions.create(
                model=name,
                prompt=prompt,
                temperature=0,
                max_tokens=NEW_TOKENS,
                extra_body={"min_tokens": NEW_TOKENS},
            )
            assert answer.model == name
            return answer.choices[0].text

        for _ in ("cold", "warm"):
            asked = {(name, prompt): threads.submit(ask, name, prompt) for prompt in PROMPTS for name in expected}
            found = {name: [asked[name, prompt].result() for prompt in PROMPTS] for name in expected}
            assert found == expected
