"""Families with experts in a whole engine: greedy output is, token for token, what `transformers` generates, cold and
warm, in a crowd, and after preemptions."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.worker.conftest import TINY, without_grammars
from tests.worker.engines import checked_engines
from tests.worker.executor.test_multi_rank import prompts
from worker.executor.model_runner import ModelRunner
from worker.messages import SamplingParams

pytestmark = pytest.mark.slow
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
NAMES = [name for name in TINY if "moe" in name or name in ("mixtral", "gpt_oss")]


@torch.inference_mode()
def expected(folder: Path, batch: list[list[int]]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    settings = {"max_new_tokens": GREEDY.max_tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return [model.generate(torch.tensor([one]), **settings)[0, len(one) :].tolist() for one in batch]


@pytest.mark.parametrize("name", NAMES)
def test_cold_warm_and_preempted(name: str, tiny_model: Callable[[str], Path], crowded: None) -> None:
    folder, batch = tiny_model(name), prompts(8)
    wanted = expected(folder, batch)

    def load(model: Path, config):
        return without_grammars(model, config, ModelRunner(model, config))

    with checked_engines(folder, page_size=4) as make:
        one = make(load, kv_tokens=512, overlap=True)
        assert [done.token_ids for done in one.generate(batch[:1], GREEDY)] == wanted[:1]
        assert [done.token_ids for done in one.generate(batch, GREEDY)] == wanted
        warm = one.generate(batch, GREEDY)
        assert [done.token_ids for done in warm] == wanted
        assert all(done.cached_tokens == (len(own) - 1) // 4 * 4 for done, own in zip(warm, batch, strict=True))
        full = make(load, kv_tokens=80, token_budget=24)
        assert [done.token_ids for done in full.generate(batch, GREEDY)] == wanted
        assert full.load().preemptions > 0
