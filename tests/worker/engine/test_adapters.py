"""LoRA adapters in a whole engine: the tokens are those of `transformers` with merged weights."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from shutil import copytree

import pytest

from tests.worker.adapters import merged, write_adapter
from tests.worker.conftest import without_grammars
from tests.worker.engines import checked_engines
from tests.worker.references import GREEDY, expected, prompts
from worker.config import WorkerConfig
from worker.engine.engine import Engine
from worker.executor.model_runner import ModelRunner
from worker.messages import Adapter, Generate

ADAPTERS: dict[str, dict] = {
    "all": {"rank": 4, "fan_in_fan_out": True},  # which says how the base weight is kept, as GPT-2's
    "some": {"rank": 3, "targets": ("q_proj", "v_proj", "down_proj"), "use_rslora": True},
    "late": {"rank": 2, "targets": ("o_proj", "up_proj"), "layers": (2, 3)},
}


class Case:
    """A base model and `ADAPTERS`. `batch`: prompts, each with its adapter in `adapters`, its tokens in `wanted`."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base = base
        models: list[tuple[Adapter | None, Path]] = [(None, base)]
        for seed, (name, settings) in enumerate(ADAPTERS.items()):
            path = write_adapter(folder / name, base, seed, **settings)
            models.append((Adapter(name, str(path)), merged(folder / f"{name}-merged", base, path)))
        few = prompts(3)
        self.batch = [prompt for prompt in few for _ in models]
        self.adapters = [adapter for _ in few for adapter, _ in models]
        answers = [expected(model, few) for _, model in models]
        self.wanted = [answer[i] for i in range(len(few)) for answer in answers]
        assert all(len({tuple(answer[i]) for answer in answers}) == len(models) for i in range(len(few)))


@pytest.fixture(scope="module")
def case(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tiny_model("qwen3"), tmp_path_factory.mktemp("adapters"))


def load(model: Path, config: WorkerConfig):
    return without_grammars(model, config, ModelRunner.load(model, config))


def tokens(engine: Engine, case: Case, **how: object) -> list[list[int]]:
    found = engine.generate(case.batch, GREEDY, adapters=case.adapters)
    assert [done.failure for done in found] == [None] * len(found)
    return [done.token_ids for done in found]


def test_a_batch_of_adapters_and_the_base_cold_warm_and_preempted(case: Case, crowded: None) -> None:
    with checked_engines(case.base, page_size=4, max_loras=3) as make:
        one = make(load, kv_tokens=1024, overlap=True)
        first = one.generate(case.batch[1:2], GREEDY, adapters=case.adapters[1:2])
        assert [done.token_ids for done in first] == case.wanted[1:2]
        assert tokens(one, case) == case.wanted
        warm = one.generate(case.batch, GREEDY, adapters=case.adapters)
        assert [done.token_ids for done in warm] == case.wanted
        # What the cache has of a prompt is its own adapter's.
        assert [done.cached_tokens for done in warm] == [(len(own) - 1) // 4 * 4 for own in case.batch]
        full = make(load, kv_tokens=80, token_budget=24)
        assert tokens(full, case) == case.wanted
        assert full.load().preemptions > 0


def test_an_adapter_that_is_loaded_again_has_a_cache_of_its_own(case: Case, tmp_path: Path) -> None:
    """Its name and its folder are the same, but not what is in the folder."""
    prompt, (first, second) = case.batch[:1], case.adapters[1:3]
    with checked_engines(case.base, page_size=4, kv_tokens=512, max_loras=2) as make:
        engine, folder = make(load), tmp_path / "adapter"

        def answer(version: str) -> tuple[list[int], bool]:
            [done] = engine.generate(prompt, GREEDY, adapters=[Adapter("name", str(folder), version)])
            return done.token_ids, bool(done.cached_tokens)

        copytree(first.path, folder)
        assert answer("1") == (case.wanted[1], False)
        copytree(second.path, folder, dirs_exist_ok=True)
        assert answer("2") == (case.wanted[2], False)
        assert [answer("1"), answer("2")] == [(case.wanted[1], True), (case.wanted[2], True)]


def test_more_adapters_than_slots_take_turns(case: Case) -> None:
    with checked_engines(case.base, page_size=4, kv_tokens=1024, token_budget=7) as make:
        one = make(load, max_loras=1, max_cpu_loras=1)
        assert tokens(one, case) == case.wanted
        found = one.load()
        assert found.max_loras == 1
        assert found.adapter_loads >= len(ADAPTERS)
        assert len(found.adapters_resident) <= 1
        assert not found.adapters_running
        assert not found.adapters_waiting
        assert len(one._adapter_queue._copies) == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"pp": 2, "overlap": True}])
