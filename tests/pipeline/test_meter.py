"""Time lines drawn by hand, of which the answer is known."""

import json
import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.meter import CAUSES, Meter, Span
from pipeline.shape import BatchShape

PROMPT = BatchShape([(0, 500)])
DECODES = BatchShape([(100, 1)] * 8)


class Line:
    """Feeds a meter the way a pipeline would; times in seconds. `took`: the time on each stage; `ways`: the time on
    each link after it."""

    def __init__(self, stages, ways=0.0):
        self.meter = Meter(stages)
        self.ways = ways
        self.free = [0.0] * stages
        self.step = 0
        self.ends = {}

    def send(self, at, shape, *took, decode_s=0.0, plan_s=0.0, host_s=0.0, after=None):
        self.step += 1
        self.meter.planned(self.step, at, shape, decode_s, after)
        received = at + plan_s
        if after is not None:
            received = max(received, self.ends[after] + self.ways)
        for stage, seconds in enumerate(took):
            begin = max(received + host_s, self.free[stage])
            self.free[stage] = begin + seconds
            self.meter.ran(self.step, stage, Span(received, begin, begin + seconds))
            received = begin + seconds + self.ways
        self.ends[self.step] = self.free[-1]
        return self.free[-1]

    def finish(self, *steps):
        for step in steps:
            self.meter.finished(step)

    def gaps(self, stage):
        return {cause: seconds for cause, seconds in self.meter.gap_s[stage].items() if seconds > 1e-9}


def test_equal_micro_batches_leave_no_gaps():
    line = Line(2)
    for _ in range(5):
        line.send(0.0, PROMPT, 1.0, 1.0)
    line.finish(*range(1, 6))
    assert line.gaps(0) == line.gaps(1) == {}
    assert line.meter.compute_s == [5.0, 5.0]
    assert line.meter.fractions()["compute"] == 1.0 and line.meter.bubble() == 0.0


def test_a_prompt_behind_decodes_keeps_the_next_stage_waiting():
    line = Line(2)
    line.send(0.0, DECODES, 1.0, 1.0)
    line.send(0.0, PROMPT, 3.0, 3.0)  # ends on stage 0 at 4, when stage 1 has been free since 2
    line.finish(1, 2)
    assert line.gaps(1) == {"prefill_beside_decode": pytest.approx(2.0)}
    assert line.gaps(0) == {}


def test_prompts_of_unequal_length():
    line = Line(2)
    line.send(0.0, BatchShape([(0, 100)]), 1.0, 1.0)
    line.send(0.0, BatchShape([(0, 300)]), 3.0, 3.0)
    line.finish(1, 2)
    assert line.gaps(1) == {"unequal_prefill": pytest.approx(2.0)}


def test_decodes_of_unequal_context():
    line = Line(2)
    line.send(0.0, DECODES, 1.0, 1.0, decode_s=0.2)
    line.send(0.0, BatchShape([(9000, 1)] * 8), 2.0, 2.0, decode_s=1.2)
    # Beside chunks of prompts too, where decodes make most of the difference.
    line.send(0.0, BatchShape([(0, 200), (9000, 1)]), 3.0, 3.0, decode_s=2.0)
    line.finish(1, 2, 3)
    assert line.gaps(1) == {"unequal_context": pytest.approx(1.0), "prefill_beside_decode": pytest.approx(1.0)}
    line = Line(2)
    line.send(0.0, BatchShape([(0, 200), (50, 1)]), 1.0, 1.0, decode_s=0.1)
    line.send(0.0, BatchShape([(0, 200), (9000, 1)]), 2.0, 2.0, decode_s=1.0)
    line.finish(1, 2)
    assert line.gaps(1) == {"unequal_context": pytest.approx(1.0)}


def test_stages_that_take_unequal_times_for_the_same():
    """The second takes half as long, and waits for the rest of each round; for the prompt it waits longer."""
    line = Line(2)
    for shape, seconds in ((DECODES, 2.0), (DECODES, 2.0), (PROMPT, 6.0)):
        line.send(0.0, shape, seconds, seconds / 2)
    line.finish(1, 2, 3)
    # From 3 to 4: 1 s of the second. From 5 to 10: of the third's 6 s 3 s would have been its own, 1 s the second's.
    assert line.gaps(1) == {"unequal_stages": pytest.approx(1.0 + 3.0), "prefill_beside_decode": pytest.approx(2.0)}
    assert line.gaps(0) == {}


