"""How embeddings are made, by the files of a model's folder and by settings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from router.config import RouterConfig
from router.prepare.pooling import Pooling

MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]


def read(folder: Path, name: str = "model", **settings: Any) -> Pooling:
    return Pooling.read(folder, RouterConfig(**settings), name)


def write(folder: Path, modules: Any = MODULES, **modes: bool) -> None:
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))


def test_without_files_the_last_token_counts(tmp_path: Path) -> None:
    assert read(tmp_path) == Pooling("last", normalises=True, is_reranker=False, size=None)


@pytest.mark.parametrize(("mode", "method"), [("lasttoken", "last"), ("mean_tokens", "mean")])
def test_the_files_of_sentence_transformers(tmp_path: Path, mode: str, method: str) -> None:
    write(tmp_path, pooling_mode_cls_token=False, **{f"pooling_mode_{mode}": True})
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "architectures": ["Qwen3ForCausalLM"]}))
    assert read(tmp_path) == Pooling(method, normalises=True, size=8)
    write(tmp_path, MODULES[:2], **{f"pooling_mode_{mode}": True})
    assert read(tmp_path) == Pooling(method, normalises=False, size=8)
    for set_ in ("last", "mean"):
        assert read(tmp_path, pooling=set_).method == set_
    (tmp_path / "1_Pooling" / "config.json").unlink()
    assert read(tmp_path).method == "last"


@pytest.mark.parametrize(
    ("name", "architecture", "setting", "is_reranker"),
    [
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", "auto", True),
        ("mine", "Qwen3ForSequenceClassification", "auto", True),
        ("Qwen/Qwen3-Embedding-0.6B", "Qwen3ForCausalLM", "auto", False),
        ("Qwen/Qwen3-Embedding-0.6B", "Qwen3ForCausalLM", "reranker", True),
        ("Qwen/Qwen3-Reranker-0.6B", "Qwen3ForCausalLM", "embedding", False),
    ],
)
def test_which_models_are_rerankers(
    tmp_path: Path, name: str, architecture: str, setting: str, is_reranker: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    assert read(tmp_path, name, scoring=setting).is_reranker == is_reranker


@pytest.mark.parametrize(
    ("modules", "modes", "fault"),
    [
        ([*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}], {}, "Dense"),
        (MODULES, {"pooling_mode_cls_token": True}, "cls_token"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, "mean_tokens"),
        ({"a": 1}, {}, "list"),
        ([{"path": "x"}], {}, "no type"),
        ([1], {}, "no type"),
    ],
)
def test_files_that_ask_for_something_else_are_named(
    tmp_path: Path, modules: Any, modes: dict[str, bool], fault: str
) -> None:
    write(tmp_path, modules, **modes)
    with pytest.raises(ValueError, match=fault) as error:
        read(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_file_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("{")
    with pytest.raises(ValueError, match=r"modules\.json"):
        read(tmp_path)


def test_vectors_are_cut_before_they_are_normalised() -> None:
    embedding = np.array([3, 4, 12], dtype="<f4").tobytes()
    assert Pooling(normalises=False).vector(embedding).tolist() == [3, 4, 12]
    np.testing.assert_allclose(Pooling().vector(embedding), np.array([3, 4, 12]) / 13, rtol=1e-6)
    np.testing.assert_allclose(Pooling().vector(embedding, 2), [0.6, 0.8], rtol=1e-6)
    assert Pooling().vector(bytes(8)).tolist() == [0, 0]