def test_ranks_hold_their_parts(case: Case, ranks: dict) -> None:
    config = {"device": "cpu", "dtype": "float32", "kv_tokens": 1024, "page_size": 4, "max_loras": 2, **ranks}
    with closing(Engine(case.base, WorkerConfig.model_validate(config))) as engine:
        assert tokens(engine, case) == case.wanted
        assert tokens(engine, case) == case.wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["phi3", "gemma3", "phi", "qwen3_5", "qwen3_moe", "bamba", "falcon_h1", "lfm2", "nemotron_h"]
)
def test_fused_gated_and_mixed_layers(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model(name)
    own_names = {
        "phi3": ("qkv_proj", "gate_up_proj", "o_proj"),
        "phi": ("q_proj", "dense", "fc1", "fc2"),
        "qwen3_5": ("q_proj", "k_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj"),
        "bamba": ("in_proj", "out_proj"),
        "falcon_h1": ("q_proj", "k_proj", "o_proj", "in_proj", "gate_proj", "down_proj"),
        "lfm2": ("q_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
        "nemotron_h": ("q_proj", "in_proj", "up_proj", "down_proj"),
    }
    targets = own_names.get(name, ("q_proj", "k_proj", "o_proj"))
    path = write_adapter(tmp_path / "one", base, 0, targets=targets)
    batch = prompts(3)
    with checked_engines(base, page_size=4, kv_tokens=512, max_loras=1) as make:
        found = make(load).generate(batch, GREEDY, adapters=[Adapter("one", str(path))] * 3)
        assert [done.token_ids for done in found] == expected(merged(tmp_path / "merged", base, path), batch)


def test_what_cannot_be_used_fails_its_own_request(case: Case, tmp_path: Path) -> None:
    doras = write_adapter(tmp_path / "dora", case.base, 1, use_dora=True)
    large = write_adapter(tmp_path / "large", case.base, 1, rank=17)
    head = write_adapter(tmp_path / "head", case.base, 1, targets=("lm_head",))
    paths = [doras, large, head, tmp_path / "none"]
    with checked_engines(case.base, kv_tokens=512, max_loras=1) as make:
        adapters = [Adapter(path.name, str(path)) for path in paths]
        found = make(load).generate(case.batch[:4], GREEDY, adapters=adapters)
        reasons = [done.failure.message for done in found if done.failure is not None]
        for reason, said in zip(
            reasons, ("use_dora", "max_lora_rank is 16", "lm_head", "is not an adapter"), strict=True
        ):
            assert said in reason
        assert {done.failure.kind for done in found if done.failure is not None} == {"invalid"}
        without = make(load, max_loras=0)
        [refused] = without.generate(case.batch[:1], GREEDY, adapters=adapters[:1])
        assert refused.failure is not None
        assert "max_loras is 0" in refused.failure.message


def test_an_adapter_of_another_model_is_refused(case: Case, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    other = write_adapter(tmp_path / "other", tiny_model("llama_one_kv_head"), 0)
    with checked_engines(case.base, kv_tokens=512, max_loras=1) as make:
        engine = make(load)
        [refused] = engine.generate(case.batch[:1], GREEDY, adapters=[Adapter("other", str(other))])
        assert refused.failure is not None
        assert "made for another model" in refused.failure.message
        assert engine.generate(case.batch[:1], GREEDY)[0].token_ids == case.wanted[0]


def test_a_request_goes_before_its_adapter_is_there(case: Case) -> None:
    """It is aborted while its adapter is read; others go on."""
    with checked_engines(case.base, kv_tokens=512, max_loras=1) as make:
        engine = make(load)
        engine.add(Generate(request_id="a", prompt_ids=[5, 6], sampling=GREEDY, adapter=case.adapters[1]))
        engine.abort(["a"])
        assert engine.generate(case.batch[:1], GREEDY)[0].token_ids == case.wanted[0]
        assert len(engine.readiness) == 0
