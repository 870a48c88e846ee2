"""Which work goes into the next micro-batch: six policies behind one interface.

    policy = make_policy("uniform", Settings(stages=4, token_budget=8192, models=models, tbt_slo_s=0.2))

The scheduler owns sequences and pages; a policy sees counts only. To make a micro-batch, the scheduler

 1. describes what there is (`View`) and asks `policy.begin(view)` for a `Budget`. None: nothing is to be sent now, ask
    again when a token comes back, a request arrives, or the first stage is nearly done (`policy.ask_again_s(view)`);
 2. offers the sequences that lack one token and are not in flight, longest ready first:
    `budget.take_decodes(contexts)` says how many of them go;
 3. offers the others in its order, each with `budget.chunk(start, missing, room)`, and tells `budget.add(start, size)`
    of what it takes; one whose last chunk is in flight is passed over unless `policy.chunks_follow`. `chunk` gives 0
    where nothing fits: a waiting sequence is not started then. `remove` takes back what a preempted sequence had;
 4. if nothing came together although decodes are ready (prompts were waited for that find no pages), it asks once more
    with `waiting_tokens=0`;
 5. keeps `budget.shape` with the plan: in the next views' `in_flight`, and for `CostModel.observe` when the times come.

When the tokens of a micro-batch are back, `policy.finished(gap_s)` hears how long its longest-waiting decode went
without a token. In `worker`: `Batch` holds the `Budget` in place of `tokens_left`, `Scheduler.schedule` does 1 to 4.
One stage and `fixed_chunk` is the schedule without a pipeline: every decode, then chunks up to the budget of tokens.
"""

from pipeline.baselines import FixedChunk, Hybrid, PrefillFirst, Throttle
from pipeline.offline import Offline
from pipeline.policy import Policy, Settings
from pipeline.uniform import Uniform

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Uniform, Offline, FixedChunk, PrefillFirst, Hybrid, Throttle)
}


def make_policy(name: str, settings: Settings) -> Policy:
    """Raises ValueError for a name that is not among `POLICIES`."""
    if name not in POLICIES:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](settings)
