"""Weights in the decoder's own parameters: whole, cut over ranks, random."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kernels.linear import any_linear
from kernels.linear.fp8_linear import Fp8Weight, quantize
from kernels.linear.linear import Linear
from tests.worker.checkpoint.rank_weights import CPU, load
from tests.worker.conftest import COMMON, together
from worker.checkpoint import safetensors_files
from worker.config import WorkerConfig
from worker.executor import weight_loader
from worker.executor.gpu_defaults import resolve_device
from worker.executor.model_runner import ModelRunner
from worker.executor.weight_loader import load_weights
from worker.models.config import decoder_config, read_config
from worker.models.parameters import parameter_shapes
from worker.models.sharding import Shard
from worker.parallel.communicator import Communicator
from worker.parallel.pipeline_stage import PipelineStage
from worker.step import Chunk, Plan

pytestmark = pytest.mark.slow

NAMES = ["llama_biased_tied", "llama_one_kv_head", "qwen3", "gemma3", "phi3", "qwen2_moe", "granitemoe", "gpt_oss"]
NAMES += ["starcoder2"]


def padded(part: torch.Tensor, rows: int, dim: int = 0) -> torch.Tensor:
    """The part with zeros after it."""
    missing = list(part.shape)
    missing[dim] = rows - missing[dim]
    return torch.cat((part, torch.zeros(missing)), dim)


def expected(whole: dict[str, torch.Tensor], shard: Shard) -> dict[str, torch.Tensor]:
    """A rank's parameters, cut out of the whole model's."""
    config, own = shard.whole, shard.config
    size, parts_of_first = config.head_dim, 2 if config.gated_mlps else 1

    def rows(part: range, unit: int = 1) -> slice:
        return slice(part.start * unit, part.stop * unit)

    def stacked(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.split([config.num_heads * size, config.num_kv_heads * size, config.num_kv_heads * size])
        kv_rows = own.num_kv_heads * size
        parts = [padded(x[rows(shard.kv_heads, size)], kv_rows) for x in (k, v)]
        return torch.cat([padded(q[rows(shard.heads, size)], own.num_heads * size), *parts])

    def gated(x: torch.Tensor) -> torch.Tensor:
        kept, size = inner(x.shape[0] // parts_of_first)
        return torch.cat([padded(part[rows(kept)], size) for part in x.chunk(parts_of_first)])

    def inner(size: int) -> tuple[range, int]:
        """The rank's part of an MLP's intermediate state, or of the shared experts'."""
        if size == config.intermediate_size or own.experts is None:
            return shard.intermediate, own.intermediate_size
        return shard.shared_intermediate, own.experts.shared_size

    def experts_gated(x: torch.Tensor) -> torch.Tensor:
        assert own.experts is not None
        rows_kept = rows(shard.expert_intermediate)
        parts = [padded(part[:, rows_kept], own.experts.intermediate_size, 1) for part in x.chunk(parts_of_first, 1)]
        return torch.cat(parts, 1)

    def experts_down(x: torch.Tensor) -> torch.Tensor:
        assert own.experts is not None
        return padded(x[:, :, rows(shard.expert_intermediate)], own.experts.intermediate_size, 2)

    cut: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "qkv": stacked,
        "gate_up": gated,
        "out": lambda x: padded(x[:, rows(shard.heads, size)], own.num_heads * size, 1),
        "down": lambda x: padded(x[:, rows(inner(x.shape[1])[0])], inner(x.shape[1])[1], 1),
        "embedding": lambda x: padded(x[rows(shard.vocabulary)], own.vocab_rows),
        "out_bias": lambda x: x if shard.rank == 0 else torch.zeros_like(x),
    }
    cut |= {"experts_gate_up": experts_gated, "experts_down": experts_down}
    cut |= {"experts_gate_up_bias": experts_gated, "experts_down_bias": cut["out_bias"]}
    cut["sinks"] = lambda x: padded(x[rows(shard.heads)], own.num_heads)
    cut |= {"qkv_bias": stacked, "gate_up_bias": gated, "head": cut["embedding"], "down_bias": cut["out_bias"]}
    return {name: cut.get(name.split(".")[-1], torch.clone)(x) for name, x in whole.items()}


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_has_its_part(name: str, size: int, load_format: str, tiny_model: Callable[[str], Path]) -> None:
    whole = load(tiny_model(name), load_format=load_format)
    for rank in range(size):
        shard = Shard(decoder_config(read_config(tiny_model(name))), rank, size)
        got, wanted = load(tiny_model(name), rank, size, load_format), expected(whole, shard)
        assert {key: tuple(x.shape) for key, x in got.items()} == parameter_shapes(shard.config)
        for key in wanted:
            assert torch.equal(got[key], wanted[key]), key


