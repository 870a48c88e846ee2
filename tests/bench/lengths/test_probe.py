"""Probes of hidden states, and what two outputs of each prompt say about any estimate."""

import numpy as np
import pytest

from bench.lengths import probe


@pytest.mark.bench
def test_states_that_tell_the_length_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One direction of one layer tells the logarithm; the estimate at arrival and the other layer tell nothing."""
    monkeypatch.setattr(probe, "LAYERS", (0, 0.5))
    rng = np.random.default_rng(0)
    logs = rng.normal(4, 1, 400)
    states = rng.normal(size=(400, len(probe.LAYERS), 2, 6)).astype(np.float32)
    states[:, 1, 0, 3] = logs + rng.normal(0, 0.1, 400)
    figures, about = probe.evaluated(states, rng.normal(size=400), np.maximum(1, np.exp(logs)).round())
    assert about["after_prompt"]["layer"] == 0.5 and about["after_prompt"]["states"] in ("last", "both")
    assert figures["tau.after_prompt"] > 0.8 and figures["tau.after_prompt.network"] > 0.7
    assert abs(figures["tau.after_embedding"]) < 0.15
    assert figures["probe.us_per_request"] > 0


def test_no_estimate_is_beyond_the_bound() -> None:
    """Prompts whose outputs' logarithms are normal: the mean of each is the best estimate there is."""
    rng = np.random.default_rng(0)
    means = rng.normal(4, 0.7, 2000)
    first, second = (np.exp(rng.normal(means, 1.0)) for _ in range(2))
    found = probe.bounds(first, second)
    best = probe.kendall_tau(means, first)
    assert found["tau.of_another_output"] < best < found["tau.bound"]
    assert found["tau.bound.normal"] == pytest.approx(best, abs=0.03)


def test_outputs_that_have_nothing_in_common_allow_no_order() -> None:
    found = probe.bounds(np.array([1, 2, 3, 4]), np.array([4, 3, 2, 1]))
    assert found == {"tau.of_another_output": -1.0, "tau.bound": 0.0, "tau.bound.normal": 0.0}
