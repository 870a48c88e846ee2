"""Families with experts or recurrent layers in a whole engine: greedy output is, token for token, what `transformers`
generates, cold and warm, in a crowd, and after preemptions."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.worker.conftest import COMMON, TEXT_PARTS, TINY, Sequences, randomise, without_grammars
from tests.worker.covering import config_of
from tests.worker.engines import checked_engines
from tests.worker.references import GREEDY, answers, assert_same, batch, expected, generated, prompts, settings
from worker.config import WorkerConfig
from worker.executor.model_runner import ModelRunner

pytestmark = pytest.mark.slow
HYBRIDS = [name for name in TINY if config_of(name).recurrent is not None]  # with recurrent states
NAMES = [name for name in TINY if config_of(name).experts is not None or name in ("gemma4", *HYBRIDS)]


@pytest.mark.parametrize("name", NAMES)
def test_cold_warm_and_preempted(name: str, tiny_model: Callable[[str], Path], crowded: None) -> None:
    folder, asked = tiny_model(name), batch()
    wanted = expected(folder)

    def load(model: Path, config):
        return without_grammars(model, config, ModelRunner.load(model, config))

    with checked_engines(folder, page_size=4) as make:
        one = make(load, kv_tokens=512, overlap=True)
        assert [done.token_ids for done in one.generate(asked[:1], GREEDY)] == wanted[:1]
        assert [done.token_ids for done in one.generate(asked, GREEDY)] == wanted
        warm = one.generate(asked, GREEDY)
        assert [done.token_ids for done in warm] == wanted
        reusable = [(len(own) - 1) // 4 * 4 for own in asked]
        assert [done.cached_tokens for done in warm] == reusable
        full = make(load, kv_tokens=80, token_budget=24)
        assert [done.token_ids for done in full.generate(asked, GREEDY)] == wanted
        assert full.load().preemptions > 0


@pytest.mark.parametrize(
    ("name", "state_checkpoints"), [("qwen3_next", 0), ("qwen3_5_moe", 2), *((name, 40) for name in HYBRIDS)]
)
def test_states_go_on_from_chunk_to_chunk(name: str, tiny_model: Callable[[str], Path], state_checkpoints: int) -> None:
    """Several choices for one prompt, and prompts that part, in chunks of any size, with a checkpoint every 8 tokens,
    fewer than there are positions for, or none. Then the outputs as prompts."""
    folder, asked = tiny_model(name), prompts(3)
    asked.append([*asked[0][: len(asked[0]) // 2], *asked[1]])
    wanted = expected(folder, asked)
    longer = [[*prompt, *output] for prompt, output in zip(asked, wanted, strict=True)]
    with checked_engines(folder, page_size=4, kv_tokens=512) as make:
        one = make(
            lambda model, config: without_grammars(model, config, ModelRunner.load(model, config)),
            token_budget=5,
            state_checkpoints=state_checkpoints,
            checkpoint_interval=8,
        )
        assert [done.token_ids for done in one.generate([*asked, *asked], GREEDY)] == [*wanted, *wanted]
        found = one.generate(longer, GREEDY)
        assert [done.token_ids for done in found] == expected(folder, longer)
        assert (one.load().cached_tokens > 0) == (one.tree.num_cached > 0) == (state_checkpoints > 0)
        assert one.load().checkpoints_total == state_checkpoints
        if state_checkpoints == 40:
            assert all(done.cached_tokens >= (len(own) - 9) // 8 * 8 for done, own in zip(found, longer, strict=True))


@pytest.mark.parametrize("name", HYBRIDS)
def test_drafts_are_refused(name: str, tiny_model: Callable[[str], Path]) -> None:
    config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=512, speculation="auto")
    with pytest.raises(ValueError, match="speculation is auto"):
        ModelRunner.load(tiny_model(name), config)


@pytest.mark.parametrize(
    ("name", "model_type", "prefix", "others"),
    [
        ("qwen3_5", "qwen3_5", "model.language_model.", ["model.visual.pos_embed.weight", "mtp.norm.weight"]),
        ("gemma3", "gemma3", "language_model.model.", ["vision_tower.norm.weight", "multi_modal_projector.weight"]),
        (
            "gemma4",
            "gemma4",
            "model.language_model.",
            [
                *("model.vision_tower.norm.weight", "model.audio_tower.norm.weight", "model.embed_vision.norm.weight"),
                "model.language_model.layers.4.self_attn.k_proj.weight",  # that layer reads another's keys
            ],
        ),
        ("llama4_moe", "llama4", "language_model.model.", ["vision_model.class_embedding"]),
        (
            "deepseek_v3_moe",
            "kimi_k25",
            "language_model.model.",
            ["vision_tower.patch_embed.proj.weight", "mm_projector.proj.0.weight"],
        ),
        ("lfm2", "lfm2_vl", "model.language_model.", ["model.multi_modal_projector.linear_1.weight"]),
        ("lfm3", "lfm3_vl", "model.language_model.", ["model.vision_tower.patch_embed.weight"]),
        ("cohere2", "cohere2_vision", "model.language_model.", ["model.multi_modal_projector.linear_1.weight"]),
    ],
)
def test_the_text_part_of_a_checkpoint_with_images(
    name: str, model_type: str, prefix: str, others: list[str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """As they are published: other names, tensors for images and drafts, and a configuration in the configuration."""
    folder = tiny_model(name)
    tensors = load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^model\.", prefix, key): tensor for key, tensor in tensors.items()}
    if "lm_head.weight" in renamed and prefix.startswith("language_model."):
        renamed["language_model.lm_head.weight"] = renamed.pop("lm_head.weight")
    save_file(renamed | {key: torch.ones(2, 2) for key in others}, tmp_path / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    tied = text.get("tie_word_embeddings", True)
    whole = {"model_type": model_type, "text_config": text, "vision_config": {}, "tie_word_embeddings": tied}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert_same(generated(ModelRunner.load(tmp_path, settings()), batch()[:3]), answers(folder)[:3])


_BLOCKS = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": COMMON["hidden_size"],
}
_VISION: dict[str, dict[str, Any]] = {
    "mistral3": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "gemma4_unified": {"mm_embed_dim": 16, "mm_posemb_size": 4, "output_proj_dims": 16},
    "exaone4_5": {**_BLOCKS, "num_key_value_heads": 1},
    "glm46v": _BLOCKS,
    "glm4v_moe": _BLOCKS,
    "qwen2_5_vl": _BLOCKS,
    "qwen3_vl": {**_BLOCKS, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": {**_BLOCKS, "num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
}


@pytest.mark.parametrize("name", TEXT_PARTS)
@torch.inference_mode()
def test_the_text_part_of_what_transformers_computes_whole(name: str, tmp_path: Path) -> None:
    """In the layout that it writes. A head is found in the files, whatever the configuration says of it."""
    model_type, changes = TEXT_PARTS[name]
    text = COMMON | changes | {"model_type": model_type}
    torch.manual_seed(sum(name.encode()))
    config = AutoConfig.for_model(name, text_config=text, vision_config=_VISION[name], tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    tokens = [token for prompt in prompts(8) for token in prompt][:60]
    wanted = model(input_ids=torch.tensor([tokens])).logits[0]
    got = _logits(tmp_path, tokens)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    if name == "qwen3_vl_moe":  # as it was published
        tensors = load_file(tmp_path / "model.safetensors")
        turned = {key: tensors[key].transpose(1, 2).contiguous() for key in tensors if ".experts." in key}
        assert turned
        save_file(tensors | turned, tmp_path / "model.safetensors")
        torch.testing.assert_close(_logits(tmp_path, tokens), got)


def _logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """Those of all tokens, in chunks of 7."""
    sequences = Sequences(ModelRunner.load(folder, WorkerConfig(device="cpu", dtype="float32", kv_tokens=512)))
    sequences.add(0, tokens)
    while sequences.computed[0] < len(tokens):
        sequences.advance({0: 7})
    return torch.cat(sequences.logits[0])