def test_a_rank_reads_its_part_only(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, ...]] = []
    real = safetensors_files.cut
    monkeypatch.setattr(safetensors_files, "cut", lambda *args: read.append(tuple((x := real(*args)).shape)) or x)
    load(tiny_model("llama"), 1, 2)
    numbers = sum(torch.Size(shape).numel() for shape in read)
    whole = sum(x.numel() for x in load_file(tiny_model("llama") / "model.safetensors").values())
    assert numbers < 0.55 * whole


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder with a configuration and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(COMMON | {"model_type": "llama"}))
    return tmp_path


@pytest.mark.parametrize("in_parts", [False, True])
def test_the_layers_alone(tiny_model: Callable[[str], Path], tmp_path: Path, in_parts: bool) -> None:
    """As embedding models are stored. The embedding is in the place of the head that is not there."""
    whole = tiny_model("qwen3")
    config = (whole / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    tensors = load_file(whole / "model.safetensors")
    del tensors["lm_head.weight"]
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    if in_parts:
        names = sorted(tensors)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, some in parts.items():
            save_file({name: tensors[name] for name in some}, tmp_path / file, {"format": "pt"})
        index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not json.loads(config)["tie_word_embeddings"] and decoder_config(read_config(tmp_path)).tied_embeddings
    found, wanted = load(tmp_path), load(whole)
    del wanted["head"]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


STACKED = ["mixtral", "qwen2_moe", "qwen3_moe", "granitemoeshared", "glm4_moe", "ernie4_5_moe", "nemotron_h_moe"]


@pytest.mark.parametrize("name", STACKED)
def test_experts_as_one_tensor_and_each_by_itself(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As transformers has them in memory, and as they are published."""
    folder = tiny_model(name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.save_pretrained(tmp_path, save_original_format=False)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert any(tensor.endswith((".experts.gate_up_proj", ".experts.up_proj")) for tensor in names)
    if name != "granitemoeshared":  # published as one
        assert any("experts.3." in tensor for tensor in load_file(folder / "model.safetensors"))
    for rank in range(2):
        got, wanted = load(tmp_path, rank, 2), load(folder, rank, 2)
        assert got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_names_of_nemotron_h(prefix: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """As published, with layers for drafts, and as transformers has them in memory."""
    folder = tiny_model("nemotron_h")
    tensors = load_file(folder / "model.safetensors")
    renamed = {re.sub(r"^\w+\.(?=layers|embeddings|norm_f)", prefix, name): x for name, x in tensors.items()}
    assert {f"{prefix}{name}" for name in ("embeddings.weight", "norm_f.weight", "layers.0.mixer.A_log")} < set(renamed)
    save_file(renamed | {"mtp.layers.0.norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    got, wanted = load(tmp_path), load(folder)
    assert got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)


@pytest.mark.parametrize(
    ("name", "first", "mask"),
    [
        ("gpt2", (r"^transformer\.", ""), "h.0.attn.bias"),
        ("gpt_neox", (r"^embed_out\.", "lm_head."), "gpt_neox.layers.0.attention.masked_bias"),
    ],
)
def test_names_and_masks_of_old_checkpoints(
    name: str, first: tuple[str, str], mask: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_model(name)
    tensors = load_file(folder / "model.safetensors")
    renamed = {re.sub(*first, tensor): x for tensor, x in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed | {mask: torch.ones(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    got, wanted = load(tmp_path), load(folder)
    assert got.keys() == wanted.keys() and all(torch.equal(got[key], wanted[key]) for key in wanted)


def test_layers_after_the_last_are_left_out(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A checkpoint of GLM has a layer that predicts one more token."""
    folder = tiny_model("glm4_moe")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert load(tmp_path).keys() == load(folder).keys()
    tensors["model.layers.5.eh_proj.weight"] = tensors.pop("model.layers.4.eh_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r": model\.layers\.5\.eh_proj"):
        load(tmp_path)


def test_what_is_not_supported_with_experts_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=r"quantization fp8 .*experts"):
        in_8_bits(tiny_model("mixtral"))


def test_random_weights_need_a_configuration_only(bare: Path) -> None:
    def logits(group: Communicator | None = None, **config: object) -> torch.Tensor:
        settings = {"device": "cpu", "dtype": "float32", "kv_tokens": 128, "load_format": "dummy", **config}
        runner = ModelRunner.load(bare, WorkerConfig.model_validate(settings), stage=PipelineStage.only(group))
        return runner.forward(Plan.from_chunks(0, [Chunk(0, 0, list(range(40, 80)), 0, [2, 0, 5], 40)])).logits

    alone = logits()
    assert alone.isfinite().all() and 0.3 < alone.std() < 3
    assert alone.argmax(1).unique().numel() > 10
    assert torch.equal(alone, logits())
    for parts in together(3, lambda group: logits(group, tp=3)):
        torch.testing.assert_close(parts, alone, atol=1e-4, rtol=1e-4)


def test_random_tensors_differ(bare: Path) -> None:
    parameters = load(bare, load_format="dummy")
    assert parameters["norm"].unique().tolist() == [1.0]
    q, k = parameters["layers.0.qkv"][:24], parameters["layers.0.qkv"][48:72]
    assert not torch.equal(q, k) and not torch.equal(parameters["layers.0.qkv"], parameters["layers.1.qkv"])


_MLP = "model.layers.1.mlp"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
            r"\b1 of 39 tensors: model\.layers\.1\.mlp\.up",
        ),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "llama .*: extra"),
        (  # names of other families
            lambda tensors: tensors.update(
                {"model.layers.1.mlp.w3.weight": tensors.pop("model.layers.1.mlp.up_proj.weight")}
            ),
            r"llama .*: model\.layers\.1\.mlp\.w3",
        ),
        (lambda tensors: tensors.update({"visual.norm.weight": torch.ones(1)}), r"llama .*: visual\.norm"),
        (
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(5)}),
            r"model\.norm\.weight .*\(5,\).*\(48,\)",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    change: Callable[[dict], object], complaint: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(tiny_model("llama") / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path)


