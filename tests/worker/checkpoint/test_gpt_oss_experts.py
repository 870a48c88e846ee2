"""gpt-oss's experts as they are published, in MXFP4, against transformers' reading of the same checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from kernels.experts.mxfp4_weight import Mxfp4Weight, multiplied_out
from tests.worker.checkpoint.rank_weights import CPU, load
from tests.worker.conftest import COMMON, TINY, make_tiny
from worker.checkpoint.gpt_oss_experts import dequantized
from worker.executor import weight_loader
from worker.executor.weight_loader import load_weights
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard

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
        files["b.safetensors"][f"{name}_scales"] = torch.randint(110, 129, blocks.shape[:3], dtype=torch.uint8)
    for file, some in files.items():
        save_file(some, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    return folder


@pytest.fixture(scope="module")
def in_full(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in float32, by transformers."""
    folder = tmp_path_factory.mktemp("float32")
    model = AutoModelForCausalLM.from_pretrained(published, dtype=torch.float32)
    model.save_pretrained(folder, save_original_format=False)
    return folder


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_numbers_as_transformers(published: Path, in_full: Path, ranks: int) -> None:
    """The first rank of two has two thirds of each expert: whole blocks."""
    for rank in range(ranks):
        got, wanted = load(published, rank, ranks), load(in_full, rank, ranks)
        assert got.keys() == wanted.keys() and got["layers.0.experts_down"].std() > 0.01
        for name, tensor in wanted.items():
            assert torch.equal(got[name], tensor), name


@pytest.mark.parametrize(("ranks", "expert_parallel"), [(1, False), (2, False), (2, True)])
def test_kept_in_4_bits(
    published: Path, in_full: Path, ranks: int, expert_parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU."""
    monkeypatch.setattr(weight_loader, "_EXPERT_DEVICES", ("cpu",))
    monkeypatch.setattr(weight_loader, "_kept_formats", lambda *_: frozenset(("mxfp4",)))
    whole = decoder_config(read_config(published))
    for rank in range(ranks):
        shard = Shard(whole, rank, ranks, expert_parallel=expert_parallel)
        assert shard.config.experts.intermediate_size == (SIZE if ranks == 1 or expert_parallel else 64)
        got, wanted = (load_weights(folder, shard, CPU, torch.float32) for folder in (published, in_full))
        for name, tensor in wanted.items():
            if ".experts_" in name and "bias" not in name:
                kept = got[name]
                assert isinstance(kept, Mxfp4Weight)
                assert torch.equal(multiplied_out(kept, tensor.shape[2], name.endswith("gate_up")), tensor), name


@pytest.mark.parametrize("rank", [0, 1])
def test_random_weights_in_4_bits(published: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those that are multiplied out, of the size of other random weights."""
    wanted = load(published, rank, 2, "dummy")
    monkeypatch.setattr(weight_loader, "_EXPERT_DEVICES", ("cpu",))
    monkeypatch.setattr(weight_loader, "_kept_formats", lambda *_: frozenset(("mxfp4",)))
    got = load(published, rank, 2, "dummy")
    for name, columns in (("layers.1.experts_gate_up", HIDDEN), ("layers.1.experts_down", 64)):
        assert torch.equal(multiplied_out(got[name], columns, name.endswith("gate_up")), wanted[name])
    assert 0.7 < wanted["layers.1.experts_gate_up"][:, :32].std() * HIDDEN**0.5 < 1.5


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
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.experts\.down_proj_blocks"):
        load(tmp_path)


def test_mxfp4_is_of_gpt_oss_alone(tmp_path: Path) -> None:
    folder = make_tiny("qwen3_moe", tmp_path)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"quantization_config": MXFP4}))
    with pytest.raises(ValueError, match=r"\(mxfp4\)"):
        load(folder)
