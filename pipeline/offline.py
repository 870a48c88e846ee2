"""Micro-batches for jobs whose requests are all there at once, and of which nothing counts but when the last ends."""

import math

from pipeline.budget import Budget
from pipeline.policy import Horizon, View
from pipeline.shape import TILE, TILED_FROM, BatchShape
from pipeline.uniform import Uniform


class Offline(Uniform):
    """Prompts are spread over the decodes of the whole job, those with the longest outputs first.

    A token of a decode takes a round, so a job takes as many rounds as its longest output has tokens, whatever is done;
    what can be chosen is how the rest is laid beside that. Decodes read all weights for a few tokens, and those of
    prompts cost little beside them (Sarathi-Serve's piggybacking, https://arxiv.org/abs/2308.16369), up to the rows
    from which on products are bound by arithmetic (`TILED_FROM`). A micro-batch costs more with each token, and with
    each more than with the one before: a job costs the least where all have as many. So each has

        max(all tokens to come / rounds to come, decodes + the tokens of prompts that are due)

    divided by the micro-batches of a round. Due is what keeps anybody from ending later than the longest does. Longest
    first is Graham's rule (https://doi.org/10.1137/0117039): what ends the job begins at once.

    Where these are more tokens than come cheap, or not so cheap (of a small model, the constant part of a step with
    prompts is more than they cost together), or where somebody waits for pages or a slot, prompts are computed as fast
    as can be instead: as many to a step as there may be, or in a pipeline, as many as keep its steps even. Then there
    is less to come, and what is left is spread.
    """

    name = "offline"
    longest_first = True
    NEAR = 1.01  # nobody minds the delay
    LEAST = TILE // 4  # tokens of prompts in a micro-batch that has any: to be a little early costs nothing

    def _hands_over(self, view: View) -> bool:
        return True  # also while prompts wait: they fill up what decodes are in, and no micro-batch of their own

    def _refresh(self) -> None:
        super()._refresh()
        most = self.settings.token_budget if self.settings.stages == 1 else self._most_tokens
        self._fast_s = self._of_prompts(most) / most  # what a token costs where prompts are computed as fast as can be

    def _fill(self, view: View) -> Budget:
        in_flight = self._in_flight(view)
        if (shape := self._typical(view, in_flight)) is None:
            return Budget(self.settings.token_budget) if self.settings.stages == 1 else super()._fill(view)
        target_s = self._predict(shape) * self.SLACK if self.settings.stages > 1 else math.inf
        return self._timed(self._average(view, in_flight), shape.tokens, target_s)

    def _typical(self, view: View, in_flight: int) -> BatchShape | None:
        if not view.waiting_tokens:
            return super()._typical(view, in_flight)
        average, parts = self._average(view, in_flight), in_flight if self.settings.stages > 1 else 1
        if view.horizon is None or (tokens := self._tokens(view.horizon, average.tokens, parts)) > TILED_FROM:
            return None
        shape, of_prompts = average.copy(), self._whole(math.ceil(tokens)) - average.tokens
        shape.add(0, of_prompts)
        is_cheap = self._predict(shape) - self._predict(average) < self._fast_s * of_prompts
        return shape if is_cheap else None

    @classmethod
    def _tokens(cls, horizon: Horizon, decodes: int, parts: int) -> float:
        """Those that each of a round's micro-batches is to have, so many decodes among them."""
        even = horizon.tokens / horizon.rounds / parts
        return max(even, decodes + max(cls.LEAST, horizon.due / parts))
