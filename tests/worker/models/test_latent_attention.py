"""Models with latent attention: what is refused, what a token takes, the way of GPUs, and drafts."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bench.replica import dummy_models
from pipeline.roofline import MODELS
from tests.worker.conftest import TINY, without_grammars
from tests.worker.drafting import Passes
from tests.worker.engines import checked_engines
from tests.worker.references import prompts
from worker.config import WorkerConfig
from worker.drafts.model import ModelDrafter
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components
from worker.executor.draft_model import DraftModel
from worker.executor.kv_pools import allocate
from worker.executor.memory_budget import token_bytes
from worker.executor.model_runner import ModelRunner
from worker.messages import SamplingParams
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.latent_attention import LatentAttention
from worker.models.layer_specs import roofline_model


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> DecoderConfig:
    """DeepSeek-V2-Lite's."""
    folder = dummy_models.write("deepseek-v2-lite", tmp_path_factory.mktemp("lite"))
    return decoder_config(read_config(folder))


def test_a_token_takes_a_latent_and_a_key_in_each_layer(lite: DecoderConfig) -> None:
    assert token_bytes(lite, torch.bfloat16) == 27 * (512 + 64) * 2
    small = allocate(lite.attention_shape, 3, 16, torch.device("cpu"), torch.bfloat16)
    assert small.numel() * small.itemsize == 3 * 16 * token_bytes(lite, torch.bfloat16)


def test_costs_count_the_layers_as_they_are(lite: DecoderConfig) -> None:
    assert roofline_model("deepseek-v2-lite", lite) == MODELS["deepseek-v2-lite"]


def test_yarn_multiplies_scores(lite: DecoderConfig) -> None:
    """By 1 + 0.1 * 0.707 * ln 40, squared, as in the model's own code."""
    assert lite.attention_scale == pytest.approx(192**-0.5 * 1.2608037774**2)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v2_moe", {"norm_topk_prob": True}, "deepseek_v2 .*norm_topk_prob"),
        ("deepseek_v2_moe", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
        ("deepseek_v3_moe", {"attention_bias": True}, "deepseek_v3 .*attention_bias"),
        ("youtu", {"v_head_dim": 21}, "youtu .*values"),
    ],
)
def test_variants_that_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    model_type, own = TINY[name]
    hf = AutoConfig.for_model(model_type, **(own | changes))
    with pytest.raises(ValueError, match=message):
        decoder_config(hf)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3_moe", "youtu"])
def test_the_kernel_of_gpus_stores_and_rotates_as_the_operators_do(
    name: str, tiny_model: Callable[[str], Path]
) -> None:
    pytest.importorskip("triton")
    runner = ModelRunner.load(tiny_model(name), WorkerConfig(device="cpu", dtype="float32", kv_tokens=64, page_size=4))
    runner.decoder.build_rope_tables(64)
    attention = runner.decoder.layers[1].attention
    assert isinstance(attention, LatentAttention)
    config, positions = runner.model_config, torch.tensor([0, 17, 3])
    qkv = torch.randn(3, config.qkv_size)
    queries, rows = attention._rotate(qkv, *attention.rope.angles(positions, torch.float32))
    slots = SimpleNamespace(kv=torch.zeros(2, 1, 4, 1, 4, config.head_dim), slots=torch.tensor([9, 0, 15]))
    slots.place = lambda layer: (slots.slots, slots.kv[layer])
    torch.testing.assert_close(attention.rotate_and_store(qkv, positions, slots), queries)
    torch.testing.assert_close(slots.kv[1].flatten(0, 3)[slots.slots], rows[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "draft"), [("youtu", "llama"), ("llama", "youtu")])
def test_drafts_of_another_kind_of_model_change_nothing(
    model: str, draft: str, tiny_model: Callable[[str], Path]
) -> None:
    """Pages of both have the same numbers."""
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def load(folder: Path, config: WorkerConfig) -> Components:
        parts = without_grammars(folder, config, ModelRunner.load(folder, config))
        if config.draft_model is None:
            return parts
        own = DraftModel(Path(config.draft_model), config, parts.executor)
        return parts._replace(costs=CostStore(), drafters=[ModelDrafter(own, Passes())], draft_model=own)

    with checked_engines(tiny_model(model), kv_tokens=1024, page_size=4) as make:
        wanted = [done.token_ids for done in make(load).generate(prompts(4), sampling)]
        one = make(load, draft_model=str(tiny_model(draft)), speculation="auto", num_speculative_tokens=3)
        assert [done.token_ids for done in one.generate(prompts(4), sampling)] == wanted
        assert one.load().drafted["model"] > 10
