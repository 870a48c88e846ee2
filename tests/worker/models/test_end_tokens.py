"""The tokens that end a text: all that the files of a model say."""

import json
from pathlib import Path
from typing import Any

import pytest

from worker.models.end_tokens import eos_token_ids

ADDED = [{"id": 7, "content": "<|im_end|>", "special": True}, {"id": 8, "content": "<|eot|>"}]
TOKENIZER = {"added_tokens": ADDED, "model": {"type": "BPE", "vocab": {"a": 0, "</s>": 2}, "merges": []}}
UNIGRAM = {"added_tokens": [], "model": {"type": "Unigram", "vocab": [["<unk>", 0], ["</s>", 0.5]]}}


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, (5,)),
        ({"generation_config": {}}, (5,)),
        ({"generation_config": {"eos_token_id": 1}}, (1, 5)),
        ({"generation_config": {"eos_token_id": [1, 5, 6]}}, (1, 5, 6)),
        ({"generation_config": {"eos_token_id": None}}, (5,)),
        ({"generation_config": {"eos_token_id": 1}, "config": {}}, (1,)),  # 5 is no more than a default
        ({"generation_config": {}, "config": {}}, (5,)),
        ({"generation_config": {"eos_token_id": [1, 3]}, "config": {"eos_token_id": 0}}, (1, 3, 0)),
        ({"config": {"eos_token_id": 0, "text_config": {"eos_token_id": [4]}}}, (0, 4)),
        ({"config": {"eos_token_id": -1, "text_config": {}}}, (5,)),
        (
            {
                "generation_config": {"eos_token_id": 0},
                "config": {"eos_token_id": 0},
                "tokenizer_config": {"eos_token": "<|im_end|>"},
            },
            (0, 7),
        ),
        ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": {"content": "</s>"}}}, (1, 2)),
        ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "of no vocabulary"}}, (1,)),
        (
            {
                "config": {"eos_token_id": 1},
                "tokenizer_config": {"eos_token": "<new>", "added_tokens_decoder": {"9": {"content": "<new>"}}},
            },
            (1, 9),
        ),
        (
            {
                "config": {"eos_token_id": 1},
                "tokenizer_config": {"eos_token": None},
                "special_tokens_map": {"eos_token": {"content": "<|im_end|>"}},
            },
            (1, 7),
        ),
        ({"generation_config": {"eos_token_id": ["<|eot|>", 1]}, "config": {}}, (8, 1)),
        ({"config": {"eos_token_id": 0}, "tokenizer": UNIGRAM, "tokenizer_config": {"eos_token": "</s>"}}, (0, 1)),
    ],
)
def test_they_are_united(files: dict[str, Any], ends: tuple[int, ...], tmp_path: Path) -> None:
    write(tmp_path, **{"tokenizer": TOKENIZER} | files)
    assert eos_token_ids(tmp_path, 5) == ends


def test_a_folder_without_files(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path, [2, 3]) == (2, 3)
    assert eos_token_ids(tmp_path, None) == ()


@pytest.mark.parametrize(
    "said", ["", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1.5]}', '{"eos_token_id": {}}']
)
def test_wrong_ones_are_named(said: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(said)
    with pytest.raises(ValueError, match=r"generation_config\.json") as error:
        eos_token_ids(tmp_path, 2)
    assert "eos_token_id" not in said or "eos_token_id" in str(error.value)
