"""How a model's hidden states become embeddings and scores: read from its folder, or set."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from router.config import ModelConfig

# Modes in the configuration of sentence-transformers' pooling, and Shoal's names for those that exist here.
MODES: dict[str, Literal["last", "mean"]] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_MIN_NORM = 1e-12


@dataclass(frozen=True)
class Pooling:
    """Embeddings and scores of one model.

    | field | meaning |
    | --- | --- |
    | `method` | which hidden states: the last token's, or the mean over all tokens |
    | `normalises` | whether embeddings have length 1 |
    | `is_reranker` | whether scores are a reranker's yes or no; else they are the cosine between embeddings |
    | `size` | numbers in an embedding; None if the model's files do not say |
    """

    method: Literal["last", "mean"] = "last"
    normalises: bool = True
    is_reranker: bool = False
    size: int | None = None

    @classmethod
    def read(cls, folder: Path, config: ModelConfig, name: str) -> "Pooling":
        """Reads it from the files of sentence-transformers (`modules.json`, `1_Pooling/config.json`) in a Hugging Face
        folder; without them, embeddings are the last token's, of length 1. `name`: the model's, which tells rerankers
        from other models. Raises ValueError for files that are broken or ask for something else."""
        about = _read(folder / "config.json")
        modules = list(_modules(folder))
        kinds = [kind for kind, _ in modules]
        if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
            raise ValueError(f"{folder / 'modules.json'}: embeddings with {', '.join(unknown)} are not supported")
        paths = [folder / path / "config.json" for kind, path in modules if kind == "Pooling"]
        method: Literal["last", "mean"] = "last"
        if config.pooling != "auto":
            method = config.pooling
        elif paths:
            method = _method(paths[0])
        is_reranker = config.scoring == "reranker"
        if config.scoring == "auto":
            architectures = about.get("architectures") or []
            is_reranker = "reranker" in name.lower() or any("ForSequenceClassification" in one for one in architectures)
        size = about.get("text_config", about).get("hidden_size")
        return cls(method, not modules or "Normalize" in kinds, is_reranker, size if isinstance(size, int) else None)

    def vector(self, embedding: bytes, dimensions: int | None = None) -> np.ndarray:
        """The embedding that clients get, float32, of a replica's `embedding`: cut to its first `dimensions` numbers,
        then normalised."""
        values = np.frombuffer(embedding, dtype="<f4")[:dimensions]
        return normalised(values) if self.normalises else values


def normalised(values: np.ndarray) -> np.ndarray:
    """A vector's direction: `values` divided by their length."""
    return values / max(float(np.linalg.norm(values)), _MIN_NORM)


def _modules(folder: Path) -> Iterator[tuple[str, str]]:
    """Kind and folder of each module of sentence-transformers."""
    path = folder / "modules.json"
    for module in _read(path, list):
        if not isinstance(module, dict) or not isinstance(module.get("type"), str):
            raise ValueError(f"{path}: a module has no type")
        yield module["type"].rpartition(".")[2], str(module.get("path", ""))


def _method(path: Path) -> Literal["last", "mean"]:
    chosen = [mode for mode, on in _read(path).items() if mode.startswith("pooling_mode_") and on]
    if not chosen:  # the file is missing: the hub's copy may be incomplete
        return "last"
    if len(chosen) > 1 or chosen[0] not in MODES:
        raise ValueError(f"{path}: {' with '.join(chosen)} is not supported: set pooling to last or mean")
    return MODES[chosen[0]]


def _read(path: Path, kind: type = dict) -> Any:
    """The content of a JSON file, which is a `kind`; empty without the file."""
    if not path.exists():
        return kind()
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ValueError(f"{path} must be a JSON {'object' if kind is dict else 'list'}")
    return content
