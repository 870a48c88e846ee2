"""Every architecture against transformers: the same logits, the same tokens, however the work is cut."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoConfig,
    BambaConfig,
    BloomConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    LlamaConfig,
    NemotronHConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.worker.conftest import COMMON, DELTA_NETS, TEXT_PARTS, TINY, Sequences
from tests.worker.references import Answer, answers, assert_same, batch, settings
from worker.config import WorkerConfig
from worker.executor.model_runner import ModelRunner
from worker.models.config import decoder_config, read_config
from worker.models.families import FAMILIES
from worker.step import Chunk, Plan

AS_LLAMA = ("internlm3", "iquestcoder")


def prompts(lengths: tuple[int, ...], vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(4, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("chunk", "page_size"), [pytest.param(1, 1, marks=pytest.mark.slow), (7, 16), (64, 4)])
@pytest.mark.slow
def test_same_as_transformers(name: str, chunk: int, page_size: int, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model(name)
    sequences = Sequences(ModelRunner.load(folder, settings(page_size=page_size)))
    # Token by token, no prompt much longer than windows and chunks of attention.
    chosen = (0, 1, 2, 3) if chunk > 1 else (0, 1, 2)
    wanted = [answers(folder)[i] for i in chosen]
    slots = (5, 0, 63, 2)[: len(chosen)]
    for slot, i in zip(slots, chosen, strict=True):
        # Each joins while the earlier ones decode or are in the middle of their prompts.
        sequences.add(slot, batch()[i])
        sequences.advance(dict.fromkeys(reversed(sequences.tokens), chunk))
    ends = {slot: len(answer.tokens) for slot, answer in zip(slots, wanted, strict=True)}
    while unfinished := [s for s in slots if len(sequences.tokens[s]) < ends[s]]:
        sequences.advance(dict.fromkeys(unfinished, chunk))
    got = [Answer(sequences.tokens[s][: ends[s]], torch.cat(sequences.logits[s])[: ends[s] - 1]) for s in slots]
    assert_same(got, wanted, 1e-3 if name in DELTA_NETS else 1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4"])
def test_logits_do_not_depend_on_how_many_are_wanted(name: str, tiny_model: Callable[[str], Path]) -> None:
    """The last layer computes what is wanted only, but all keys and values, which the second step reads."""
    runner = ModelRunner.load(
        tiny_model(name), WorkerConfig(device="cpu", dtype="float32", kv_tokens=1024, page_size=4, window_kv_tokens=0)
    )
    batch, cuts = prompts((40, 9, 30, 21), runner.vocab_size), (20, 1, 29, 20)
    pages = iter(range(runner.num_pages))

    def last_logits(first: list[int], second: list[int]) -> list[torch.Tensor]:
        """Two steps with so many logits of each chunk; of these the last, where there is one."""
        firsts, seconds = [], []
        for slot, (prompt, cut, *counts) in enumerate(zip(batch, cuts, first, second, strict=True)):
            own = [next(pages) for _ in range(10)]
            firsts.append(Chunk(slot, 0, prompt[:cut], 0, own, counts[0]))
            seconds.append(Chunk(slot, cut, prompt[cut:], 10, [], counts[1]))
        rows = [
            *runner.forward(Plan.from_chunks(0, firsts)).logits.split(first),
            *runner.forward(Plan.from_chunks(1, seconds)).logits.split(second),
        ]
        return [part[-1:] for part in rows]

    every = last_logits(list(cuts), [20, 8, 1, 1])
    for some in (last_logits([0, 1, 3, 1], [1, 1, 1, 1]), last_logits([0, 0, 0, 0], [2, 0, 1, 0])):
        for got, wanted in zip(some, every, strict=True):
            torch.testing.assert_close(got, wanted[: len(got)], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4", "nemotron_h"])
def test_what_follows_the_last_attention_is_computed_for_all_numbers_of_rows(
    name: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(device="cpu", dtype="float32", kv_tokens=1024, page_size=4, window_kv_tokens=0)
    decoder = ModelRunner.load(tiny_model(name), config).decoder
    shapes: list[tuple[int, ...]] = []
    logits = decoder.logits
    monkeypatch.setattr(decoder, "logits", lambda x: shapes.append(tuple(logits(x).shape)))
    decoder.warm_up(27)
    assert shapes == [(rows, decoder.config.vocab_size) for rows in (8, 16, 24)]


def test_every_architecture_is_tested() -> None:
    tested = {model_type for model_type, _ in (*TINY.values(), *TEXT_PARTS.values())}
    assert tested | set(AS_LLAMA) == set(FAMILIES)


@pytest.mark.parametrize("model_type", AS_LLAMA)
def test_families_that_are_llamas(model_type: str) -> None:
    """`transformers` computes them by Llama's class too."""
    same = {"rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 6.0}}
    own, llama = (
        decoder_config(AutoConfig.for_model(name, **COMMON, **same, attention_bias=True, mlp_bias=True))
        for name in (model_type, "llama")
    )
    assert replace(own, model_type="llama") == llama
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["llama"]


def test_other_architecture_lists_what_is_supported() -> None:
    with pytest.raises(ValueError, match=r"'bloom' .*: .*\bllama\b"):
        decoder_config(BloomConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "a part of"),
        (
            {
                "rope_parameters": {
                    "rope_type": "axial",
                    "rope_theta": 1e4,
                }
            },
            "rope type 'axial' .*: default",
        ),
    ],
)
def test_unsupported_variants(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_config(LlamaConfig(**changes))


def test_a_kind_of_layers_without_a_rotation(tiny_model: Callable[[str], Path]) -> None:
    config = AutoConfig.from_pretrained(tiny_model("laguna_moe"))
    del config.rope_parameters["sliding_attention"]
    with pytest.raises(ValueError, match=r"rope_theta .*sliding_attention"):
        decoder_config(config)


@pytest.mark.parametrize(
    "changes", [{"mamba_proj_bias": True}, {"time_step_limit": (0.0, 0.1)}, {"hidden_act": "gelu"}]
)
def test_unsupported_variants_of_mamba2(changes: dict) -> None:
    with pytest.raises(ValueError, match=r"bamba .*\b(mamba_proj_bias|time_step_limit|activation)\b"):
        decoder_config(BambaConfig(**changes))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm False"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type 'per_head'"),
        ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size 8"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "linear attention"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm True"),
        ("hy_v3", {"route_norm": False}, "route_norm False"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla True"),
        (
            "hunyuan_v1_dense",
            {
                "head_dim": 16,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
            "rope_type 'yarn'",
        ),
        ("hunyuan_v1_moe", {"num_shared_expert": [2, 2]}, r"num_shared_expert \[2, 2\]"),
        ("afmoe", {"score_func": "softmax"}, "score_func 'softmax'"),
        ("afmoe", {"n_group": 2}, "n_group 2"),
        ("hyperclovax", {"residual_multiplier": 0.5}, "residual_multiplier 0.5"),
        ("flex_olmo", {"clip_qkv": 8.0}, "clip_qkv"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm True"),
        ("stablelm", {"qk_layernorm": True}, "qk_layernorm True"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm True"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block False"),
        ("laguna", {"gating": "other"}, "gating 'other'"),
        ("laguna", {"num_attention_heads_per_layer": [8, *[4] * 39]}, "layers of one kind"),
        ("falcon_h1", {"mamba_rms_norm": True}, "mamba_rms_norm True"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias True"),
    ],
)
def test_fields_that_would_be_computed_wrongly(model_type: str, changes: dict, message: str) -> None:
    """Most of them `transformers` ignores."""
    config = AutoConfig.for_model(model_type, **changes)
    with pytest.raises(ValueError, match=f"{model_type} .*{message}"):
        decoder_config(config)


@pytest.mark.parametrize("model_type", ["solar_open", "qwen3_5_moe_text"])
def test_models_whose_layers_all_have_experts_need_no_size_of_an_mlp(model_type: str) -> None:
    hf = AutoConfig.for_model(model_type)
    assert not hasattr(hf, "intermediate_size")
    assert decoder_config(hf).intermediate_size == hf.moe_intermediate_size


def test_what_a_published_configuration_says_of_minimax_m2() -> None:
    said = {"use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "attn_type_list": [1] * 62}
    config = decoder_config(AutoConfig.for_model("minimax_m2", rotary_dim=64, shared_intermediate_size=0, **said))
    assert (config.head_dim, config.ropes[0].rotated) == (128, 64)


def test_a_text_part_without_a_configuration_of_its_own(tmp_path: Path) -> None:
    """Qwen2.5-VL was published with the fields of its text part beside `vision_config`."""
    rope = {"rope_theta": 1e5, "rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
    said = COMMON | rope | {"model_type": "qwen2_5_vl", "eos_token_id": 5, "vision_config": {"hidden_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    hf = read_config(tmp_path)
    config = decoder_config(hf)
    assert (hf.eos_token_id, config.num_layers, config.tied_embeddings) == (5, 4, False)
    assert (config.ropes[0].kind, config.ropes[0].theta) == ("default", 1e5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias"),
        ({"time_step_limit": (0.001, float("inf"))}, "time_step_limit"),
        ({"mamba_hidden_act": "gelu"}, "activation 'gelu'"),
        ({"mlp_hidden_act": "silu"}, "activation 'silu' of MLPs without a gate"),
        ({"use_bias": True}, "use_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"hybrid_override_pattern": "ME*-", "mlp_bias": True}, "experts and mlp_bias"),
    ],
)
def test_unsupported_variants_of_nemotron_h(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_config(NemotronHConfig(**({"hybrid_override_pattern": "M-*-"} | changes)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Lfm2Config(conv_L_cache=1, full_attn_idxs=[2]), "lfm2 .*conv_L_cache 1"),
        (Lfm2MoeConfig(), "lfm2_moe .*layer_types"),
    ],
)
def test_unsupported_variants_of_short_convolutions(config: Lfm2Config | Lfm2MoeConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_config(config)


def test_a_published_configuration_of_lfm2() -> None:
    """LFM2-1.2B's, with the names of its first version."""
    own = {"block_ff_dim": 12288, "tie_embedding": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "rope_theta": 1e6}
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
    config = decoder_config(Lfm2Config(**sizes, **own))
    assert config.intermediate_size == 8192
    assert config.tied_embeddings
    assert config.attention_layers == [2, 5, 8, 10, 12, 14]
    assert config.recurrent is not None
    assert config.recurrent.states.row_bytes(torch.bfloat16) == 2048 * 2 * 2


def test_the_longest_context_chooses_the_factors_of_longrope(tiny_model: Callable[[str], Path]) -> None:
    whole = decoder_config(read_config(tiny_model("phi3_longrope")))
    scaling = whole.ropes[0].scaling
    plain = 1e4 ** -(torch.arange(3) / 3)
    for length, factors in ((1, "short_factor"), (2, "long_factor")):
        rope = whole.up_to(length).ropes[0]
        torch.testing.assert_close(rope.frequencies()[:3], plain / torch.tensor(scaling[factors]))
        cos, _ = rope.angles(torch.tensor([0]), torch.float32)
        assert cos[0, 0, :6].tolist() == pytest.approx([1.2] * 3 + [1.0] * 3), "pairs that are not rotated stay"
    mscales = decoder_config(read_config(tiny_model("phimoe")))
    assert [mscales.up_to(length).ropes[0].amplitude for length in (256, 257)] == [1.2, 1.3]


@pytest.mark.parametrize("name", TINY)
def test_a_configuration_is_kept_without_transformers(
    name: str, tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    folder, own = tiny_model(name), AutoConfig.from_pretrained(tiny_model(name))
    first = read_config(folder)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda folder: pytest.fail("it was read again"))
    for hf in (first, read_config(folder)):
        assert decoder_config(hf) == decoder_config(own)
        assert hf.eos_token_id == own.eos_token_id
    monkeypatch.undo()
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    (kept,) = (tmp_path / "cache" / "configs").iterdir()
    for damaged in ("{", "[]"):
        kept.write_text(damaged)
        assert decoder_config(read_config(folder)) == decoder_config(own)
    changed = tmp_path / "changed"
    changed.mkdir()
    content = json.loads((folder / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(content | {"vocab_size": own.vocab_size + 8}))
    assert read_config(changed).vocab_size == own.vocab_size + 8


def test_a_configuration_that_cannot_be_kept(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "file"))
    assert read_config(tiny_model("llama")).model_type == "llama"


def test_a_configuration_that_contradicts_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 48, "num_attention_heads": 9}')
    with pytest.raises(ValueError, match=r"model configuration: (.|\n)*\b48\b(.|\n)*\b9\b"):
        read_config(tmp_path)


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model configuration"):
        read_config(tmp_path)
