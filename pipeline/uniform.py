"""Schedule `uniform` on one stage, and what it shares with pipelines: steps of equal predicted time, within an
objective for the time between tokens (TBT)."""

import math

from pipeline.arrival_rate import ArrivalRate
from pipeline.budget import Budget, TimedBudget
from pipeline.chunk import tokens_within
from pipeline.cost import slowest_s
from pipeline.policy import ITERATION, Policy, PolicySettings, SchedulerView
from pipeline.shape import TILE, TILED_FROM, WAVE, BatchShape, in_tiles


class Uniform(Policy):
    """Every step takes the same predicted time, while prompts wait.

    Chunked prefill as in Sarathi-Serve (https://arxiv.org/abs/2403.02310), but chunks are cut by predicted time instead
    of a number of tokens. The prediction counts the decodes in the same step and all contexts.

    The objective allows a step its TBT, less a margin. The margin adapts until one step in a hundred is late
    (`finished`).

    All ready decodes go, and chunks fill the remaining time (`_fill`):

    - If the time allows more than pays: the fewest tokens whose cost per token is within `LARGEST_STEP_COST` of the
      least, a multiple of `WAVE` (below one, of `TILE`). More would delay tokens and hold more pages.
    - If the time allows less: fewer by whole halves of a `WAVE`.
    - The number of tokens does not depend on the context before them, unless the time exceeds that without context by
      `MAX_CONTEXT_FACTOR`. One tile less changes the time more than attention to a few thousand more tokens.
    - Attention is left out of the cost per token: a prompt has as much of it in any number of steps.
    - Sizes that were never observed are tried (`MAX_TRIED_FACTOR`).
    - Under an objective, a step holds the number of tokens with which waiting and decoding sequences together lose the
      least time (`_wanted`).
    - While no sequence decodes, there is none that the objective is for: a step holds as many as pay.

    While requests wait for pages, the time shrinks. Shorter steps end sequences sooner; longer ones would only
    alternate with steps that have no prompt to compute. The time grows again while much waits that could start, and
    while nothing waits: what comes after a shortage of pages would begin with short steps.

    `StageBalanced` is this schedule for several stages. It overrides what is named below as a pipeline's.
    """

    name = "uniform"
    predicts = True
    chunks_follow = True
    # What each is worth is in docs/MECHANISMS.md, with how it was measured. Here: simulated, without it.
    # Fraction of steps that may be late; step of the margin for a late one. A fixed margin: TTFT P50 +8% (8B on one
    # GPU, long prompts).
    LATE_SHARE, LATE_STEP = 0.01, 0.02
    MARGINS = 0.6, 0.92, 0.97  # least, initial, most
    # `_part`: decrease while requests wait for pages, increase, least. With room for 60,000 tokens in the KV cache:
    # TTFT P50 +18%, 5% fewer tokens a second.
    SHRINK_FRACTION, GROW_FRACTION, MIN_PART = 0.02, 0.004, 0.2
    # Longest time of a step, relative to the same tokens without context. Without a limit and without an objective,
    # prompts of 30,000 tokens: TBT P99 +59%, TTFT as before. A quarter of a `WAVE` less saves only half of its share of
    # the time: simulated with that cost, 1.15 carries 2.5% less than 1.35, with more bubbles.
    MAX_CONTEXT_FACTOR = 1.35
    # Cost per token in the largest and in the smallest step, relative to the least. Costs are known to about 1%: with
    # 1.01, the choice varied between 512 and 3,072 tokens, and the rare large ones delayed all sequences. As many as
    # the budget allows, without an objective: TTFT P50 +59% (70B in four stages) and +11% (8B on one GPU). A tile as
    # the smallest, at half the capacity: TTFT P50 +6 to +26%.
    LARGEST_STEP_COST, SMALLEST_STEP_COST = 1.02, 1.5
    # Steps of up to this many times the tokens that seem enough are run until one has been observed: the model may know
    # too little of a step's constant cost, or of all-reduces that only long steps hide. Without, where a step has a
    # constant 12 and 30 ms that the roofline does not know: prompts take 7 and 16% longer (8B), 10 and 24% (70B, TP 2).
    MAX_TRIED_FACTOR = 2
    # Under an objective, a step computes prompts that much faster than they arrive, and what waits in `DRAIN_S`.
    # Simulated with Azure's conversations and an 8B model on an H200, against the fewest tokens within 10% of the least
    # cost or an eighth of what waits: TTFT P50 0 and -13% (12 and 24 requests a second), P99 +2 and -17%, mean TBT -3
    # and +10%. Instead of all this, as many tokens as pay: TTFT P50 -11 and +2%, mean TBT +10 and +2%, TBT P99 at 12 a
    # second 46 ms instead of 26. With a `DRAIN_S` of 1 s, TTFT P99 at 12 a second: +22%.
    KEEP_UP_FACTOR, DRAIN_S = 1.15, 0.25
    REFRESH_EVERY_STEPS = 32  # steps; the models learn little in between

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        if not settings.models:
            raise ValueError(f"schedule {self.name} needs the stages' cost models")
        self._margin = self.MARGINS[1]
        self._part = 1.0  # fraction of the time that the limits allow
        self._num_begun = 0
        self._most_tokens = self._least_chunk = TILE
        self._sizes = [*(n for n in range(TILE, settings.token_budget, TILE) if n < WAVE or n % WAVE == 0)]
        self._sizes.append(settings.token_budget)
        self._arrivals = ArrivalRate()
        self._last = Budget(0)
        self._tbt_slo_s = math.inf
        self._refresh()

    # ------------------------------------------------------------ a pipeline's

    def objective_s(self, in_flight: int) -> float:
        """Seconds that the objective leaves a step on a stage, with `in_flight` of them in flight; infinite without an
        objective."""
        return self._tbt_slo_s * self._margin

    def _allowed_s(self, view: SchedulerView, in_flight: int) -> float:
        """The longest time of the next step."""
        return self.objective_s(in_flight) if view.decoding else math.inf

    def _in_flight(self, view: SchedulerView) -> int:
        """The number of steps to have in flight."""
        return self.most_in_flight

    def _decodes(self, view: SchedulerView) -> Budget:
        """Decodes alone."""
        return Budget(self.settings.token_budget, prompt_tokens=0)

    def _of_prompts(self, tokens: int) -> float:
        """Predicted seconds of a step of prompts alone."""
        shape = BatchShape([(0, tokens)])
        shape.squares = 0
        return self._predict(shape)

    def _average(self, view: SchedulerView, in_flight: int) -> BatchShape:
        """A step with its share of the decodes."""
        return BatchShape.decoding(view.decoding, view.decoding_context)

    def _wanted(self, view: SchedulerView) -> int:
        """Tokens of a step if the objective leaves time for them. Called for each step with prompts.

        Under an objective: with n prompt tokens in a step of T(n) seconds, B tokens that wait take B/n steps, for which
        W waiting sequences wait, and in each of which D decoding ones lose T(n) - T(0). So the least loss is at the
        least (W T(n) + D (T(n) - T(0))) / n. Of all n that keep up with what arrives (`KEEP_UP_FACTOR`, `DRAIN_S`) the
        fewest within `LARGEST_STEP_COST` of it are taken; if none keeps up, those that compute the most a second."""
        if self._tbt_slo_s == math.inf or not view.decoding:
            return self._most_tokens
        average, objective_s = self._average(view, 1), self.objective_s(1)
        decodes_s, sequences = self._predict(average), max(1, view.waiting) + view.decoding
        waiting = view.waiting_tokens + view.blocked_tokens
        due = self.KEEP_UP_FACTOR * self._arrivals.tokens_s + waiting / self.DRAIN_S
        found: list[tuple[int, float, float]] = []  # tokens, prompt tokens per second, loss per prompt token
        for tokens in self._sizes:
            prompts = tokens - average.tokens
            if prompts < TILE // 2:
                continue
            shape = average.copy()
            shape.add(0, prompts)
            shape.squares = average.squares
            seconds = self._predict(shape)
            found.append((tokens, prompts / seconds, (sequences * seconds - view.decoding * decodes_s) / prompts))
            if prompts >= waiting or seconds > objective_s:
                break
        if not found:
            return self._sizes[0]
        if keep_up := [each for each in found if each[1] >= due]:
            least = min(loss for _, _, loss in keep_up)
            return next(tokens for tokens, _, loss in keep_up if loss <= self.LARGEST_STEP_COST * least)
        most = max(rate for _, rate, _ in found)
        return next(tokens for tokens, rate, _ in found if rate * self.LARGEST_STEP_COST >= most)

    def _share(self, waiting: int) -> int:
        """Tokens of a step's part of `waiting` tokens of prompts."""
        return waiting

    # ------------------------------------------------------------ every number of stages

    def finished(self, gap_s: float) -> None:
        if self._tbt_slo_s < math.inf:
            step = self.LATE_STEP * (self.LATE_SHARE - 1 if gap_s > self._tbt_slo_s else self.LATE_SHARE)
            least, _, most = self.MARGINS
            self._margin = min(most, max(least, self._margin * (1 + step)))

    def _budget(self, view: SchedulerView) -> Budget:
        taken = self._last.shape
        if taken.tokens:
            waiting = view.waiting_tokens + view.blocked_tokens
            self._arrivals.see(waiting, taken.tokens - taken.decodes, self._predict(taken))
        self._last = self._sized(view)
        return self._last

    def _sized(self, view: SchedulerView) -> Budget:
        self._num_begun += 1
        if self._num_begun % self.REFRESH_EVERY_STEPS == 0:
            self._refresh(view)
        if view.blocked_tokens:
            self._part = max(self.MIN_PART, self._part * (1 - self.SHRINK_FRACTION))
        elif not view.waiting_tokens:
            self._grow()
        return self._fill(view) if view.waiting_tokens else self._decodes(view)

    def _predict(self, shape: BatchShape) -> float:
        return slowest_s(self.settings.models, shape)

    def _refresh(self, view: SchedulerView | None = None) -> None:
        """Follows what the cost models have learned. `view`: None at the start."""
        costs = [self._of_prompts(tokens) / tokens for tokens in self._sizes]
        least = min(costs)

        def fewest(relative: float) -> int:
            return next(n for n, cost in zip(self._sizes, costs, strict=True) if cost <= relative * least)

        self._most_tokens = self._tried(fewest(self.LARGEST_STEP_COST))
        self._least_chunk = fewest(self.SMALLEST_STEP_COST)
        if (objective := self.settings.objective) is not None:
            iteration_s = self.settings.stages * self._predict(ITERATION) + self.settings.exposed_s
            self._tbt_slo_s = max(objective.tbt_s, objective.iterations * iteration_s)

    def _tried(self, tokens: int) -> int:
        is_known = min(model.most_rows for model in self.settings.models) >= self.MAX_TRIED_FACTOR * tokens
        return tokens if is_known else min(self.MAX_TRIED_FACTOR * tokens, self.settings.token_budget)

    def _fill(self, view: SchedulerView) -> Budget:
        settings, in_flight = self.settings, self._in_flight(view)
        average = self._average(view, in_flight)
        objective_s = self._allowed_s(view, in_flight)
        largest = self._largest(average, objective_s, self._wanted(view))
        target_s = min(objective_s, self._predict(largest) * self.MAX_CONTEXT_FACTOR) * self._part
        # What a step has room for, and its share of all that waits.
        room = largest.tokens - average.tokens
        most = tokens_within(settings.models, average, 0, target_s, min(room, settings.token_budget - average.tokens))
        size = max(self._least_chunk, self._share(view.waiting_tokens + view.blocked_tokens))
        if size >= most:
            size = room
            if not view.blocked_tokens:
                self._grow()
        return self._timed(self._whole(size + average.tokens), target_s)

    def _grow(self) -> None:
        self._part = min(1.0, self._part * (1 + self.GROW_FRACTION))

    def _largest(self, average: BatchShape, objective_s: float, tokens: int) -> BatchShape:
        """The largest step: `tokens`, less as many halves of a `WAVE` as the objective leaves no time for. A quarter of
        a wave takes nearly as long as a half. With that cost simulated, cutting to tiles gives TTFT P50 +4.5% (70B in
        four stages, long prompts); without it, tiles would carry 2% more."""
        while True:
            shape = average.copy()
            shape.add(0, max(self._least_chunk, tokens - average.tokens))
            if tokens <= WAVE or self._predict(shape) <= objective_s:
                return shape
            tokens = max(WAVE, (tokens - 1) // (WAVE // 2) * (WAVE // 2))

    def _timed(self, full: int, target_s: float) -> Budget:
        """All ready decodes, and chunks up to `full` tokens and `target_s`."""
        settings = self.settings
        return TimedBudget(settings.token_budget, settings.models, target_s, full, self._least_chunk)

    def _whole(self, tokens: int) -> int:
        """`tokens` rounded up to whole tiles, or to the size of a CUDA graph. Not rounded: TTFT P50 +3 to 5%."""
        return in_tiles(tokens, up=True) if tokens > TILED_FROM else self.settings.models[0].rows.mixed(tokens)
