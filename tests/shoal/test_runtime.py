"""A model in this process under SGLang's names: programs whose import alone is changed."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shoal
from cluster.config import ConfigError
from shoal.lang.ir import SglExprList, SglGen, SglSeparateReasoning
from shoal.lang.reasoning import split_reasoning

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096, "cpu_threads": 1}


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def backend(tiny_model: Path) -> Iterator[Any]:
    with pytest.warns(UserWarning, match="cuda_graph_max_bs, log_level"):
        made = shoal.Runtime(
            model_path=str(tiny_model),
            cuda_graph_max_bs=4,
            log_level="error",
            max_running_requests=4,
            incremental_streaming_output=True,
            **SETTINGS,
        )
    yield made
    made.shutdown()
    made.shutdown()


def test_settings_have_sglangs_names(backend: Any, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shoal.global_config, "default_backend", None)
    config = backend._server.config
    assert (config.kv_tokens, config.max_running) == (4096, 4)
    assert backend.endpoint.get_model_name() == str(tiny_model)
    assert backend.get_tokenizer().vocab_size > 200
    shoal.set_default_backend(backend)
    assert shoal.global_config.default_backend is not None
    assert shoal.global_config.default_backend.endpoint is backend.endpoint
    assert backend.url + "/v1" == backend.base_url
    with pytest.raises(ConfigError):
        shoal.Runtime(model_path=str(tiny_model), dp_size=2)


def test_details_of_a_stream(backend: Any) -> None:
    """Of each piece its log probabilities, and how many tokens there are so far."""

    @shoal.function
    def count(s: Any) -> None:
        s += "1, 2," + shoal.gen("x", max_tokens=40, return_logprob=True, ignore_eos=True)

    async def collected() -> list[tuple[str, Any]]:
        state = count.run(stream=True, temperature=0, backend=backend)
        return [piece async for piece in state.text_async_iter("x", return_meta_data=True)]

    pieces = asyncio.run(collected())
    assert pieces and all(text for text, _ in pieces)
    so_far = 0
    for _, meta in pieces:
        new = len(meta["output_token_logprobs"])
        assert meta["completion_tokens"] == meta["output_token_logprobs_length"] == so_far + new
        so_far += new
    assert so_far <= 40


def test_a_cache_that_is_emptied(backend: Any) -> None:
    long = "a text that fills more than one page of the cache " * 2

    def cached() -> int:
        return int(backend.generate(long, max_tokens=1).cached_tokens)

    cached()
    assert cached() > 0
    assert shoal.flush_cache(backend) is True
    assert cached() == 0
    assert cached() > 0
    assert backend.flush_cache() is True
    assert cached() == 0


def test_names_of_expressions() -> None:
    made = shoal.gen("x") + "y"
    assert isinstance(made, SglExprList) and isinstance(made.parts[0], SglGen)
    assert SglGen("x").name == "x"
    split = shoal.separate_reasoning(shoal.gen("x"), model_type="any-model").expr_list
    assert split[0] == shoal.gen("x") and isinstance(split[1], SglSeparateReasoning)
    assert (split[1].model_type, split[1].name) == ("any-model", "x_reasoning_content")
    assert split[1].process_name_for_reasoning("y") == "y_reasoning_content"
    assert repr(split[1]) == "SeparateReasoning(model_type=any-model, name=x_reasoning_content)"


def test_the_drawing_of_a_graph() -> None:
    @shoal.function
    def ask(s: Any, question: str) -> None:
        s += question + shoal.gen("x", stop=".")

    drawn = ask.bind(question="Why?").trace().last_node.print_graph_dfs()
    assert drawn.startswith("%0 branch 0: ") and "'Why?'" in drawn and "Gen(name='x'" in drawn


@pytest.mark.parametrize(
    ("model_type", "text"),
    [
        ("kimi_k2", "<think>a</think>b"),
        ("Step3", "a</think>b"),
        ("mistral", "[THINK]a[/THINK]b"),
        ("gpt-oss", "<|channel|>analysis<|message|>a<|end|>b"),
        ("minimax-m3", "<mm:think>a</mm:think>b"),
        ("cohere_command4", "<|START_THINKING|>a<|END_THINKING|>b"),
        ("gemma4", "<|channel>thought\na<channel|>b"),
    ],
)
def test_marks_of_reasoning_by_sglangs_names(model_type: str, text: str) -> None:
    assert split_reasoning(text, model_type) == ("a", "b")