def test_a_slow_last_stage_makes_the_first_wait_for_a_place():
    line = Line(2)
    ends = [line.send(0.0, DECODES, 1.0, 2.0), line.send(0.0, DECODES, 1.0, 2.0)]
    for step in range(1, 5):
        line.finish(step)
        ends.append(line.send(ends[step - 1], DECODES, 1.0, 2.0))
    line.finish(5, 6)
    # It waits from 2 to 3, and then a second of each round of 2.
    assert line.gaps(0) == {"unequal_stages": pytest.approx(4.0)}
    assert line.gaps(1) == {}


def test_a_gap_moves_down_with_its_cause():
    line = Line(3)
    line.send(0.0, DECODES, 1.0, 1.0, 1.0)
    line.send(0.0, PROMPT, 3.0, 3.0, 3.0)
    line.finish(1, 2)
    # Stage 1 waits from 2 to 4. Stage 2 waits from 3 to 7: two seconds are that gap, two the prompt's time on stage 1.
    assert line.gaps(1) == {"prefill_beside_decode": pytest.approx(2.0)}
    assert line.gaps(2) == {"prefill_beside_decode": pytest.approx(4.0)}


def test_ways_are_communication_and_make_the_first_stage_wait():
    """Two stages, two in flight, equal steps, half a second on the link: each round is 2.5 seconds for 2 of work."""
    line = Line(2, ways=0.5)
    ends = [line.send(0.0, PROMPT, 1.0, 1.0), line.send(0.0, PROMPT, 1.0, 1.0)]
    for step in range(1, 9):
        line.finish(step)
        ends.append(line.send(ends[step - 1], PROMPT, 1.0, 1.0))
    line.finish(9, 10)
    # Both stages wait half a second in each of the four rounds.
    for stage in (0, 1):
        assert line.gaps(stage) == {"communication": pytest.approx(4 * 0.5)}


def two_in_flight(ways, last_s):
    """Ten micro-batches of decodes through two stages, of which the first takes a second for each."""
    line = Line(2, ways)
    ends = [line.send(0.0, DECODES, 1.0, last_s), line.send(0.0, DECODES, 1.0, last_s)]
    for step in range(1, 9):
        line.finish(step)
        ends.append(line.send(ends[step - 1] + ways, DECODES, 1.0, last_s))
    line.finish(9, 10)
    return line


def test_ways_are_no_cause_where_the_slowest_stage_did_not_wait_for_them():
    """The last stage takes twice as long as the first, and has always got the next one when it is done."""
    line = two_in_flight(ways=0.25, last_s=2.0)
    assert line.gaps(1) == {}
    # It waits from 2 to 3.5, and then a second of each round of 2: on links there is a quarter of that each way.
    assert line.gaps(0) == {"unequal_stages": pytest.approx(8.0), "communication": pytest.approx(0.5)}


def test_ways_are_a_cause_as_far_as_the_slowest_stage_waited_for_them():
    line = two_in_flight(ways=1.0, last_s=1.5)
    # A round takes 4.5 s, for two of 1.5 s on the last stage. That one waits 1.5 s in each of four, a little of the
    # first while the pipeline fills; the first stage 2.5 s, and half a second more to begin with.
    assert line.gaps(1) == {"communication": pytest.approx(4 * 1.5 - 0.1), "unequal_stages": pytest.approx(0.1)}
    assert line.gaps(0) == {"communication": pytest.approx(4 * 1.5 + 0.5), "unequal_stages": pytest.approx(4 * 1.0)}


def test_a_slow_micro_batch_makes_the_first_stage_wait_for_a_place():
    line = Line(2)
    line.send(0.0, PROMPT, 3.0, 3.0)
    line.send(0.0, DECODES, 1.0, 1.0)  # stage 0 until 4
    line.finish(1)  # at 6
    line.send(6.0, DECODES, 1.0, 1.0)
    line.finish(2, 3)
    assert line.gaps(0) == {"prefill_beside_decode": pytest.approx(2.0)}


