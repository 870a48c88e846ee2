"""Schedules of other systems, to compare with."""

from pipeline.budget import Budget, WholePrompts
from pipeline.policy import Policy, Settings, View


class FixedChunk(Policy):
    """Decodes and chunks up to a fixed number of tokens together.

    Sarathi-Serve (A. Agrawal et al., OSDI 2024, https://arxiv.org/abs/2403.02310, algorithm 3). There a sequence in
    flight is left alone until it is back, chunk or decode, so as many prompts are under way as there are stages."""

    name = "fixed_chunk"

    def _budget(self, view: View) -> Budget:
        return Budget(self.settings.token_budget)


class PrefillFirst(Policy):
    """Whole prompts, and nothing beside them, as long as one waits that can start; decodes otherwise.

    vLLM 0.2 (W. Kwon et al., SOSP 2023, https://arxiv.org/abs/2309.06180)."""

    name = "prefill_first"

    def _budget(self, view: View) -> Budget:
        if view.waiting_tokens:
            return WholePrompts(self.settings.token_budget, decodes=0)
        return Budget(self.settings.token_budget, prompt_tokens=0)


class Hybrid(Policy):
    """Whole prompts beside the decodes.

    Orca's iteration-level batches (G. Yu et al., OSDI 2022, https://www.usenix.org/conference/osdi22/presentation/yu),
    bound by tokens instead of requests."""

    name = "hybrid"

    def _budget(self, view: View) -> Budget:
        return WholePrompts(self.settings.token_budget)


class Throttle(Policy):
    """Prompt tokens by what waits and by what is free of the KV cache, decodes evenly by number.

    gLLM (T. Guo et al., SC 2025, https://arxiv.org/abs/2504.14775): with W prompt tokens waiting, T iterations to
    spread them over, and the KV cache free to a part f of which h is kept,

        prompt tokens = min(max(W / T, least), most (f - h) / (1 - h)),    decodes = all decodes / stages

    where W only counts if more than one sequence waits. T, least and h are its defaults; `most` is the budget. With
    nothing in flight `least` are free to go, or prompts that hold all pages would wait for each other."""

    name = "throttle"
    chunks_follow = True
    ITERATIONS, LEAST, KEPT = 8, 32, 0.05

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._turn = 0

    def _budget(self, view: View) -> Budget:
        stages, most = self.settings.stages, self.settings.token_budget
        prompt_tokens = round(most * max(0.0, view.free_kv - self.KEPT) / (1 - self.KEPT))
        if view.waiting > 1:
            prompt_tokens = min(prompt_tokens, max(view.waiting_tokens // self.ITERATIONS, self.LEAST))
        if not view.in_flight:
            prompt_tokens = max(prompt_tokens, min(most, self.LEAST))
        # What is left over when decodes are divided goes to each micro-batch in turn.
        self._turn = (self._turn + 1) % stages
        decodes = max(1, (view.decoding + self._turn) // stages)
        return Budget(most, prompt_tokens=prompt_tokens, decodes=decodes)
