"""Schedule `uniform`: micro-batches of equal predicted time, within an objective for the time between tokens (TBT)."""

import math

from pipeline.budget import Budget, EvenDecodes, TimedBudget
from pipeline.chunk import tokens_within
from pipeline.cost import slowest_s
from pipeline.policy import ITERATION, Policy, PolicySettings, SchedulerView
from pipeline.shape import TILE, TILED_FROM, WAVE, BatchShape, in_tiles


class Uniform(Policy):
    """Every micro-batch takes the same predicted time on every stage.

    Chunked prefill as in Sarathi-Serve (https://arxiv.org/abs/2403.02310), but chunks are cut by predicted time instead
    of a number of tokens. The prediction counts the decodes in the same micro-batch and all contexts. S is the number
    of stages.

    Micro-batches in flight, and the time of each (`objective_s`):

    1. A sequence gets its token when its micro-batch has passed all S stages. Its next token finds a place at once if
       S+1 micro-batches are in flight: S on the stages, one on the links or about to begin.
    2. Each micro-batch may therefore take 1/(S+1) of the TBT objective, less a margin. The margin adapts until one
       micro-batch in a hundred is late (`finished`).
    3. Where that time is too short for a `WAVE` of tokens, but 1/S of the objective without the time on links is
       enough, only S are in flight (`_holding_a_wave`). A partial wave wastes more than stages lose by waiting for
       links. The fewer the stages, the larger the difference between the two times.

    Tokens of a micro-batch while prompts wait (`_fill`):

    - If the time allows more than pays: the fewest tokens whose cost per token is within `NEAR` of the least, a
      multiple of `WAVE` (below one, of `TILE`). More would delay tokens, hold more pages and widen the difference to
      micro-batches without prompts.
    - If the time allows less: fewer by whole halves of a `WAVE`.
    - The number of tokens does not depend on the context before them, unless the time exceeds `SLACK` times that
      without context. One tile less changes the time more than attention to a few thousand more tokens.
    - With one stage there is no other stage to be even with. Attention is left out of the cost per token, and sizes
      that were never observed are tried (`TRIED`). Under an objective, a step holds fewer tokens while little waits
      (`ENOUGH`), and up to what the objective allows while much waits (`BACKLOG_ROUNDS`).

    Below these limits:

    - While requests wait for pages, the time shrinks. Shorter rounds end sequences sooner; longer ones would only
      alternate with rounds that have no prompt to compute. The time grows again while much waits that could start, and
      while nothing waits: what comes after a shortage of pages would begin with short micro-batches.
    - While little waits, it is spread over `ROUNDS` rounds of the pipeline, so that sizes follow the load instead of
      jumping with each arrival. Chunks stay large enough that a stage does not mostly read its weights (`FAR`).

    Decodes:

    - While prompts wait, all ready decodes go and chunks fill the remaining time.
    - Without prompts, decodes are shared among as many micro-batches as make the round shortest, such that the
      costliest of these costs the least (`EvenDecodes`).

    When a micro-batch is made: when the first stage is about to need it (`LEAD_S`), not before. A decode that returns
    then waits for one micro-batch, not for all that a burst of prompts would have queued. With decodes only, the oldest
    micro-batch counts as ended when it is about to end. The next one sets out with its tokens, which go from the last
    stage to the first on the devices, without a host in between.
    """

    name = "uniform"
    predicts = True
    chunks_follow = True
    # What each is worth is in docs/MECHANISMS.md, with how it was measured. Here: simulated, without it.
    LEAD_S = 0.003  # with jitter and outliers, 70B in four stages: TTFT P50 +10%, P99 +5%; without them, less than 1%
    ROUNDS = 2  # one round: TTFT P50 -2 to +4% by load, one point more bubble
    # Fraction of micro-batches that may be late; step of the margin for a late one. A fixed margin: TTFT P50 +8% (8B on
    # one GPU, long prompts).
    LATE, LATE_STEP = 0.01, 0.02
    MARGINS = 0.6, 0.92, 0.97  # least, initial, most
    # `_part`: decrease while requests wait for pages, increase, least. With room for 60,000 tokens in the KV cache:
    # TTFT P50 +18%, 5% fewer tokens a second.
    SHRINK, GROW, LEAST_PART = 0.02, 0.004, 0.2
    # Longest time of a micro-batch, relative to the same tokens without context. Without a limit and without an
    # objective, prompts of 30,000 tokens: TBT P99 +59%, TTFT as before. A quarter of a `WAVE` less saves only half of
    # its share of the time: simulated with that cost, 1.15 carries 2.5% less than 1.35, with more bubbles.
    SLACK = 1.35
    # Cost per token in the largest and in the smallest micro-batch, relative to the least. Costs are known to about 1%:
    # with 1.01, the choice varied between 512 and 3,072 tokens, and the rare large ones delayed all sequences. As many
    # as the budget allows, without an objective: TTFT P50 +59% (70B in four stages) and +11% (8B on one GPU). A tile as
    # the smallest, at half the capacity: TTFT P50 +6 to +26%.
    NEAR, FAR = 1.02, 1.5
    # One stage: steps of up to `TRIED` times the tokens that seem enough are run until one has been observed. Several
    # ranks hide their all-reduces only in long steps, which a model that has seen no such step does not know. Not to be
    # judged in the simulator, which has no such all-reduces.
    TRIED = 2
    # One stage under an objective: relative cost per token of a step while little waits, and the number of steps in
    # which a larger backlog is to be computed. Fewer steps make first tokens come sooner and all others later. Tuned in
    # the simulator on Azure's conversations, 24 a second, with the costs of an 8B model on an H200. Without them there:
    # TTFT P50 -8%, mean TBT +7%.
    ENOUGH, BACKLOG_ROUNDS = 1.1, 8
    REFRESH_EVERY = 32  # micro-batches; the models learn little in between

    def __init__(self, settings: PolicySettings) -> None:
        super().__init__(settings)
        if not settings.models:
            raise ValueError(f"schedule {self.name} needs the stages' cost models")
        if settings.stages > 1:
            self.most_in_flight = settings.stages + 1
        self._margin = self.MARGINS[1]
        self._part = 1.0  # fraction of the time that the limits allow
        self._num_begun = 0
        self._filled_in_flight = self.most_in_flight  # while prompts wait
        self._most_tokens = self._enough_tokens = self._least_chunk = TILE
        self._tbt_slo_s = math.inf
        self._refresh()

    def objective_s(self, in_flight: int) -> float:
        """Seconds that the objective leaves a micro-batch on a stage with `in_flight` of them; infinite without an
        objective."""
        settings = self.settings
        round_s = self._tbt_slo_s * self._margin
        if settings.stages == 1:
            return round_s
        return round_s / in_flight if in_flight > settings.stages else (round_s - settings.exposed_s) / in_flight

    def ask_again_s(self, view: SchedulerView, is_idle: bool) -> float:
        if self.settings.stages == 1:
            return math.inf
        due_s = view.ahead_s
        if is_idle or self._is_full(view):  # nothing to do until tokens come back
            due_s = max(due_s, view.returning_s if self._hands_over(view) else math.inf)
        return max(0.0, due_s - self.LEAD_S)

    def may_overlap_oldest(self, view: SchedulerView) -> bool:
        return self._hands_over(view) and view.returning_s <= self.LEAD_S

    def _hands_over(self, view: SchedulerView) -> bool:
        """Whether the next micro-batch may set out with the tokens of the oldest before the host knows them."""
        return not view.waiting_tokens or self._in_flight(view) < self.most_in_flight

    def finished(self, gap_s: float) -> None:
        if self._tbt_slo_s < math.inf:
            step = self.LATE_STEP * (self.LATE - 1 if gap_s > self._tbt_slo_s else self.LATE)
            least, _, most = self.MARGINS
            self._margin = min(most, max(least, self._margin * (1 + step)))

    def _has_place(self, view: SchedulerView) -> bool:
        return not self._is_full(view) and (self.settings.stages == 1 or view.ahead_s <= self.LEAD_S)

    def _is_full(self, view: SchedulerView) -> bool:
        return len(view.in_flight) >= self._in_flight(view)

    def _budget(self, view: SchedulerView) -> Budget:
        self._num_begun += 1
        if self._num_begun % self.REFRESH_EVERY == 0:
            self._refresh()
            self._filled_in_flight = self._holding_a_wave(view)
        if view.blocked_tokens:
            self._part = max(self.LEAST_PART, self._part * (1 - self.SHRINK))
        elif not view.waiting_tokens:
            self._grow()
        if view.waiting_tokens:
            return self._fill(view)
        settings = self.settings
        if settings.stages == 1:
            return Budget(settings.token_budget, prompt_tokens=0)
        in_flight = self._in_flight(view)
        unbuilt = max(1, in_flight - len(view.in_flight))
        decodes = view.decoding, view.decoding_context
        return EvenDecodes(settings.token_budget, settings.models, *decodes, in_flight, unbuilt)

    def _predict(self, shape: BatchShape) -> float:
        return slowest_s(self.settings.models, shape)

    def _refresh(self) -> None:
        budget = self.settings.token_budget
        sizes = [*(n for n in range(TILE, budget, TILE) if n < WAVE or n % WAVE == 0), budget]
        costs = [self._of_prompts(tokens) / tokens for tokens in sizes]
        least = min(costs)
        most = next(n for n, cost in zip(sizes, costs, strict=True) if cost <= self.NEAR * least)
        self._least_chunk = next(n for n, cost in zip(sizes, costs, strict=True) if cost <= self.FAR * least)
        if self.settings.stages == 1 and min(model.most_rows for model in self.settings.models) < self.TRIED * most:
            most = min(self.TRIED * most, budget)
        self._most_tokens = most
        self._enough_tokens = next(n for n, cost in zip(sizes, costs, strict=True) if cost <= self.ENOUGH * least)
        if (objective := self.settings.objective) is not None:
            iteration_s = self.settings.stages * self._predict(ITERATION) + self.settings.exposed_s
            self._tbt_slo_s = max(objective.tbt_s, objective.iterations * iteration_s)

    def _of_prompts(self, tokens: int) -> float:
        """Predicted seconds of a micro-batch of prompts alone. With one stage, attention is left out: its sum over a
        prompt is the same in any number of steps. In a pipeline attention makes large micro-batches unequal, so it
        counts."""
        shape = BatchShape([(0, tokens)])
        if self.settings.stages == 1:
            shape.squares = 0
        return self._predict(shape)

    def _average(self, view: SchedulerView, in_flight: int) -> BatchShape:
        """A micro-batch with its even share of the decodes. With one stage, each has all of them."""
        if self.settings.stages == 1:
            in_flight = 1
        return BatchShape.decoding(-(-view.decoding // in_flight), view.decoding_context // in_flight)

    def _fill(self, view: SchedulerView) -> Budget:
        settings, in_flight = self.settings, self._in_flight(view)
        average, objective_s = self._average(view, in_flight), self.objective_s(in_flight)
        largest = self._largest(average, objective_s, self._wanted(view))
        target_s = min(objective_s, self._predict(largest) * self.SLACK) * self._part
        # What a micro-batch has room for, and its share of all that waits.
        room = largest.tokens - average.tokens
        most = tokens_within(settings.models, average, 0, target_s, min(room, settings.token_budget - average.tokens))
        parts = self.ROUNDS * settings.stages if settings.stages > 1 else 1
        size = max(self._least_chunk, -(-(view.waiting_tokens + view.blocked_tokens) // parts))
        if size >= most:
            size = room
            if not view.blocked_tokens:
                self._grow()
        return self._timed(self._whole(size + average.tokens), target_s)

    def _grow(self) -> None:
        self._part = min(1.0, self._part * (1 + self.GROW))

    def _holding_a_wave(self, view: SchedulerView) -> int:
        """`most_in_flight`, or one less where only that leaves each micro-batch the time for a `WAVE` of tokens. Always
        `most_in_flight`: TTFT P99 +2 to 3%, TBT P99 +8 to 12% (Falcon-180B in two stages)."""
        most = self.most_in_flight
        if self.settings.stages == 1 or self._most_tokens < WAVE:  # one stage, or less than a wave is worth its time
            return most
        # As at the end of a prompt as long as the average context of the decodes.
        start = view.decoding_context // max(1, view.decoding)

        def hold(in_flight: int) -> bool:
            shape = self._average(view, in_flight)
            shape.add(start, max(self._least_chunk, WAVE - shape.tokens))
            return self._predict(shape) <= self.objective_s(in_flight)

        return most - 1 if not hold(most) and hold(most - 1) else most

    def _wanted(self, view: SchedulerView) -> int:
        """Tokens of a micro-batch if the objective leaves time for them."""
        if self.settings.stages > 1 or self._tbt_slo_s == math.inf:
            return self._most_tokens
        backlog = (view.waiting_tokens + view.blocked_tokens) // self.BACKLOG_ROUNDS
        return min(self.settings.token_budget, max(self._enough_tokens, in_tiles(backlog, up=True)))

    def _largest(self, average: BatchShape, objective_s: float, tokens: int) -> BatchShape:
        """The largest micro-batch: `tokens`, less as many halves of a `WAVE` as the objective leaves no time for. A
        quarter of a wave takes nearly as long as a half. With that cost simulated, cutting to tiles gives TTFT P50
        +4.5% (70B in four stages, long prompts); without it, tiles would carry 2% more."""
        while True:
            shape = average.copy()
            shape.add(0, max(self._least_chunk, tokens - average.tokens))
            if tokens <= WAVE or self._predict(shape) <= objective_s:
                return shape
            tokens = max(WAVE, (tokens - 1) // (WAVE // 2) * (WAVE // 2))

    def _timed(self, full: int, target_s: float) -> Budget:
        """All ready decodes, and chunks up to `full` tokens and `target_s`."""
        return TimedBudget(self.settings.token_budget, self.settings.models, target_s, full)

    def _whole(self, tokens: int) -> int:
        """`tokens` rounded up to whole tiles, or to the size of a CUDA graph. Not rounded: TTFT P50 +3 to 5%."""
        return in_tiles(tokens, up=True) if tokens > TILED_FROM else self.settings.models[0].rows.mixed(tokens)

    def _typical(self, view: SchedulerView, in_flight: int) -> BatchShape | None:
        """Each of `in_flight` micro-batches; None where each is as full as it may be, so that more of them cost
        nothing."""
        return None if view.waiting_tokens else self._average(view, in_flight)

    def _in_flight(self, view: SchedulerView) -> int:
        """The number of micro-batches to have in flight. Where little fills them, one more than there are stages hides
        `exposed_s` but adds the constant cost of a step: the number with the shorter round is chosen. Always one more:
        TBT P50 +21% (70B in four stages). Never one more: TTFT P50 +10%."""
        settings, most = self.settings, self.most_in_flight
        if settings.stages == 1:
            return most

        def round_s(in_flight: int) -> float:
            if (shape := self._typical(view, in_flight)) is None:
                return math.inf
            seconds = self._predict(shape)
            return max(in_flight * seconds, settings.stages * seconds + settings.exposed_s)

        fewer_s, most_s = round_s(most - 1), round_s(most)
        if most_s == math.inf:
            return self._filled_in_flight
        return most - 1 if fewer_s <= most_s else most