def test_a_late_plan_and_a_late_host():
    line = Line(1)
    line.send(0.0, DECODES, 1.0)
    line.send(1.5, DECODES, 1.0, plan_s=0.2, host_s=0.1)
    line.finish(1, 2)
    gaps = line.gaps(0)
    # The plan was made half a second after the last end, by the host that took its tokens, and came a fifth later.
    assert gaps == {"host": pytest.approx(0.1 + 0.5), "communication": pytest.approx(0.2)}


def test_a_host_that_holds_up_the_last_stage_holds_up_the_first():
    meter = Meter(2)
    # Two in flight; the last stage begins each half a second after it could, so that there is a place a second late.
    for step in (1, 2):
        meter.planned(step, 0.0, DECODES, 0.0)
        meter.ran(step, 0, Span(0.0, step - 1.0, step))
    meter.ran(1, 1, Span(1.0, 1.5, 2.5))
    meter.ran(2, 1, Span(2.0, 3.0, 4.0))
    meter.finished(1)
    meter.planned(3, 2.5, DECODES, 0.0)
    meter.ran(3, 0, Span(2.5, 2.5, 3.5))
    meter.ran(3, 1, Span(3.5, 4.5, 5.5))
    meter.finished(2)
    meter.finished(3)
    waits = {cause: seconds for cause, seconds in meter.gap_s[0].items() if seconds}
    assert waits == {"host": pytest.approx(0.5)}
    assert {cause for cause, seconds in meter.gap_s[1].items() if seconds} == {"host"}


def test_a_plan_that_is_there_before_its_tokens_waits_for_those():
    line = Line(2, ways=0.1)
    line.send(0.0, DECODES, 1.0, 1.0)
    line.send(0.0, DECODES, 1.0, 1.0)
    line.send(1.9, DECODES, 1.0, 1.0, after=1)  # the first one's tokens leave the last stage at 2.1
    line.send(2.9, DECODES, 1.0, 1.0, after=2)
    assert line.meter.sent_s(3) == pytest.approx(1.9), "the first has not ended"
    line.finish(1, 2)
    assert line.meter.sent_s(3) == pytest.approx(2.1)
    line.finish(3, 4)
    assert line.gaps(0) == {"communication": pytest.approx(0.2)}
    assert line.meter.compute_s == [4.0, 4.0]


def test_nothing_to_do_and_filling_the_pipeline_again():
    line = Line(2)
    line.send(0.0, PROMPT, 1.0, 1.0)
    line.meter.nothing(0.5, "nothing_to_do")
    line.finish(1)
    line.send(10.0, PROMPT, 1.0, 1.0)
    line.send(10.0, PROMPT, 1.0, 1.0)
    line.finish(2, 3)
    assert line.gaps(0) == {"nothing_to_do": pytest.approx(9.0)}
    assert line.gaps(1) == {"nothing_to_do": pytest.approx(8.0), "warm_up": pytest.approx(1.0)}
    assert line.meter.bubble() == pytest.approx(1 / 7)


def test_a_lone_sequence_leaves_the_other_stages_nothing_to_do():
    line = Line(2)
    at = 0.0
    for step in range(1, 4):
        line.meter.nothing(at, "nothing_to_do")
        at = line.send(at, DECODES, 1.0, 1.0)
        line.meter.nothing(at - 2.0, "nothing_to_do")
        line.finish(step)
    assert line.gaps(0) == line.gaps(1) == {"nothing_to_do": pytest.approx(2.0)}
    assert line.meter.bubble() == 0.0


def test_all_sequences_in_one_micro_batch_are_a_bubble():
    line = Line(2)
    at = 0.0
    for step in range(1, 4):
        at = line.send(at, DECODES, 1.0, 1.0)
        line.meter.nothing(at - 2.0, "too_few_micro_batches")
        line.finish(step)
    assert line.gaps(0) == line.gaps(1) == {"too_few_micro_batches": pytest.approx(2.0)}
    assert line.meter.bubble() == pytest.approx(0.4)


