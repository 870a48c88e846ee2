"""Schedules of other systems, for comparison only: no choices of `shoal serve`.

A replica finds them by their path (`pipeline.schedule.policy_class`), also in the process of another rank.
"""

from pipeline.budget import UNLIMITED_TOKENS, Budget
from pipeline.policy import Policy, PolicySettings, SchedulerView


class WholePrompts(Budget):
    """Prompts are not cut, except those that no micro-batch could hold together with this one's decodes."""

    def __init__(self, tokens: int, *, decodes: int = UNLIMITED_TOKENS) -> None:
        super().__init__(tokens, decodes=decodes)
        self._tokens = tokens

    def _limit(self, start: int, most: int) -> int:
        whole = self._tokens - self.shape.decodes
        return self.tokens_left if most <= self.tokens_left or most > whole else 0


class PrefillFirst(Policy):
    """Whole prompts without decodes while a prompt waits that can start; otherwise decodes.

    vLLM 0.2 (W. Kwon et al., SOSP 2023, https://arxiv.org/abs/2309.06180).
    """

    name = "prefill_first"

    def _budget(self, view: SchedulerView) -> Budget:
        if view.waiting_tokens:
            return WholePrompts(self.settings.token_budget, decodes=0)
        return Budget(self.settings.token_budget, prompt_tokens=0)


class Hybrid(Policy):
    """Whole prompts together with the decodes.

    Orca's iteration-level batches (G. Yu et al., OSDI 2022, https://www.usenix.org/conference/osdi22/presentation/yu),
    limited by tokens instead of requests.
    """

    name = "hybrid"

    def _budget(self, view: SchedulerView) -> Budget:
        return WholePrompts(self.settings.token_budget)


class Throttle(Policy):
    """Prompt tokens by what waits and by the free part of the KV cache; decodes in even numbers.

    gLLM (T. Guo et al., SC 2025, https://arxiv.org/abs/2504.14775):

        prompt tokens = min(max(W / T, least), most (f - h) / (1 - h)),    decodes = all decodes / stages

    | symbol | meaning |
    | --- | --- |
    | W | waiting prompt tokens; counts only if more than one sequence waits |
    | T, `least` | iterations over which W is spread, and its lower limit: gLLM's defaults |
    | `most` | the token budget |
    | f, h | free fraction of the KV cache, and the fraction that is kept free: gLLM's default |

    With nothing in flight, `least` prompt tokens may always go. Otherwise prompts that hold all pages would wait for
    each other.
    """

    name = "throttle"
    chunks_follow = True
    NUM_ITERATIONS, MIN_TOKENS, KEPT_SHARE = 8, 32, 0.05

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        self._turn = 0

    def _budget(self, view: SchedulerView) -> Budget:
        stages, most = self.settings.stages, self.settings.token_budget
        prompt_tokens = round(most * max(0.0, view.free_kv - self.KEPT_SHARE) / (1 - self.KEPT_SHARE))
        if view.waiting > 1:
            prompt_tokens = min(prompt_tokens, max(view.waiting_tokens // self.NUM_ITERATIONS, self.MIN_TOKENS))
        if not view.in_flight:
            prompt_tokens = max(prompt_tokens, min(most, self.MIN_TOKENS))
        # The remainder of the division goes to the micro-batches in turn.
        self._turn = (self._turn + 1) % stages
        decodes = max(1, (view.decoding + self._turn) // stages)
        return Budget(most, prompt_tokens=prompt_tokens, decodes=decodes)


# The value of `schedule` that stands for each, by name.
BASELINES = {policy.name: f"{__name__}:{policy.__name__}" for policy in (PrefillFirst, Hybrid, Throttle)}
