"""Quantized checkpoints against the same weights multiplied out: whole, cut over ranks, kept as they are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.linear.block_weight import BlockMatrix
from kernels.linear.fp8_linear import Fp8Weight, by_column, quantize
from tests.worker.checkpoint.quantized import (
    FP8,
    Quantizer,
    awq,
    by_row,
    by_tensor,
    compressed,
    gptq,
    in_blocks,
    int8_by_row,
    nvfp4,
    packed,
    write,
)
from tests.worker.conftest import together
from worker.checkpoint.formats import model_tensors
from worker.config import WorkerConfig
from worker.executor import weight_loader
from worker.executor.model_runner import ModelRunner
from worker.executor.weight_loader import Parameters, load_weights
from worker.models.config import decoder_config, read_config
from worker.models.sharding import Shard
from worker.parallel.communicator import Communicator
from worker.parallel.pipeline_stage import PipelineStage
from worker.step import Chunk, Plan

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "checkpoint_format": "gptq"}
BLOCKS = FP8 | {"weight_block_size": [128, 128]}
FLOAT8 = {"num_bits": 8, "type": "float"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16, "strategy": "tensor_group"}
INT4 = {"num_bits": 4, "type": "int", "group_size": 64, "strategy": "group"}

# What a format is called here: how matrices are quantized, what config.json says of it, and as what they can be kept.
FORMATS: dict[str, tuple[Quantizer, dict[str, Any], type | None]] = {
    "fp8 in blocks": (in_blocks("weight_scale_inv"), BLOCKS, Fp8Weight),
    "fp8 in small blocks": (in_blocks("weight_scale_inv", 64), FP8 | {"weight_block_size": [64, 64]}, None),
    "fp8, static": (by_tensor, FP8 | {"activation_scheme": "static"}, Fp8Weight),
    "compressed fp8 by row": (by_row, compressed("float-quantized", strategy="channel", **FLOAT8), Fp8Weight),
    "compressed fp8 in blocks": (
        in_blocks("weight_scale"),
        compressed("float-quantized", strategy="block", block_structure=[128, 128], **FLOAT8),
        Fp8Weight,
    ),
    "compressed int8": (
        int8_by_row,
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        BlockMatrix,
    ),
    "compressed nvfp4": (
        nvfp4("weight_packed", "weight_global_scale"),
        compressed("nvfp4-pack-quantized", **NVFP4),
        None,
    ),
    "modelopt fp8": (by_tensor, MODELOPT | {"quant_algo": "FP8"}, Fp8Weight),
    "modelopt nvfp4": (nvfp4("weight", "weight_scale_2"), MODELOPT, None),
    "awq": (awq(64), AWQ, BlockMatrix),
    "awq, group of 128": (awq(128), AWQ | {"group_size": 128}, BlockMatrix),
    "gptq": (gptq(4, 64, False), GPTQ, BlockMatrix),
    "gptq v2": (gptq(4, 32, False, is_v2=True), GPTQ | {"group_size": 32, "checkpoint_format": "gptq_v2"}, BlockMatrix),
    "gptq, symmetric, one group": (gptq(4, None, True), GPTQ | {"group_size": -1}, BlockMatrix),
    "gptq, act order": (gptq(4, 64, False, in_order=False), GPTQ | {"desc_act": True}, None),
    "gptq, 8 bits": (gptq(8, 64, True), GPTQ | {"bits": 8}, BlockMatrix),
    "packed": (packed(4, 64, True), compressed("pack-quantized", **INT4), BlockMatrix),
    "packed with zeros": (packed(4, 128, False), compressed("pack-quantized", **INT4), BlockMatrix),
    "packed, act order": (packed(4, 64, True, in_order=False), compressed("pack-quantized", **INT4), None),
    "packed, 8 bits": (
        packed(8, None, True),
        compressed("pack-quantized", num_bits=8, type="int", strategy="channel"),
        BlockMatrix,
    ),
}
MATRICES = ("qkv", "out", "gate_up", "down")

Written = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Name of FORMATS to the folder in the format, and the one multiplied out."""
    made: dict[str, tuple[Path, Path]] = {}

    def get(name: str) -> tuple[Path, Path]:
        if name not in made:
            quantizer, said, _ = FORMATS[name]
            made[name] = write(tmp_path_factory.mktemp("format"), "llama_biased_tied", quantizer, said)
        return made[name]

    return get