def test_records_may_come_after_the_tokens_and_failed_steps_never():
    meter = Meter(2)
    for step in (1, 2, 3):
        meter.planned(step, 0.0, PROMPT, 0.0)
    meter.ran(1, 1, Span(1.0, 1.0, 2.0))
    meter.finished(1)
    meter.finished(2, computed=False)
    meter.finished(3)
    assert meter.num_batches == 0
    meter.ran(1, 0, Span(0.0, 0.0, 1.0))
    meter.ran(3, 0, Span(0.0, 1.0, 2.0))
    meter.ran(3, 1, Span(2.0, 2.0, 3.0))
    meter.ran(2, 1, Span(2.0, 2.0, 3.0))  # unknown by now
    assert meter.num_batches == 2 and meter.compute_s == [2.0, 2.0]


def test_before_the_first_gap_there_is_nothing_to_say():
    meter = Meter(2)
    assert meter.fractions() == {} and math.isnan(meter.bubble())


@given(
    st.lists(
        st.tuples(
            st.sampled_from([PROMPT, DECODES]),
            st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3),
            st.floats(0.0, 0.5),
            st.floats(0.0, 2.0),
            st.sampled_from([None, "nothing_to_do", "too_few_micro_batches"]),
        ),
        min_size=2,
        max_size=12,
    ),
    st.floats(0.0, 0.5),
)
def test_every_second_has_one_cause(batches, ways):
    """Whatever the time line: computing and gaps of a stage add up to the time from its first begin to its last end."""
    line = Line(3, ways)
    at = 0.0
    for shape, took, decode_s, later, cause in batches:
        line.send(at, shape, *took, decode_s=decode_s, plan_s=0.05)
        if cause:
            line.meter.nothing(at + later / 2, cause)
        at += later
        if line.step > 3:
            line.finish(line.step - 3)
    line.finish(*range(max(1, line.step - 2), line.step + 1))
    trace = [event for event in line.meter.trace()["traceEvents"] if event["ph"] == "X"]
    for stage in range(3):
        assert all(seconds >= -1e-12 for seconds in line.meter.gap_s[stage].values())
        total = line.meter.compute_s[stage] + sum(line.meter.gap_s[stage].values())
        events = [event for event in trace if event["pid"] == stage]
        first = min(event["ts"] for event in events)
        assert total == pytest.approx(line.free[stage] - first / 1e6)
    assert sum(line.meter.fractions().values()) == pytest.approx(1.0)
    assert sum(line.meter.fractions(0).values()) == pytest.approx(1.0)


def test_a_trace_that_perfetto_opens():
    line = Line(2)
    line.send(0.0, DECODES, 1.0, 1.0)
    line.send(0.0, BatchShape([(0, 500), (3, 1)]), 3.0, 3.0)
    line.finish(1, 2)
    events = json.loads(line.meter.trace_json())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    waits = [event for event in events if event["tid"] == 1 and event["ph"] == "X"]
    [wait] = waits
    assert (wait["name"], wait["pid"], wait["ts"], wait["dur"]) == ("prefill_beside_decode", 1, 2e6, 2e6)
    names = {event["name"] for event in events if event["ph"] == "X" and event["tid"] == 0}
    assert names == {"decode 1", "mixed 2"}


def steps(trace):
    return [event["args"]["step"] for event in trace["traceEvents"] if "step" in event["args"]]


def test_counting_can_begin_anew():
    line = Line(1)
    line.send(0.0, DECODES, 1.0)
    line.finish(1)
    line.meter.reset()
    line.send(3.0, DECODES, 1.0)
    line.finish(2)
    assert line.meter.compute_s == [1.0] and line.meter.num_batches == 1
    assert sum(line.meter.gap_s[0].values()) == pytest.approx(2.0)
    assert [steps(line.meter.trace(newest)) for newest in (1, 4096)] == [[2], [1, 2]]
    assert set(line.meter.fractions()) == {"compute", *CAUSES}


def test_it_costs_little():
    line = Line(4, ways=0.1)
    at = [line.send(0.0, DECODES, 1.0, 1.1, 0.9, 1.0) for _ in range(4)]
    best = math.inf
    for _ in range(5):
        begin = time.process_time()
        for _ in range(200):
            line.finish(line.step - 3)
            at.append(line.send(at[-4], PROMPT if line.step % 3 else DECODES, 1.0, 1.3, 0.9, 1.0))
        best = min(best, (time.process_time() - begin) / 200)
    assert best < 100e-6  # with what it takes to make the line; about 20 microseconds are the meter's
