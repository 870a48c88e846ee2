"""Micro-batches for jobs whose requests are all there at once, and of which nothing counts but when the last ends."""

import math

from pipeline.budget import Budget
from pipeline.policy import Horizon, View
from pipeline.shape import TILE, BatchShape
from pipeline.uniform import Uniform


class Offline(Uniform):
    """Prompts are spread over the decodes of the whole job, those with the longest outputs first.

    A token of a decode takes a round, so a job takes as many rounds as its longest output has tokens, whatever is done;
    what can be chosen is how the rest is laid beside that. Decodes read the weights for a few tokens, and what prompts
    have to compute is nearly free beside them (Sarathi-Serve's piggybacking, https://arxiv.org/abs/2308.16369), while
    alone it takes all its time. A micro-batch costs more with each token, and with each more than with the one before:
    all of a job costs the least where every micro-batch has as many tokens. So each has

        max(all tokens to come / rounds to come, decodes + the tokens of prompts that are due)

    divided by the micro-batches of a round. Due is what keeps anybody from ending later than the longest does. Longest
    first is Graham's rule (https://doi.org/10.1137/0117039): what ends the job begins at once.

    Where that is more than a graph holds, or somebody waits for pages or a slot, rounds are not what bounds the job:
    prompts are computed as fast as can be then, as many to a step as there may be (in a pipeline, as many as keep its
    steps even). Between, they are started a little faster than has to be: no chunk is of fewer than `LEAST` tokens.
    """

    name = "offline"
    longest_first = True
    LEAST = TILE // 4

    def counts_as_ended(self, view: View) -> bool:
        return view.returning_s <= self.LEAD_S

    def _fill(self, view: View) -> Budget:
        in_flight = self._in_flight(view)
        if (shape := self._typical(view, in_flight)) is None:
            return Budget(self.settings.token_budget) if self.settings.stages == 1 else super()._fill(view)
        target_s = self._predict(shape) * self.SLACK if self.settings.stages > 1 else math.inf
        return self._timed(self._average(view, in_flight), shape.tokens, target_s)

    def _typical(self, view: View, in_flight: int) -> BatchShape | None:
        if not view.waiting_tokens:
            return super()._typical(view, in_flight)
        settings = self.settings
        shape, parts = self._average(view, in_flight), in_flight if settings.stages > 1 else 1
        most = settings.models[0].rows.most_mixed(settings.token_budget)
        if view.horizon is None or (tokens := self._tokens(view.horizon, shape.tokens, parts)) > most:
            return None
        shape.add(0, self._whole(math.ceil(tokens)) - shape.tokens)
        return shape

    def _tokens(self, horizon: Horizon, decodes: int, parts: int) -> float:
        """Those that each of a round's micro-batches is to have, so many decodes among them."""
        even = horizon.tokens / horizon.rounds / parts
        return max(even, decodes + max(self.LEAST, horizon.due / parts))
