"""Micro-batches that take the same time."""

import math

from pipeline.budget import UNLIMITED, Budget, EvenDecodes, Timed
from pipeline.chunk import tokens_within
from pipeline.cost import slowest_s
from pipeline.policy import Policy, Settings, View
from pipeline.shape import TILE, TILED_FROM, WAVE, BatchShape, in_tiles


class Uniform(Policy):
    """Every micro-batch takes the same time on every stage: chunks are cut by predicted cost, with the decodes beside
    them and all contexts counted.

    How long that is: a token comes back when its micro-batch has been through S stages, and the next one has a place
    at once where S + 1 are in flight (S on stages, one on links or about to begin). So each may take 1/(S + 1) of the
    objective for the time between tokens, less a margin, which moves until one micro-batch in a hundred is late. Where
    that is too short for a `WAVE` of tokens, and 1/S, less the ways between stages, is not, only S are in flight: a
    part of a wave wastes more than stages lose that wait for those ways. The fewer the stages, the more there is
    between the two.

    Where that leaves more time than pays, it holds the fewest tokens whose cost each is near the least (`NEAR`), of
    many a multiple of `WAVE`: more would only make tokens late, pages scarce, and the difference to micro-batches
    without prompts large. Where it leaves less, it holds as many halves of a wave less. So many go whatever is before
    them, unless that takes more than `SLACK` times as long: a tile less makes a larger difference than attention to a
    few thousand tokens more. One stage, which need not be even with another, leaves attention out of what a token
    costs, and tries what it never tried (`TRIED`). Below these limits,

    - while requests wait for pages, the time shrinks: shorter rounds end sequences sooner, and longer ones would only
      alternate with rounds that have no prompt to compute. It grows again while much waits that could start;
    - while little waits, it is spread over `ROUNDS` rounds of the pipeline, so that sizes follow the load instead of
      jumping with each arrival, but in no chunks so small that a stage mostly reads its weights.

    Decodes: while there are prompts to fill up with, those that are ready go, and chunks even out the rest. They can
    for half of a micro-batch: of more decodes, which whatever delays a micro-batch brings together for good, no more go
    than somewhat over their part (`UNEVEN`), and the others in the next. Where there are no prompts, they are shared
    out over as many micro-batches as makes the round shortest, so that the costliest of these costs the least
    (`EvenDecodes`).

    When: a micro-batch is made when the first stage is about to need it (`LEAD_S`) and not before. A decode that comes
    back then waits for one batch, not for all that a burst of prompts would have put in front of it. Where there are
    decodes only, the oldest micro-batch counts as ended when it is about to end: the next one sets out with its tokens,
    which pass from the last stage to the first, and no host stands between.
    """

    name = "uniform"
    predicts = True
    chunks_follow = True
    LEAD_S = 0.003
    ROUNDS = 2
    LATE, LATE_STEP = 0.01, 0.02  # the part of micro-batches that may be late; how far one that is moves the margin
    MARGINS = 0.6, 0.97
    SHRINK, GROW, LEAST_PART = 0.02, 0.004, 0.2  # a micro-batch, while requests wait for pages; while much waits
    # The time of a micro-batch, that of the same tokens with nothing before them being 1. A quarter of a `WAVE` less
    # saves half of what it is worth: simulated with that, 1.15 carries 2.5% less than 1.35, and has more bubbles.
    SLACK = 1.35
    # What a token may cost, the least being 1, in the largest micro-batch and in the smallest. Costs are known to about
    # 1%: within 1.01, sizes of 512 to 3,072 tokens changed places, and the rare large ones were everybody's delay.
    NEAR, FAR = 1.02, 1.5
    # Times what seems to be enough tokens on one stage: until so many have been computed at once, they are. Several
    # ranks hide their sums in long steps alone, which a model that has seen no such step does not know.
    TRIED = 2
    UNEVEN = 1.25  # decodes of a micro-batch that they are the most of, their part being 1
    REFRESH_EVERY = 32  # micro-batches: the models learn little in between

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        if not settings.models:
            raise ValueError(f"schedule {self.name} needs the stages' cost models")
        if settings.stages > 1:
            self.most_in_flight = settings.stages + 1
        self._margin = 0.92
        self._part = 1.0  # of the time that the objective allows
        self._num_begun = 0
        self._filled_in_flight = self.most_in_flight  # while there are prompts to fill micro-batches with
        self._most_tokens = self._least_chunk = TILE
        self._refresh()

    def objective_s(self, in_flight: int) -> float:
        """The time that the objective leaves each of so many micro-batches on a stage, infinite without one."""
        settings = self.settings
        if settings.tbt_slo_s is None:
            return math.inf
        round_s = settings.tbt_slo_s * self._margin
        if settings.stages == 1:
            return round_s
        return round_s / in_flight if in_flight > settings.stages else (round_s - settings.exposed_s) / in_flight

    def ask_again_s(self, view: View, is_idle: bool) -> float:
        if self.settings.stages == 1:
            return math.inf
        due_s = view.ahead_s
        if is_idle or self._is_full(view):  # until tokens come back
            due_s = max(due_s, view.returning_s if self._hands_over(view) else math.inf)
        return max(0.0, due_s - self.LEAD_S)

    def counts_as_ended(self, view: View) -> bool:
        return self._hands_over(view) and view.returning_s <= self.LEAD_S

    def _hands_over(self, view: View) -> bool:
        """Whether the next micro-batch may set out with the tokens of the oldest before these are known."""
        return not view.waiting_tokens or self._in_flight(view) < self.most_in_flight

    def finished(self, gap_s: float) -> None:
        objective = self.settings.tbt_slo_s
        if objective is not None:
            step = self.LATE_STEP * (self.LATE - 1 if gap_s > objective else self.LATE)
            least, most = self.MARGINS
            self._margin = min(most, max(least, self._margin * (1 + step)))

    def _has_place(self, view: View) -> bool:
        return not self._is_full(view) and (self.settings.stages == 1 or view.ahead_s <= self.LEAD_S)

    def _is_full(self, view: View) -> bool:
        return len(view.in_flight) >= self._in_flight(view)

    def _budget(self, view: View) -> Budget:
        self._num_begun += 1
        if self._num_begun % self.REFRESH_EVERY == 0:
            self._refresh()
            self._filled_in_flight = self._holding_a_wave(view)
        if view.blocked_tokens:
            self._part = max(self.LEAST_PART, self._part * (1 - self.SHRINK))
        if view.waiting_tokens:
            return self._fill(view)
        settings = self.settings
        if settings.stages == 1:
            return Budget(settings.token_budget, prompt_tokens=0)
        in_flight = self._in_flight(view)
        places = max(1, in_flight - len(view.in_flight))
        decodes = view.decoding, view.decoding_context
        return EvenDecodes(settings.token_budget, settings.models, *decodes, in_flight, places)

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

    def _of_prompts(self, tokens: int) -> float:
        """Seconds of a micro-batch of prompts; on one stage without attention, of which a prompt has as much in however
        many steps. In a pipeline that makes the large ones unequal, and counts."""
        shape = BatchShape([(0, tokens)])
        if self.settings.stages == 1:
            shape.squares = 0
        return self._predict(shape)

    def _average(self, view: View, in_flight: int) -> BatchShape:
        """A micro-batch with its part of the decodes. Where there is one stage, all are in each."""
        if self.settings.stages == 1:
            in_flight = 1
        return BatchShape.decoding(-(-view.decoding // in_flight), view.decoding_context // in_flight)

    def _fill(self, view: View) -> Budget:
        settings, in_flight = self.settings, self._in_flight(view)
        average, objective_s = self._average(view, in_flight), self.objective_s(in_flight)
        largest = self._largest(average, objective_s)
        target_s = min(objective_s, self._predict(largest) * self.SLACK) * self._part
        # What a micro-batch has room for, and its part of all that waits.
        room = largest.tokens - average.tokens
        most = tokens_within(settings.models, average, 0, target_s, min(room, settings.token_budget - average.tokens))
        parts = self.ROUNDS * settings.stages if settings.stages > 1 else 1
        size = max(self._least_chunk, -(-(view.waiting_tokens + view.blocked_tokens) // parts))
        if size >= most:
            size = room
            if not view.blocked_tokens:
                self._part = min(1.0, self._part * (1 + self.GROW))
        return self._timed(average, self._whole(size + average.tokens), target_s)

    def _holding_a_wave(self, view: View) -> int:
        """The most micro-batches in flight, or one less where that makes the difference for holding a `WAVE`."""
        most = self.most_in_flight
        if self.settings.stages == 1 or self._most_tokens < WAVE:  # fewer pay, or no more may go
            return most
        # To the end of prompts that are as long as those that came.
        start = view.decoding_context // max(1, view.decoding)

        def hold(in_flight: int) -> bool:
            shape = self._average(view, in_flight)
            shape.add(start, max(self._least_chunk, WAVE - shape.tokens))
            return self._predict(shape) <= self.objective_s(in_flight)

        return most - 1 if not hold(most) and hold(most - 1) else most

    def _largest(self, average: BatchShape, objective_s: float) -> BatchShape:
        """What a micro-batch is to hold at most: as many tokens as pay, or as many halves of a `WAVE` less as the
        objective leaves no time for. A quarter of one takes nearly as long as a half."""
        tokens = self._most_tokens
        while True:
            shape = average.copy()
            shape.add(0, max(self._least_chunk, tokens - average.tokens))
            if tokens <= WAVE or self._predict(shape) <= objective_s:
                return shape
            tokens = max(WAVE, (tokens - 1) // (WAVE // 2) * (WAVE // 2))

    def _timed(self, average: BatchShape, full: int, target_s: float) -> Budget:
        """Decodes, somewhat more than their part at most, and chunks beside them."""
        settings = self.settings
        decodes = max(full // 2, math.ceil(self.UNEVEN * average.tokens)) if settings.stages > 1 else UNLIMITED
        return Timed(settings.token_budget, settings.models, target_s, full, decodes)

    def _whole(self, tokens: int) -> int:
        """As many, up to whole tiles, or to the size of a graph."""
        return in_tiles(tokens, up=True) if tokens > TILED_FROM else self.settings.models[0].rows.mixed(tokens)

    def _typical(self, view: View, in_flight: int) -> BatchShape | None:
        """What each of so many micro-batches holds; None where that is as much as it may, so that more of them cost
        nothing."""
        return None if view.waiting_tokens else self._average(view, in_flight)

    def _in_flight(self, view: View) -> int:
        """How many micro-batches there are to be. Where there is little to fill them with, one more than stages hides
        `exposed_s` and costs the constant part of a step once more: whichever gives the shorter round."""
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