def load(folder: Path, rank: int = 0, size: int = 1, **settings: Any) -> Parameters:
    shard = Shard(decoder_config(read_config(folder)), rank, size)
    return load_weights(folder, shard, CPU, torch.float32, **settings)


def dense(weight: object) -> torch.Tensor:
    if isinstance(weight, BlockMatrix):
        return weight.gather(torch.arange(weight.rows))
    if isinstance(weight, Fp8Weight):
        values, scales = weight.values, weight.scales
        numbers = values.float().flatten(0, -2) * by_column(scales.flatten(0, -2), values.shape[-1])
        return numbers.view(values.shape)
    assert isinstance(weight, torch.Tensor)
    return weight


def compare(got: Parameters, wanted: Parameters, kind: type) -> None:
    assert got.keys() == wanted.keys()
    for name, weight in wanted.items():
        expected = kind if name.rpartition(".")[2] in MATRICES else torch.Tensor
        assert isinstance(got[name], expected), (name, type(got[name]))
        assert torch.equal(dense(got[name]), dense(weight)), name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_format(name: str, ranks: int, written: Written) -> None:
    """Ranks cut blocks of 128 rows: each has 128 of the queries' rows, and 32 of those of the keys."""
    folder, plain = written(name)
    kept = FORMATS[name][2]
    for rank in range(ranks):
        wanted = load(plain, rank, ranks)
        compare(load(folder, rank, ranks, dequantize=True), wanted, torch.Tensor)
        compare(load(folder, rank, ranks), wanted, kept if kept is BlockMatrix else torch.Tensor)
        if kept is Fp8Weight:
            compare(load(folder, rank, ranks, quantization="fp8"), wanted, Fp8Weight)


def logits(folder: Path, **settings: object) -> torch.Tensor:
    plan = Plan.from_chunks(0, [Chunk(0, 0, list(range(4, 24)), 0, [0, 1], 20)])
    config = WorkerConfig.model_validate({"device": "cpu", "dtype": "float32", "kv_tokens": 64, **settings})

    def forward(group: Communicator | None = None) -> torch.Tensor:
        return ModelRunner.load(folder, config, stage=PipelineStage.only(group)).forward(plan).logits

    return forward() if config.tp == 1 else together(config.tp, forward)[0]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed fp8 by row", "awq", "gptq, act order", "packed"])
def test_logits_are_those_of_the_weights(name: str, tp: int, written: Written) -> None:
    folder, plain = written(name)
    torch.testing.assert_close(logits(folder, tp=tp), logits(plain), atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["fp8 in blocks", "compressed fp8 by row"])
def test_logits_in_8_bits(name: str, tp: int, written: Written) -> None:
    """Activations alone are rounded: matrices that are in 8 bits already are not rounded again."""
    folder, plain = written(name)
    wanted, got = logits(plain), logits(folder, tp=tp, quantization="fp8")
    assert 0.005 < (got - wanted).norm() / wanted.norm() < 0.25


@pytest.mark.parametrize("name", ["deepseek_v3_moe", "mixtral", "minimax_m2_moe", "qwen3_next"])
def test_other_families(name: str, tmp_path: Path) -> None:
    """Experts, latent attention and gated delta nets in 8 bits, as they are published."""
    folder, plain = write(tmp_path, name, in_blocks("weight_scale_inv"), BLOCKS, head_dim=16, intermediate_size=80)
    for rank in range(2):
        compare(load(folder, rank, 2), load(plain, rank, 2), torch.Tensor)


def test_weights_with_factors_are_multiplied_out(tmp_path: Path) -> None:
    """Other weights of the model are kept, where no matrix in the same parameter has factors."""
    quantizer, said, _ = FORMATS["packed, 8 bits"]
    folder, plain = write(tmp_path, "falcon_h1", quantizer, said)
    got, wanted = load(folder), load(plain)
    assert got.keys() == wanted.keys()
    assert all(isinstance(got[name], torch.Tensor) for name in got)
    for name, weight in wanted.items():
        torch.testing.assert_close(got[name], weight, msg=name)


