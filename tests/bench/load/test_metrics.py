"""The figures of a load are what their definitions say."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load.metrics import Sample, figures, percentile, spread, summarise


def answered(sent: float, chunks: list[float], **more: object) -> Sample:
    end = more.pop("end_s", chunks[-1])
    base = {"output_tokens": len(chunks), "prompt_tokens": 10, "cached_tokens": 4, "asked_tokens": len(chunks)}
    return Sample(due_s=sent, sent_s=sent, end_s=end, chunk_s=chunks, **(base | more))  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_a_percentile_lies_between_its_neighbours(values: list[float], q: float) -> None:
    ordered, place = sorted(values), q / 100 * (len(values) - 1)
    low, high = ordered[int(place)], ordered[min(int(place) + 1, len(values) - 1)]
    assert low - 1e-6 <= percentile(values, q) <= high + 1e-6


def test_percentiles_and_spreads_of_known_values() -> None:
    values = [float(i) for i in range(1, 102)]
    assert (percentile(values, 0), percentile(values, 50), percentile(values, 99)) == (1, 51, 100)
    assert spread(values) == {"mean": 51, "p50": 51, "p90": 91, "p99": 100, "max": 101}
    assert spread([]) == {}
    with pytest.raises(ValueError, match="no percentile"):
        percentile([], 50)


def test_the_times_of_one_request() -> None:
    sample = answered(1.0, [1.5, 1.6, 2.0], end_s=2.1)
    sample.due_s = 0.9
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.gaps_s == pytest.approx([0.1, 0.4])
    assert sample.tpot_s == pytest.approx(0.25)
    assert sample.e2e_s == pytest.approx(1.1)
    assert sample.lag_s == pytest.approx(0.1)


def test_a_chunk_of_several_tokens_is_one_wait_but_counts_in_tpot() -> None:
    sample = answered(0.0, [1.0, 2.0, 3.0], chunk_tokens=[2, 4, 4], output_tokens=10)
    assert sample.gaps_s == [1.0, 1.0]
    assert sample.tpot_s == pytest.approx(2 / 8)
    assert answered(0.0, [1.0], chunk_tokens=[5], output_tokens=5).tpot_s is None


def test_a_request_is_good_when_its_own_p99_is() -> None:
    sample = answered(0.0, [1.0, 1.1, 1.2, 2.2])
    assert sample.meets(None, None) and sample.meets(1.0, None) and not sample.meets(0.99, None)
    assert sample.meets(None, 1.0) and not sample.meets(None, 0.5)
    sample.error = "timeout"
    assert not sample.meets(None, None)


def test_a_summary_counts_failures_and_measures_answers() -> None:
    samples = [
        answered(0.0, [1.0, 2.0], asked_tokens=3),
        answered(2.0, [2.5, 3.0]),
        Sample(due_s=0, asked_tokens=2, sent_s=0, end_s=4.0, error="http_429", message="no"),
        Sample(due_s=0, asked_tokens=2, sent_s=0, end_s=0.1, error="http_429", message="no"),
    ]
    summary = summarise(samples, slo_ttft_s=0.6)
    assert (summary["requests"], summary["answered"], summary["failures"]) == (4, 2, {"http_429": 2})
    assert summary["duration_s"] == 4.0 and summary["requests_per_s"] == 0.5
    assert (summary["output_tokens"], summary["output_tokens_per_s"], summary["input_tokens_per_s"]) == (4, 1.0, 5.0)
    assert summary["ttft_s"]["p50"] == 0.75 and summary["short_answers"] == 1
    assert (summary["cached_tokens"], summary["hit_rate"]) == (8, 0.4)
    assert (summary["goodput_per_s"], summary["attained"]) == (0.25, 0.25)
    named = {figure.name: figure for figure in figures("x", summary)}
    assert named["x.ttft.p50"].value == 0.75 and not named["x.ttft.p50"].higher_is_better
    assert named["x.goodput"].unit == "requests/s" and named["x.failures"].value == 2


def test_what_the_server_does_not_tell_is_not_made_up() -> None:
    summary = summarise([answered(0.0, [1.0], prompt_tokens=None, cached_tokens=None)])
    assert summary["prompt_tokens"] is summary["input_tokens_per_s"] is summary["hit_rate"] is None
    assert not {"x.hit_rate", "x.input_tokens", "x.goodput"} & {figure.name for figure in figures("x", summary)}


def test_a_load_without_answers_has_a_summary() -> None:
    for samples in ([], [Sample(due_s=0, asked_tokens=1, error="connect")]):
        summary = summarise(samples, 1.0, 1.0)
        assert summary["answered"] == 0 and summary["ttft_s"] == {} and summary["attained"] == 0
