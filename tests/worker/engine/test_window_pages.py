"""Models with windows, whose layers with a window have pages of their own: greedy output is, token for token, what
`transformers` generates, cold and warm, in chunks longer than the window, with few pages, with drafts, in stages and on
several ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.worker.conftest import without_grammars
from tests.worker.drafting import Cheater
from tests.worker.engines import checked_engines
from tests.worker.pipelines import pipeline
from tests.worker.references import GREEDY, expected, prompts
from worker.config import WorkerConfig
from worker.drafts.drafter import Proposal
from worker.engine.cost_store import CostStore
from worker.engine.engine import Components, Finished
from worker.executor.executor import Executor
from worker.executor.model_runner import ModelRunner
from worker.messages import SamplingParams

pytestmark = pytest.mark.slow
# Windows of 9 tokens, in every second layer or in all, and chunks of 16. LFM3 has recurrent states, too.
NAMES = ["lfm3", "gemma2", "gemma3", "gemma4", "gpt_oss", "mistral_window", "llama4_moe"]
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


class SmallCheater(Cheater):
    """With errors that are tokens of the tiny models' vocabulary."""

    def propose(self, key: int, most: int) -> Proposal:
        proposal = super().propose(key, most)
        return proposal._replace(token_ids=[token % 131 for token in proposal.token_ids])


def load(model: Path, config: WorkerConfig) -> Components:
    return without_grammars(model, config, ModelRunner.load(model, config))


def window_of(executor: Executor) -> tuple[int, int, bool] | None:
    """Number of pages, tokens, and whether they are chunks."""
    *_, last = executor.layout.paged
    return (last.num_units, last.window_tokens, last.kind == "chunk") if last.window_tokens else None


def tokens(finished: list[Finished]) -> list[list[int]]:
    assert not any(done.failure for done in finished)
    return [done.token_ids for done in finished]


@pytest.mark.parametrize("name", NAMES)
def test_cold_warm_chunked_and_preempted(name: str, tiny_model: Callable[[str], Path], crowded: None) -> None:
    folder, batch = tiny_model(name), prompts(6)
    batch.append([*batch[0][: len(batch[0]) // 2], *batch[1]])
    wanted = expected(folder, batch)
    with checked_engines(folder, page_size=4) as make:
        one = make(load, kv_tokens=512, overlap=True)
        window = window_of(one.executor)
        assert window is not None and window[1:] == ((16, True) if name == "llama4_moe" else (9, False))
        assert tokens(one.generate(batch[:1], GREEDY)) == wanted[:1]
        assert tokens(one.generate(batch, GREEDY)) == wanted
        warm = one.generate(batch, GREEDY)
        assert tokens(warm) == wanted
        assert [done.cached_tokens for done in warm] == [(len(own) - 1) // 4 * 4 for own in batch]
        full = make(load, kv_tokens=80, token_budget=13, window_kv_tokens=96 if window[2] else 48)
        assert tokens(full.generate(batch, GREEDY)) == wanted
        assert full.load().preemptions > 0
        replies = [[*prompt, *output] for prompt, output in zip(batch, wanted, strict=True)]
        again = one.generate(replies, GREEDY)
        assert tokens(again) == expected(folder, replies)
        # States are not saved at the end of an output, since nobody knows where that will be.
        reused = replies if not one.executor.layout.of_kind("states") else batch
        assert [done.cached_tokens for done in again] == [(len(own) - 1) // 4 * 4 for own in reused]


@pytest.mark.parametrize(("name", "right"), [("gemma3", 0.5), ("gemma3", 0.0), ("llama4_moe", 0.5)])
def test_drafts_that_are_wrong_change_nothing(name: str, right: float, tiny_model: Callable[[str], Path]) -> None:
    with checked_engines(tiny_model(name), page_size=4, kv_tokens=512, num_speculative_tokens=6) as make:
        whole = tokens(make(load, window_kv_tokens=0).generate(prompts(6), LONG))
        cheater = SmallCheater(whole, right, prompts=prompts(6))
        one = make(
            lambda model, config: load(model, config)._replace(costs=CostStore(), drafters=[cheater]),
            window_kv_tokens=160,
        )
        assert tokens(one.generate(prompts(6), LONG)) == whole
        assert cheater.proposed > 100 and one.load().drafted["cheater"] > 50


@pytest.mark.parametrize(
    ("name", "pp", "tp"),
    [
        ("gemma3", 2, 1),
        ("gpt_oss", 1, 2),
        ("gpt_oss", 2, 2),
        ("mistral_window", 2, 1),
        ("llama4_moe", 2, 2),
        ("lfm3", 2, 1),
    ],
)
def test_in_stages_and_on_ranks(name: str, pp: int, tp: int, tiny_model: Callable[[str], Path], crowded: None) -> None:
    wanted = expected(tiny_model(name), prompts(9))
    crowd = {"token_budget": 11, "kv_tokens": 96, "page_size": 4, "window_kv_tokens": 72}
    with pipeline(tiny_model(name), pp=pp, tp=tp, **crowd) as engine:
        for _ in range(2):
            assert tokens(engine.generate(prompts(9), GREEDY)) == wanted
        load = engine.load()
        assert load.preemptions > 0 and load.cached_tokens > 0 and load.window_tokens_total == 72


def test_a_stage_of_one_kind_of_layers(tiny_model: Callable[[str], Path]) -> None:
    """A window, all tokens, a window, all tokens: each stage has one layer."""
    wanted = expected(tiny_model("gpt_oss"), prompts(3))
    with pipeline(tiny_model("gpt_oss"), pp=4, token_budget=11, kv_tokens=160, page_size=4) as engine:
        assert tokens(engine.generate(prompts(3), GREEDY)) == wanted


def test_chunks_that_are_no_whole_pages_are_refused(tiny_model: Callable[[str], Path]) -> None:
    config = {"device": "cpu", "dtype": "float32", "kv_tokens": 240, "page_size": 6}
    with pytest.raises(ValueError, match=r"page_size 6 .*\b16\b"):
        ModelRunner.load(tiny_model("llama4_moe"), WorkerConfig.model_validate(config))
    one = ModelRunner.load(tiny_model("llama4_moe"), WorkerConfig.model_validate(config | {"context_length": 16}))
    assert window_of(one) is None and not one.model_config.in_chunks, "no sequence leaves its first chunk"


def test_settings(tiny_model: Callable[[str], Path]) -> None:
    config = {"device": "cpu", "dtype": "float32", "kv_tokens": 160, "page_size": 4, "token_budget": 16}

    def window(**settings: object) -> object:
        return window_of(ModelRunner.load(tiny_model("gemma3"), WorkerConfig.model_validate(config | settings)))

    assert window() == (4 + 9, 9, False) != window(token_budget=64) == (16 + 9, 9, False), (
        "a chunk, and what one sequence needs"
    )
    assert window(kv_tokens=4096) == (256, 9, False), "a quarter"
    assert window(window_kv_tokens=0) is window(context_length=9) is None
    assert window(window_kv_tokens=100) == (25, 9, False)
    with pytest.raises(ValueError, match=r"window_kv_tokens 35 .*\b36\b"):
        window(window_kv_tokens=35)