@pytest.mark.parametrize("size", [256, 160])
def test_experts_in_8_bits(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. Of experts of 160, a rank's half ends within a group of columns."""
    monkeypatch.setattr(weight_loader, "_EXPERT_DEVICES", ("cpu",))
    monkeypatch.setattr(weight_loader, "_kept_formats", lambda *_: frozenset(("fp8",)))
    folder, plain = write(tmp_path, "mixtral", in_blocks("weight_scale_inv"), BLOCKS, intermediate_size=size)
    for rank in range(2):
        got, wanted = load(folder, rank, 2), load(plain, rank, 2)
        assert isinstance(got["layers.1.experts_gate_up"], Fp8Weight)
        assert isinstance(got["layers.1.experts_down"], Fp8Weight if size == 256 else torch.Tensor)
        assert all(torch.equal(dense(got[name]), dense(weight)) for name, weight in wanted.items())


def test_experts_of_four_bits(tmp_path: Path) -> None:
    """On a CPU experts are multiplied out, and the matrices of attention are kept."""
    folder, plain = write(tmp_path, "mixtral", packed(4, 32, True), compressed("pack-quantized", **INT4))
    got, wanted = load(folder), load(plain)
    assert {name.rpartition(".")[2] for name, weight in got.items() if isinstance(weight, BlockMatrix)} == {
        "qkv",
        "out",
    }
    assert all(torch.equal(dense(got[name]), dense(weight)) for name, weight in wanted.items())


def test_four_bits_take_an_eighth_of_the_memory(written: Written) -> None:
    got, wanted = load(written("packed")[0])["layers.0.down"], load(written("packed")[1])["layers.0.down"]
    assert isinstance(got, BlockMatrix) and isinstance(wanted, torch.Tensor)
    assert got.nbytes < 0.15 * wanted.nbytes


@pytest.mark.parametrize("name", ["awq", "packed"])
def test_ranks_that_would_cut_groups_are_refused(name: str, tmp_path: Path) -> None:
    """A quarter of 448 columns ends within a group of 32."""
    quantizer, said, _ = FORMATS[name]
    folder, plain = write(tmp_path, "llama", quantizer, said, intermediate_size=448)
    with pytest.raises(ValueError, match=r"down_proj.*\btp\b.*dequantize"):
        load(folder, 1, 4)
    compare(load(folder, 1, 4, dequantize=True), load(plain, 1, 4), torch.Tensor)


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_cut_groups_of_8_bits_multiply_them_out(rank: int, tmp_path: Path) -> None:
    """Half of 384 columns ends within a group of 128. The matrix is rounded again, by rows, if that is asked for."""
    quantizer, said, _ = FORMATS["fp8 in blocks"]
    folder, plain = write(tmp_path, "llama", quantizer, said, intermediate_size=384)
    got, wanted = load(folder, rank, 2, quantization="fp8"), load(plain, rank, 2)
    assert torch.equal(dense(got["layers.0.gate_up"]), dense(wanted["layers.0.gate_up"]))
    assert all(map(torch.equal, got["layers.0.down"], quantize(dense(wanted["layers.0.down"]))))


def test_modules_that_are_not_quantized(written: Written, tmp_path: Path) -> None:
    """One of the three matrices of a product in floating point: the product is so, too."""
    for name in ("fp8 in blocks", "awq"):
        folder, plain = written(name)
        stored, numbers = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
        module = "model.layers.0.self_attn.k_proj"
        stored = {key: value for key, value in stored.items() if not key.startswith(module) or key.endswith(".bias")}
        stored[f"{module}.weight"] = numbers[f"{module}.weight"]
        save_file(stored, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        got, wanted = load(tmp_path, dequantize=name != "awq"), load(plain)
        assert isinstance(got["layers.0.qkv"], torch.Tensor)
        assert all(torch.equal(dense(got[key]), dense(weight)) for key, weight in wanted.items())


# ---------------------------------------------------------------- files by hand


def read(folder: Path, tensors: dict[str, torch.Tensor], said: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The numbers of a checkpoint with these tensors."""
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    found = model_tensors(folder, decoder_config(read_config(folder)), CPU, torch.float32)
    return {tensor.name: tensor.read(0, range(tensor.shape[0])) for tensor in found}


def word(text: str) -> int:
    """Eight hexadecimal digits, as int32."""
    number = int(text, 16)
    return number if number < 1 << 31 else number - (1 << 32)


def test_the_order_of_awq(tmp_path: Path) -> None:
    """Outputs 0 to 7 of input 0 have the integers 0 to 7; zeros are 1."""
    tensors = {
        "a.qweight": torch.tensor([[word("75316420")]], dtype=torch.int32),
        "a.qzeros": torch.tensor([[word("11111111")]], dtype=torch.int32),
        "a.scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    got = read(tmp_path, tensors, AWQ | {"group_size": -1})
    assert got["a.weight"][:, 0].tolist() == [-0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


@pytest.mark.parametrize(("layout", "zeros"), [("gptq", "ffeeeef0"), ("gptq_v2", "11000001")])
def test_the_words_of_gptq(layout: str, zeros: str, tmp_path: Path) -> None:
    """Inputs 0 to 7 of each output have the integers 0 to 7. Zeros are 1 for outputs 0, 6 and 7, and 0 for the others,
    from which a writer has taken one."""
    tensors = {
        "a.qweight": torch.full((1, 8), word("76543210"), dtype=torch.int32),
        "a.qzeros": torch.tensor([[word(zeros)]], dtype=torch.int32),
        "a.scales": torch.full((1, 8), 2.0, dtype=torch.float16),
        "a.g_idx": torch.zeros(8, dtype=torch.int32),
        "a.bias": torch.zeros(8, dtype=torch.float16),
        "b.bias": torch.zeros(8),
    }
    got = read(tmp_path, tensors, GPTQ | {"checkpoint_format": layout})
    assert got.keys() == {"a.weight", "b.bias"}  # a bias of zeros belongs to the format
    own = torch.arange(8) - torch.tensor([[1, 0, 0, 0, 0, 0, 1, 1]]).t()
    assert torch.equal(got["a.weight"], 2.0 * own)
    tensors["a.bias"] += 1
    assert read(tmp_path, tensors, GPTQ | {"checkpoint_format": layout}).keys() == {"a.weight", "a.bias", "b.bias"}


def test_modelopt(tmp_path: Path) -> None:
    """Numbers and scales of 4 bits by hand; scales of blocks; what is left out; a part that cuts groups."""
    packed = torch.tensor([[0x21, 0xF7, *[0] * 14], [0x80, 0x0A, *[1] * 14]], dtype=torch.uint8)
    scales = torch.tensor([[2.0, 1.0], [0.5, 4.0]]).to(torch.float8_e4m3fn)
    tensors = {"a.weight": packed, "a.weight_scale": scales, "a.weight_scale_2": torch.tensor([0.25])}
    tensors |= {"b.weight": E4M3, "b.weight_scale": torch.full((1, 1, 1, 1), 3.0), "b.k_scale": torch.ones(1)}
    got = read(tmp_path, tensors, MODELOPT | {"quant_algo": "FP8_PB_WO"})
    first, second = torch.tensor([0.5, 1.0, 6.0, -6.0]) * 0.5, torch.tensor([0.0, -0.0, -1.0, 0.0]) * 0.125
    assert got.keys() == {"a.weight", "b.weight"}
    assert torch.equal(got["a.weight"][:, :4], torch.stack((first, second)))
    assert got["a.weight"][1, 16:].tolist() == [0.5, 0.0] * 8 and torch.equal(got["b.weight"], torch.full((8, 8), 3.0))
    a, _ = model_tensors(tmp_path, decoder_config(read_config(tmp_path)), CPU, torch.float32)
    assert torch.equal(a.read(1, range(3, 29)), got["a.weight"][:, 3:29])


def test_the_format_of_modelopt_in_a_file_of_its_own(written: Written, tmp_path: Path) -> None:
    folder, plain = written("modelopt nvfp4")
    config = json.loads((folder / "config.json").read_text())
    assert config.pop("quantization_config") == MODELOPT
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    got, wanted = load(tmp_path), load(plain)
    assert all(torch.equal(dense(got[key]), dense(weight)) for key, weight in wanted.items())
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": []}')
    with pytest.raises(ValueError, match=r"hf_quant_config\.json"):
        read_config(tmp_path)


E4M3 = torch.ones(8, 8).to(torch.float8_e4m3fn)
BYTES = torch.ones(8, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("tensors", "said", "complaint"),
    [
        ({"a.weight": E4M3}, BLOCKS, r"a\.weight\b.*a\.weight_scale"),
        (
            {"a.weight": E4M3, "a.weight_scale": torch.ones(3)},
            FP8,
            r"weight_scale .*\(3,\).*a\.weight",
        ),
        ({"a.weight": E4M3, "a.weight_scale_inv": torch.ones(2, 1)}, BLOCKS, r"\(2, 1\).*128 by 128"),
        ({"a.weight": torch.ones(8, 8).to(torch.float8_e5m2), "a.weight_scale": torch.ones(1)}, FP8, "F8_E5M2"),
        ({"a.qweight": torch.ones(1, 8).int(), "a.scales": torch.ones(1, 8)}, GPTQ, r"a\.qweight, and no a\.qzeros"),
        (
            {"a.qweight": torch.ones(8, 1).int(), "a.qzeros": torch.ones(1, 1).int()},
            AWQ,
            r"a\.qweight, and no a\.scales",
        ),
        (
            {"a.qweight": torch.ones(1, 8).int(), "a.qzeros": torch.ones(2, 1).int(), "a.scales": torch.ones(2, 8)},
            GPTQ,
            r"a\.scales .*\b2 groups: a\.weight .*\b64\b.*\b1$",
        ),
        ({"a.weight": BYTES}, MODELOPT, r"a quantized a, and no a\.weight_scale"),
        ({"a.weight": BYTES, "a.weight_scale": torch.ones(8, 1), "a.weight_scale_2": torch.ones(1)}, MODELOPT, "NVFP4"),
        ({"a.weight": torch.ones(8, 8), "a.pre_quant_scale": torch.ones(8)}, MODELOPT, r"a\.pre_quant_scale.*\(AWQ\)"),
        (
            {"a.weight_packed": torch.ones(8, 1).int(), "a.weight_scale": torch.ones(8, 1)},
            compressed("pack-quantized", **INT4),
            r"a quantized a, and no a\.weight_shape",
        ),
    ],
)
def test_files_that_lack_something(
    tensors: dict[str, torch.Tensor], said: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=complaint):
        read(tmp_path, tensors, said)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        (MODELOPT | {"quant_algo": "W4A16_AWQ"}, "modelopt, W4A16_AWQ"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (FP8 | {"fmt": "e5m2"}, "fp8, e5m2"),
        (AWQ | {"version": "gemv"}, "awq, 4 bits, gemv"),
        (GPTQ | {"bits": 3}, "gptq, 3 bits, gptq"),
        (GPTQ | {"is_marlin_format": True}, "gptq, 4 bits, marlin"),
        (
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group"),
            "compressed-tensors, mxfp4-pack-quantized, float of 4 bits, group",
        ),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors, marlin-24"),
        (
            compressed("float-quantized", strategy="channel", **FLOAT8) | {"sparsity_config": {"format": "sparse-24"}},
            "compressed-tensors, sparse-24",
        ),
        (
            compressed("pack-quantized", **INT4) | {"transform_config": {"config_groups": {"R1": {}}}},
            r"compressed-tensors, .*\(transform_config\)",
        ),
    ],
)
def test_a_format_that_is_not_understood_is_refused_by_name(said: dict[str, Any], name: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=rf"\({name}\).*: .* awq \(4 bits, gemm\)"):
        decoder_config(read_config(tmp_path))


def test_the_format_of_a_model_with_a_vision_part(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"}, "quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).quantization_config["weight_block_size"] == [128, 128]
