"""Schedule `fixed_chunk`: decodes and chunks of prompts up to a fixed number of tokens."""

from pipeline.budget import Budget
from pipeline.policy import Policy, SchedulerView


class FixedChunk(Policy):
    """Chunked prefill as vLLM and SGLang schedule it: no cost model, nothing learned.

    Sarathi-Serve (A. Agrawal et al., OSDI 2024, https://arxiv.org/abs/2403.02310, algorithm 3). As there, a sequence in
    flight, chunk or decode, gets nothing more until it is back. So as many prompts progress as there are stages.
    """

    name = "fixed_chunk"

    def _budget(self, view: SchedulerView) -> Budget:
        return Budget(self.settings.token_budget)
