"""The replica that is simulated: an 8B model on one H200 by default, with the step times of `pipeline.roofline`."""

from dataclasses import dataclass
from functools import cached_property

from pipeline.budget import Budget
from pipeline.cost import Coefficients, CostModel
from pipeline.padding import PaddedSizes
from pipeline.policy import Objective, Policy, PolicySettings, SchedulerView
from pipeline.roofline import DEVICES, MODELS, make_stages
from pipeline.schedule import make_policy
from pipeline.shape import BatchShape

TOKEN_BUDGET = 8192
MAX_RUNNING = 1024
STEP_S = 0.05  # the default of a replica on a GPU


@dataclass(frozen=True)
class ReplicaHardware:
    """A kind of replica.

    | field | meaning |
    | --- | --- |
    | `model`, `device` | names in `pipeline.roofline` |
    | `kv_tokens` | capacity of the KV cache; None: what fits into the device |
    | `page_size` | tokens of a page |
    | `slower` | factor on the time of every step |
    | `step_s` | seconds that a step with prompts and decodes may take |
    """

    model: str = "llama-8b"
    device: str = "h200"
    kv_tokens: int | None = None
    page_size: int = 16
    slower: float = 1.0
    step_s: float = STEP_S

    @property
    def objective(self) -> Objective:
        return Objective(self.step_s, 5)

    @cached_property
    def cost_model(self) -> CostModel:
        (stage,) = make_stages(MODELS[self.model], DEVICES[self.device].sustained(), 1)
        rows = PaddedSizes.of_graphs(MAX_RUNNING, TOKEN_BUDGET)
        return CostModel(lambda shape: self.slower * stage.seconds(shape), rows=rows)

    @cached_property
    def costs(self) -> Coefficients:
        return self.cost_model.coefficients

    @cached_property
    def num_pages(self) -> int:
        (stage,) = make_stages(MODELS[self.model], DEVICES[self.device], 1)
        return (self.kv_tokens or stage.kv_tokens()) // self.page_size

    def policy(self) -> Policy:
        """A new policy of schedule `uniform`, a replica's default on a GPU."""
        return make_policy("uniform", PolicySettings(1, TOKEN_BUDGET, [self.cost_model], self.objective))

    def alone_s(self, uncached: int, cached: int) -> float:
        """Seconds from the arrival of a prompt at an idle replica to its first token. `cached`: its tokens before the
        `uncached` ones."""
        policy, seconds = self.policy(), 0.0
        while uncached:
            budget = policy.begin(SchedulerView(waiting=1, waiting_tokens=uncached))
            assert isinstance(budget, Budget)
            chunk = budget.chunk(cached, uncached, uncached)
            seconds += self.costs.predict(BatchShape([(cached, chunk)]))
            cached, uncached = cached + chunk, uncached - chunk
        return seconds
