"""gpt-oss's experts as they are published, in MXFP4, against transformers' reading of the same checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.worker.conftest import COMMON, TINY, make_tiny
from tests.worker.executor.test_weight_loader import load
from worker.checkpoint.gpt_oss_experts import dequantized

GPT_OSS = TINY["gpt_oss"][1]
EXPERTS, HIDDEN, SIZE = GPT_OSS["num_local_experts"], 64, 96
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random MXFP4 experts, its blocks and scales in different files."""
    folder = tmp_path_factory.mktemp("mxfp4")
    sizes = {"hidden_size": HIDDEN, "intermediate_size": SIZE}
    config = AutoConfig.for_model("gpt_oss", **(COMMON | GPT_OSS | sizes))
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            files["a.safetensors"][name] = tensor
            continue
        _, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (EXPERTS, rows, columns // 32, 16), dtype=torch.uint8)
        files["a.safetensors"][f"{name}_blocks"] = blocks
        files["b.safetensors"][f"{name}_scales"] = torch.randint(110, 132, blocks.shape[:3], dtype=torch.uint8)
    for file, some in files.items():
        save_file(some, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_numbers_as_transformers(published: Path, ranks: int, tmp_path: Path) -> None:
    """A rank of two has half of each expert, which ends within a block."""
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    assert SIZE // 2 % 32
    for rank in range(ranks):
        got, wanted = load(published, rank, ranks), load(tmp_path, rank, ranks)
        assert got.keys() == wanted.keys() and got["layers.0.experts_down"].std() > 0.01
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


def test_every_code() -> None:
    """Of e2m1, low bits first, times powers of two."""
    blocks = torch.arange(16, dtype=torch.uint8).repeat(2, 1, 1, 1) + (torch.arange(16, dtype=torch.uint8) << 4)
    scales = torch.tensor([[[127]], [[130]]], dtype=torch.uint8)
    got = dequantized(blocks, scales, torch.device("cpu"), torch.bfloat16)
    positive = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16)
    numbers = torch.cat((positive, -positive)).repeat_interleave(2)
    assert torch.equal(got, torch.stack((numbers, 8 * numbers))[:, None])


def test_one_half_is_an_error(published: Path, tmp_path: Path) -> None:
    for file in published.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(published / "b.safetensors")
    del tensors["model.layers.2.mlp.experts.down_proj_scales"]
    save_file(tensors, tmp_path / "b.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj_blocks, and not the other half"):
        load(tmp_path)


def test_mxfp4_is_of_gpt_oss_alone(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    with pytest.raises(ValueError, match=r"quantized \(mxfp4\), which is not supported"):
        load(folder)
