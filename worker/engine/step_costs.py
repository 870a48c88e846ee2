"""The costs that a replica tells routers: a few sums of its stages' cost models, which placement can add up."""

from collections.abc import Sequence

from pipeline.cost import CostModel, slowest_s
from pipeline.policy import ITERATION, Objective
from worker.messages import StepCosts

OBJECTIVE_SHARE = 0.92  # the part of its objective that schedule uniform uses at first
# Rows of a step with prompts, and with decodes alone. The first rows of a step cost less than further ones.
PROMPT_ROWS, DECODE_ROWS = 2048, 64


def step_costs(models: Sequence[CostModel], objective: Objective | None, token_budget: int) -> StepCosts:
    """The costs of a replica whose pipeline stages have `models`; the defaults without any.

    `objective`: of its schedule, if that has one. `token_budget`: most tokens of a step. Stages work at the same time,
    so tokens cost what they do on the slowest stage, and a round takes as many steps as there are stages.
    """
    if not models:
        return StepCosts()
    costs = [model.coefficients for model in models]
    prompt_rows = min(PROMPT_ROWS, token_budget)
    step_s = len(costs) * max(cost.constant + cost.several + cost.mixed + cost.chunk for cost in costs)
    token_s = max(cost.of_rows(prompt_rows) for cost in costs) / prompt_rows
    full_s = step_s + len(costs) * token_budget * token_s
    if objective is not None:
        iterations_s = objective.iterations * len(costs) * slowest_s(models, ITERATION)
        full_s = min(full_s, OBJECTIVE_SHARE * max(objective.tbt_s, iterations_s))
    return StepCosts(
        step_s=step_s,
        token_s=token_s,
        product_s=max(cost.prefix_product for cost in costs),
        decode_s=max(cost.decode + cost.of_rows(DECODE_ROWS) / DECODE_ROWS for cost in costs),
        context_s=max(cost.decode_context for cost in costs),
        full_s=full_s,
    )
