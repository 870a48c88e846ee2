"""Folders of models without weights: the decoder knows their configuration, and every id can be spelled."""

import math
from pathlib import Path

import pytest

from bench.replica import dummy_models
from bench.replica.offline_workloads import MAX_TOKEN_ID
from router.text.tokenizer import Tokenizer
from worker.models.config import decoder_config, read_config
from worker.models.parameters import parameter_shapes
from worker.structured_output.tokens import GrammarVocabulary


@pytest.mark.parametrize("name", dummy_models.SHAPES)
def test_the_decoder_runs_every_shape(name: str, tmp_path: Path) -> None:
    folder = dummy_models.write(name, tmp_path / name)
    config, wanted = decoder_config(read_config(folder)), dummy_models.SHAPES[name].config
    head_dim = wanted["head_dim"] if config.latent is None else 512 + 64
    assert config.num_layers == wanted["num_hidden_layers"] and config.head_dim == head_dim
    assert config.vocab_size == wanted["vocab_size"] > MAX_TOKEN_ID
    assert config.tied_embeddings == wanted["tie_word_embeddings"]
    assert config.qk_norm == ("head" if config.model_type.startswith(("qwen3", "gemma3")) else None)


@pytest.mark.bench
def test_shapes_are_of_the_sizes_that_they_are_named_after(tmp_path: Path) -> None:
    sizes = {"llama-8b": 8.03e9, "llama-70b": 70.6e9, "qwen3-0.6b": 0.596e9, "qwen3-14b": 14.8e9}
    for name, parameters in sizes.items():
        c = decoder_config(read_config(dummy_models.write(name, tmp_path / name)))
        attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
        layer = attention + 3 * c.hidden_size * c.intermediate_size
        embeddings = c.vocab_size * c.hidden_size * (1 if c.tied_embeddings else 2)
        assert c.num_layers * layer + embeddings == pytest.approx(parameters, rel=0.01)


@pytest.mark.bench
@pytest.mark.parametrize(
    ("name", "parameters", "chosen", "used"),
    [("qwen3-30b-a3b", 30.5e9, 8 / 128, 3.3e9), ("deepseek-v2-lite", 15.7e9, 6 / 64, 2.66e9)],
)
def test_experts_are_of_the_size_that_they_are_named_after(
    name: str, parameters: float, chosen: float, used: float, tmp_path: Path
) -> None:
    shapes = parameter_shapes(decoder_config(read_config(dummy_models.write(name, tmp_path)))).items()
    assert sum(math.prod(shape) for _, shape in shapes) == pytest.approx(parameters, rel=0.01)
    own = sum(math.prod(shape) * (chosen if ".experts_" in parameter else 1.0) for parameter, shape in shapes)
    assert own == pytest.approx(used, rel=0.02)


@pytest.mark.bench
@pytest.mark.parametrize(("name", "parameters"), [("gpt-oss-20b", 20.9e9), ("gemma3-12b", 11.8e9)])
def test_shapes_with_windows(name: str, parameters: float, tmp_path: Path) -> None:
    config = decoder_config(read_config(dummy_models.write(name, tmp_path)))
    assert sum(map(math.prod, parameter_shapes(config).values())) == pytest.approx(parameters, rel=0.01)
    windows = {"gpt-oss-20b": (128, None) * 12, "gemma3-12b": (*(1024,) * 5, None) * 8}
    assert config.windows == windows[name] and config.has_sinks == (name == "gpt-oss-20b")
    assert {rope.kind for rope in config.ropes} <= {"yarn", "linear", "default"}


def test_every_id_has_a_text_of_its_own(tmp_path: Path) -> None:
    folder = dummy_models.write("tiny", tmp_path)
    tokenizer, size = Tokenizer.from_folder(folder), dummy_models.SHAPES["tiny"].config["vocab_size"]
    assert tokenizer.vocab_size == size
    special = {dummy_models.SHAPES["tiny"].config[key] for key in ("bos_token_id", "eos_token_id")}
    assert tokenizer.special_ids == special
    texts = GrammarVocabulary(folder, size).token_bytes()
    spelled = [text for i, text in enumerate(texts) if i not in special]
    assert len(set(spelled)) == len(spelled) and all(spelled)
    assert {bytes([value]) for value in range(256)} <= set(spelled)
    assert tokenizer.decode([300, 301]) == (texts[300] + texts[301]).decode()
    assert bytes(tokenizer.encode("naïve 😀") and "naïve 😀".encode()) == b"".join(
        texts[i] for i in tokenizer.encode("naïve 😀")
    )


def test_words_are_all_different() -> None:
    words = [dummy_models.word(number) for number in range(152_000)]
    assert len(set(words)) == len(words)
    assert all(4 <= len(word) <= 6 for word in words)
