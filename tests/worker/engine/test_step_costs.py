"""The costs that a replica tells routers are those of its cost models."""

import msgspec
import pytest

from pipeline.cost import CostModel
from pipeline.policy import Objective
from pipeline.roofline import DEVICES, MODELS, make_stages
from pipeline.shape import BatchShape
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.engine.step_costs import OBJECTIVE_SHARE, step_costs
from worker.messages import ReplicaLoad, StepCosts, decode_from_replica, encode


def models(stages: int = 1) -> list[CostModel]:
    return [CostModel(stage.seconds) for stage in make_stages(MODELS["llama-8b"], DEVICES["h200"], stages)]


def test_sums_are_what_the_model_predicts():
    (model,) = models()
    costs = step_costs([model], None, 8192)
    prompt = BatchShape([(4096, 2048)])
    predicted = costs.step_s + 2048 * (costs.token_s + costs.product_s * (4096 + 1024))
    assert predicted == pytest.approx(model.predict(prompt), rel=0.05)
    decodes = BatchShape.decoding(64, 64 * 4000)
    predicted = costs.step_s + 64 * costs.decode_s + 64 * 4000 * costs.context_s
    assert predicted == pytest.approx(model.predict(decodes), rel=0.05)


def test_a_full_step_ends_with_the_budget_or_the_objective():
    costs = step_costs(models(), None, 4096)
    assert costs.full_s == pytest.approx(costs.step_s + 4096 * costs.token_s)
    assert step_costs(models(), Objective(0.05, 5), 8192).full_s == pytest.approx(OBJECTIVE_SHARE * 0.05)
    iterations = step_costs(models(), Objective(1e-3, 5), 8192).full_s
    assert iterations == pytest.approx(OBJECTIVE_SHARE * 5 * models()[0].predict(BatchShape.decoding(32, 32 * 4096)))


def test_stages_share_the_tokens_and_a_round_has_a_step_for_each():
    one, two = step_costs(models(), None, 8192), step_costs(models(2), None, 8192)
    assert two.token_s == pytest.approx(one.token_s / 2, rel=0.1)
    assert two.step_s == pytest.approx(one.step_s, rel=0.1)


def test_the_default_is_near_an_8b_model_on_an_h200():
    assert step_costs([], None, 8192) == StepCosts() == CostStore().step_costs(WorkerConfig())
    measured = step_costs(models(), Objective(0.05, 5), 8192)
    for name in StepCosts.__struct_fields__:
        assert 0.5 < getattr(measured, name) / getattr(StepCosts(), name) < 2.0, name


def test_costs_follow_what_is_learned():
    store = CostStore(models())
    before = store.step_costs(WorkerConfig()).token_s
    shape = BatchShape([(0, 2048)])
    for _ in range(200):
        store.observe(shape, [3 * models()[0].predict(shape)])
    assert store.step_costs(WorkerConfig()).token_s > 2 * before


def test_a_replica_that_tells_no_costs_counts_as_the_default():
    costs = StepCosts(token_s=1e-3)
    load = ReplicaLoad(incarnation="i", costs=costs, waiting_products=7)
    assert decode_from_replica(encode(load)) == load
    told = msgspec.to_builtins(load)
    del told["costs"], told["waiting_products"]
    older = decode_from_replica(msgspec.msgpack.encode(told))
    assert older == ReplicaLoad(incarnation="i") and older.costs == StepCosts()
