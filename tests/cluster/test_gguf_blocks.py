"""A model from its GGUF file as it is, against the float32 copy of the same file."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import GPT2Config, Qwen3_5TextConfig

from cluster import gguf_index
from cluster.convert import convert
from kernels.linear.block_linear import BlockProduct
from kernels.linear.block_weight import BlockMatrix
from tests.cluster.gguf_files import finish, write_gguf, write_lfm2
from tests.worker.engines import checked_engines
from worker.checkpoint.gguf_layout import FILE
from worker.executor.weight_loader import Parameters, load_weights
from worker.messages import SamplingParams
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder in blocks, and the one in float32."""
    base = tmp_path_factory.mktemp("gguf")
    write_gguf(base / "tiny.gguf")
    blocks, float32 = base / "blocks", base / "float32"
    blocks.mkdir()
    float32.mkdir()
    convert(base / "tiny.gguf", blocks, lambda line: None, "blocks")
    (blocks / FILE).symlink_to(base / "tiny.gguf")
    convert(base / "tiny.gguf", float32, lambda line: None, "float32")
    return blocks, float32


def load(folder: Path, shard: tuple[int, ...] = (), dequantize: bool = False) -> Parameters:
    whole = decoder_config(read_config(folder))
    return load_weights(folder, Shard(whole, *shard), torch.device("cpu"), torch.float32, dequantize=dequantize)


def dense(weight: object) -> torch.Tensor:
    if isinstance(weight, BlockMatrix):
        return torch.cat([BlockProduct(part).dense() for part in weight.parts])
    assert isinstance(weight, torch.Tensor)
    return weight


@pytest.mark.parametrize("shard", [(), (0, 2), (1, 2), (0, 1, 0, 2), (1, 2, 1, 2)])
@pytest.mark.slow
def test_each_rank_has_its_part_of_the_blocks(folders: tuple[Path, Path], shard: tuple[int, ...]) -> None:
    ours, theirs = load(folders[0], shard), load(folders[1], shard)
    assert ours.keys() == theirs.keys()
    assert {name for name, weight in ours.items() if isinstance(weight, BlockMatrix)} == {
        name for name, weight in theirs.items() if isinstance(weight, torch.Tensor) and weight.ndim == 2
    }
    for name, weight in theirs.items():
        assert torch.equal(dense(ours[name]), dense(weight)), name


@pytest.mark.slow
def test_dequantized_at_load(folders: tuple[Path, Path]) -> None:
    ours, theirs = load(folders[0], dequantize=True), load(folders[1])
    assert all(isinstance(weight, torch.Tensor) for weight in ours.values())
    assert all(torch.equal(dense(ours[name]), dense(weight)) for name, weight in theirs.items())


def test_ranks_that_would_cut_blocks_are_refused(folders: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"o_proj.*Q4_1.*\b32\b.*\btp\b.*dequantize"):
        load(folders[0], (1, 4))
    assert load(folders[0], (1, 4), dequantize=True)


@pytest.mark.slow
def test_tokens_are_those_of_the_float32_copy(folders: tuple[Path, Path]) -> None:
    prompts = [[5], list(range(7, 40)), [90, 3, 41, 8], list(range(200, 20, -3))]
    said = []
    for folder in folders:
        with checked_engines(folder, kv_tokens=2048) as make:
            asked = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)
            said.append(make(token_budget=16).generate(prompts, asked))
    for ours, theirs in zip(*said, strict=True):
        assert ours.failure is None and ours.token_ids == theirs.token_ids


@pytest.mark.slow
def test_short_convolutions_are_kept_too(tmp_path: Path) -> None:
    path, blocks, float32 = tmp_path / "tiny.gguf", tmp_path / "blocks", tmp_path / "float32"
    write_lfm2(path)
    blocks.mkdir()
    float32.mkdir()
    convert(path, blocks, lambda line: None, "blocks")
    (blocks / FILE).symlink_to(path)
    convert(path, float32, lambda line: None, "float32")
    for shard in ((), (1, 2)):
        ours, theirs = load(blocks, shard), load(float32, shard)
        assert ours.keys() == theirs.keys()
        assert isinstance(ours["layers.0.qkv"], BlockMatrix)
        assert all(torch.equal(dense(ours[name]), dense(weight)) for name, weight in theirs.items())


def test_a_hybrid_is_refused_by_name(tmp_path: Path) -> None:
    """Its files have other weights than the model: norms plus one, decays as they are, heads in another order."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "qwen35")
    finish(writer)
    config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    with pytest.raises(ValueError, match=r"tiny\.gguf .*\bqwen35\b.*dequantize"):
        gguf_index.write(tmp_path / "tiny.gguf", config, tmp_path)


def test_matrices_that_the_model_has_transposed_are_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "gpt2")
    blocks = gguf.quantize(np.ones((96, 32), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_qkv.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    finish(writer)
    with pytest.raises(ValueError, match=r"tiny\.gguf .*\bgpt2\b.*dequantize"):
        gguf_index.write(tmp_path / "tiny.gguf", GPT2Config(n_embd=32, n_layer=1, n_head=2), tmp_path)


@pytest.mark.parametrize("kept", ["nothing", "float32"])
def test_a_rotation_that_is_not_read_is_refused(kept: str, tmp_path: Path) -> None:
    """transformers reads a StarCoder2 without the base of its rotation."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "starcoder2")
    writer.add_block_count(1)
    writer.add_rope_freq_base(1e5)
    finish(writer)
    with pytest.raises(ValueError, match=r"tiny\.gguf .*\bstarcoder2\b.*\b100000\b"):
        convert(tmp_path / "tiny.gguf", tmp_path / "none", lambda line: None, kept)


def test_a_part_of_heads_that_is_not_read_is_refused(tmp_path: Path) -> None:
    """transformers takes the part of a StableLM that rotates for a quarter."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "stablelm")
    writer.add_block_count(1)
    writer.add_embedding_length(64)
    writer.add_head_count(4)
    writer.add_rope_dimension_count(8)
    finish(writer)
    with pytest.raises(ValueError, match=r"tiny\.gguf .*\bstablelm\b.*\b8 dimensions"):
        convert(tmp_path / "tiny.gguf", tmp_path / "none", lambda line: None, "nothing")


def test_a_file_that_is_gone_is_named(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[0].iterdir():
        if file.name != FILE:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ValueError, match=r"model\.gguf cannot be read"):
        load(tmp_path)
