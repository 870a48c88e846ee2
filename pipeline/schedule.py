"""Scheduling policies: which work goes into the next micro-batch. Three policies behind one interface.

    settings = PolicySettings(stages=4, token_budget=8192, models=models, objective=Objective(tbt_s=0.2))
    policy = make_policy("uniform", settings)

The scheduler owns sequences and pages; a policy sees counts only. The scheduler makes a micro-batch as follows.

1. It describes its state (`SchedulerView`) and asks `policy.begin(view)` for a `Budget`. None means that nothing is to
   be sent now. It asks again when a token comes back, when a request arrives, or when the first stage is nearly done
   (`policy.ask_again_s(view, is_idle)`).
2. It offers the ready decodes (one remaining token, not in flight), longest ready first.
   `budget.take_decodes(contexts)` returns how many of them go.
3. It offers the other sequences in its own order. `budget.chunk(start, missing, room)` returns the size of the chunk; 0
   means that nothing fits, and a waiting sequence is not started then. `budget.add(start, size)` takes the chunk in,
   and `budget.remove` takes a preempted sequence out. A sequence whose last chunk is in flight is skipped unless
   `policy.chunks_follow`.
4. If nothing came together although decodes are ready (the policy counted on prompts that find no pages), it asks once
   more with `waiting_tokens=0`.
5. It keeps `budget.shape` with the plan, for `in_flight` of later views and for `CostModel.observe` when the times are
   known.

When the tokens of a micro-batch are back, `policy.finished(gap_s)` is told how long its longest-waiting decode went
without a token.

In `worker.scheduler`, `StepBuilder` holds the `Budget`, and `Scheduler.schedule` does steps 1 to 4. With one stage,
`fixed_chunk` schedules as without a pipeline: every decode, then chunks up to the token budget.

The schedules of other systems that `bench.pipeline` compares with are in `bench/pipeline/baselines.py`.
"""

from importlib import import_module

from pipeline.fixed_chunk import FixedChunk
from pipeline.offline import Offline, StageBalancedOffline
from pipeline.policy import Policy, PolicySettings
from pipeline.stage_balanced import StageBalanced
from pipeline.uniform import Uniform

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Uniform, Offline, FixedChunk)}
_IN_PIPELINES: dict[str, type[Policy]] = {policy.name: policy for policy in (StageBalanced, StageBalancedOffline)}


def policy_class(name: str) -> type[Policy]:
    """The policy called `name`: one of `POLICIES`, or any other class as `module:Class`. Raises ValueError if there is
    none."""
    module, _, attribute = name.partition(":")
    if not attribute and name not in POLICIES:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(POLICIES)}")
    return getattr(import_module(module), attribute) if attribute else POLICIES[name]


def make_policy(name: str, settings: PolicySettings) -> Policy:
    """A policy of the class that `policy_class` returns, or of its class for several stages. Raises ValueError as that
    does."""
    one_stage = policy_class(name)
    return (_IN_PIPELINES.get(name, one_stage) if settings.stages > 1 else one_stage)(settings)
