"""The forecast against a simulation of the same sequences, one token a step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from worker.scheduler.kv_demand import KVClaim, OutputLengthHistory, peak_pages
from worker.scheduler.sequence import pages_for


def most_slowly(claims: list[KVClaim], page_size: int) -> int:
    most = 0
    for step in range(max(claim.to_come for claim in claims)):
        needed = 0
        for claim in claims:
            if claim.to_come > step:  # its last token is sampled, and needs no page
                needed += pages_for(claim.tokens + step, page_size) - claim.held
            else:
                needed -= claim.released
        most = max(most, needed)
    return most


@st.composite
def claims(draw, page_size: int) -> KVClaim:
    tokens = draw(st.integers(1, 60))
    held = draw(st.integers(0, pages_for(tokens, page_size)))
    return KVClaim(tokens, draw(st.integers(1, 40)), held, draw(st.integers(0, held)))


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from([1, 2, 7, 16]))
def test_the_most_pages_are_those_of_a_simulation(data, page_size):
    several = data.draw(st.lists(claims(page_size), min_size=1, max_size=6))
    assert max(0, peak_pages(several, page_size)) == most_slowly(several, page_size)


def test_nobody_needs_nothing():
    assert peak_pages([], 16) == 0
    assert peak_pages([KVClaim(tokens=17, to_come=0, held=2, released=2)], 16) == 0


def test_expectations_begin_high_and_follow_what_is_seen():
    outputs = OutputLengthHistory()
    assert 70 <= outputs.expected_tokens(0, 100) <= 80
    for _ in range(50):
        outputs.ended(10, 100)
    assert 10 <= outputs.expected_tokens(0, 100) <= 13
    # Nobody came so far lately: all that is left.
    assert outputs.expected_tokens(50, 100) == 50
    assert outputs.expected_tokens(100, 100) == 0


def test_who_has_come_further_than_the_short_is_expected_to_be_long():
    outputs = OutputLengthHistory()
    for _ in range(40):
        outputs.ended(10, 100)
        outputs.ended(80, 100)
    assert 45 <= outputs.expected_tokens(0, 100) <= 47
    assert 60 <= outputs.expected_tokens(20, 100) <= 62


def test_a_preemption_raises_them_and_ends_lower_them_again():
    outputs = OutputLengthHistory()
    for _ in range(200):
        outputs.ended(50, 100)
    calm = outputs.expected_tokens(0, 100)
    outputs.preempted()
    raised = outputs.expected_tokens(0, 100)
    assert raised > 1.2 * calm
    for _ in range(200):
        outputs.ended(50, 100)
    assert outputs.expected_tokens(0, 100) <= calm + 1
