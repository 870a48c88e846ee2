"""Whether two models write their texts in the same tokens."""

import json
from pathlib import Path

from worker.models.config import decoder_config, read_config


def check_draft_model(draft: Path, model: Path) -> None:
    """Raises ValueError unless the model in the folder `draft` may draft for that in the folder `model`.

    Both need the same tokens under the same ids. Their vocabularies may be padded to different sizes, and added tokens
    may differ. Models without a tokenizer need vocabularies of the same size.
    """
    own, other = _tokens(draft), _tokens(model)
    if own and other:
        if differing := sorted(token for token in own.keys() | other.keys() if own.get(token) != other.get(token)):
            token = differing[0]
            raise ValueError(
                f"draft_model {draft} has another vocabulary than {model}: {len(differing)} tokens differ, such as "
                f"{token!r}, which is {own.get(token, 'none')} there and {other.get(token, 'none')} here: a draft "
                "model needs the same vocabulary"
            )
        return
    sizes = [decoder_config(read_config(folder)).vocab_size for folder in (draft, model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft_model {draft} has a vocabulary of {sizes[0]} tokens, and {model} one of {sizes[1]}: a draft model "
            "needs the same vocabulary"
        )


def _tokens(folder: Path) -> dict[str, int]:
    """Ids by token, without added ones; empty without a tokenizer."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    vocabulary = json.loads(path.read_text())["model"].get("vocab") or {}
    if isinstance(vocabulary, list):  # with scores
        return {token: number for number, (token, _) in enumerate(vocabulary)}
    return dict(vocabulary)