def test_progress_counts_to_the_end(tiny_model: Callable[[str], Path]) -> None:
    seen: list[tuple[int, int]] = []
    shard = Shard(decoder_config(read_config(tiny_model("llama"))), 1, 2)
    load_weights(tiny_model("llama"), shard, CPU, torch.float32, "auto", lambda *now: seen.append(now))
    assert [done for done, _ in seen] == list(range(1, 40)) and {total for _, total in seen} == {39}


def test_half_a_file(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    whole = (tiny_model("llama") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "config.json").write_text((tiny_model("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
        load(tmp_path)


# ---------------------------------------------------------------- in 8 bits


def in_8_bits(folder: Path, rank: int = 0, size: int = 1) -> weight_loader.Parameters:
    shard = Shard(decoder_config(read_config(folder)), rank, size)
    return load_weights(folder, shard, CPU, torch.float32, "auto", quantization="fp8")


@pytest.mark.parametrize(("name", "size"), [("llama_biased_tied", 1), ("llama_biased_tied", 2), ("starcoder2", 2)])
def test_matrices_of_layers_are_rounded(name: str, size: int, tiny_model: Callable[[str], Path]) -> None:
    for rank in range(size):
        whole, got = load(tiny_model(name), rank, size), in_8_bits(tiny_model(name), rank, size)
        assert got.keys() == whole.keys()
        for parameter, value in got.items():
            if parameter.rpartition(".")[2] in ("qkv", "out", "gate_up", "down"):
                assert isinstance(value, Fp8Weight)
                assert all(map(torch.equal, value, quantize(whole[parameter])))
            else:
                assert isinstance(value, torch.Tensor) and torch.equal(value, whole[parameter])


def test_one_layer_at_a_time_is_there_twice(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []

    def count(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        waiting.append(progress[-1])
        return quantize(x)

    progress = [0]
    monkeypatch.setattr(weight_loader, "quantize", count)
    shard = Shard(decoder_config(read_config(tiny_model("llama"))))
    load_weights(tiny_model("llama"), shard, CPU, torch.float32, "auto", lambda done, _: progress.append(done), "fp8")
    assert len(waiting) == 4 * 4
    assert all(done < 9 * (i // 4 + 1) + 2 for i, done in enumerate(waiting))  # a layer has nine tensors


@pytest.mark.parametrize("name", ["llama_biased_tied", "gemma3"])
def test_a_model_in_8_bits(name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.from_chunks(0, [Chunk(0, 0, list(range(4, 24)), 0, [0, 1], 20)])

    def logits(**settings: object) -> torch.Tensor:
        own = {"device": "cpu", "dtype": "float32", "kv_tokens": 64, "window_kv_tokens": 0, **settings}
        config = WorkerConfig.model_validate(own)
        if config.tp == 1:
            return ModelRunner.load(tiny_model(name), config).forward(plan).logits

        def forward(group: Communicator) -> torch.Tensor:
            return ModelRunner.load(tiny_model(name), config, stage=PipelineStage.only(group)).forward(plan).logits

        return together(config.tp, forward)[0]

    class Rounded(Linear):
        """A layer's product in float32, with both sides rounded as they come to it."""

        def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
            super().__init__(rounded(weight), bias)

        def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            return super().__call__(rounded(x), out)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize(x)
        return values.float() * scales

    exact, got, parallel = logits(), logits(quantization="fp8"), logits(quantization="fp8", tp=2)
    monkeypatch.setattr(any_linear, "Linear", Rounded)
    wanted = logits()
    # Little differences move some elements to the next of the few values that there are.
    assert (got - wanted).norm() < 0.03 * wanted.norm()
    # Ranks have scales of their own.
    assert all(0.005 < (one - exact).norm() / exact.norm() < 0.4 for one in (got, parallel))


def test_gpus_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ValueError, match=r"\b8\.9\b.*\b8\.0\b"):
        resolve_device(WorkerConfig(quantization="fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve_device(WorkerConfig(quantization="fp8"))[1] == torch.bfloat16
    with pytest.raises(ValueError, match="dtype to bfloat16"):
        resolve_device(WorkerConfig(quantization="fp8", dtype="float32"))
