"""A family is one module, and what it says of its checkpoints touches no other's."""

from types import SimpleNamespace
from typing import Any

import pytest

from worker.checkpoint.tensor_names import full_name
from worker.models import families
from worker.models.config import decoder_config
from worker.models.families import FAMILIES
from worker.models.family import Family

LLAMA = FAMILIES["llama"]


def test_no_names_of_a_family_touch_a_llama() -> None:
    runs = {run for family in FAMILIES.values() for run in (*family.names, *family.ignored)}
    assert len(runs) > 50
    for run in runs:
        name = f"model.layers.0.{run}.weight"
        assert full_name(name, LLAMA) == name
        assert not LLAMA.ignores(name)


def test_what_a_family_says_is_said_of_its_own_names() -> None:
    """No run of a family's names is one part of Llama's names, which it would take away."""
    of_llama = {
        *("model", "embed_tokens", "layers", "norm", "lm_head", "self_attn", "q_proj", "k_proj", "v_proj", "o_proj"),
        *("mlp", "gate_proj", "up_proj", "down_proj", "input_layernorm", "post_attention_layernorm"),
    }
    for model_type, family in FAMILIES.items():
        assert not of_llama & family.names.keys(), model_type
        assert not of_llama & set(family.ignored), model_type


def test_runs_are_whole_and_replaced_at_once() -> None:
    family = Family(names={"a": "b", "b": "c", "b.a": "d", "experts": "mlp.experts"}, ignored=("c.mask",))
    assert full_name("a.b.x", family) == "b.c.x"
    assert full_name("x.b.a.b", family) == "x.d.c"
    assert full_name("aa.ab.ba.shared_experts.a_b", family) == "aa.ab.ba.shared_experts.a_b"
    assert full_name("layers.3.experts.0.x", family) == "model.layers.3.mlp.experts.0.x"
    assert [family.ignores(name) for name in ("x.c.mask", "c.mask.x", "c.masks", "xc.mask", "c.x.mask")] == [
        *(True, True),
        *(False, False, False),
    ]


def test_the_names_of_a_text_part_are_those_of_families_that_may_be_one() -> None:
    for name in (
        "model.language_model.layers.0.mlp.up_proj.weight",
        "language_model.model.layers.0.mlp.up_proj.weight",
    ):
        assert full_name(name, FAMILIES["gemma3_text"]) == "model.layers.0.mlp.up_proj.weight"
        assert full_name(name, LLAMA) == name
    assert full_name("language_model.lm_head.weight", FAMILIES["gemma3_text"]) == "lm_head.weight"


def test_a_text_part_that_a_model_with_images_does_not_have_is_refused() -> None:
    values: dict[str, Any] = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "hidden_size": 8}}
    assert families.text_part(values) == values["text_config"]
    for other in ({"model_type": "llama"}, {"model_type": "unknown"}, {}, None):
        assert families.text_part(values | {"text_config": other}) is None
    with pytest.raises(ValueError, match="'gemma3'"):
        decoder_config(SimpleNamespace(**values))


def test_a_tensor_for_drafts_is_left_out_where_the_family_has_such() -> None:
    own = {"ernie4_5_moe": "model.mtp_block.0.input_layernorm.weight", "mellum": "mtp.layers.0.norm.weight"}
    for model_type, name in own.items():
        assert FAMILIES[model_type].ignores(name)
        assert not LLAMA.ignores(name)


def test_two_modules_cannot_have_the_same_family(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = [SimpleNamespace(name="gemma"), SimpleNamespace(name="gemma")]
    monkeypatch.setattr(families, "iter_modules", lambda path: twice)
    with pytest.raises(ValueError, match="gemma2"):
        families._found()
