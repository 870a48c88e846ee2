"""The offline workloads ask for exactly the tokens that other engines were measured with."""

import hashlib
import json
from statistics import mean

import pytest

from bench.replica.offline_workloads import JOBS, MAX_TOKEN_ID, fresh

# Of make_workload in the script that measured vLLM 0.22.1.
MEASURED = {
    ("mini", 1.0): "199c6f016a1bff73",
    ("mini", 0.02): "ba3f91f2ec590766",
    ("bs1", 1.0): "8b7e7606e435df07",
    ("bs1", 0.02): "4d809968b70114fb",
    ("prefill", 1.0): "7416e463427e0dfc",
    ("sharedprefix", 1.0): "8ac5991e2ba33c19",
    ("sharedprefix_interleaved", 1.0): "4953a4acb2df36dc",
}


@pytest.mark.parametrize(("name", "scale"), MEASURED)
def test_token_ids_are_those_that_others_were_measured_with(name: str, scale: float) -> None:
    asked = json.dumps(JOBS[name](scale)).encode()
    assert hashlib.sha256(asked).hexdigest()[:16] == MEASURED[name, scale]


def test_mini_is_as_long_as_it_is_said_to_be() -> None:
    prompts, lengths = JOBS["mini"](1.0)
    assert len(prompts) == len(lengths) == 256
    assert sum(lengths) == 133_966 and sum(map(len, prompts)) == 142_827


def test_interleaved_is_the_same_in_another_order() -> None:
    grouped, apart = JOBS["sharedprefix"](0.1)[0], JOBS["sharedprefix_interleaved"](0.1)[0]
    assert sorted(grouped) == sorted(apart)
    groups = len(grouped) // 8
    assert len({tuple(prompt[:2048]) for prompt in apart[:groups]}) == groups
    assert len({tuple(prompt[:2048]) for prompt in grouped[:8]}) == 1


@pytest.mark.parametrize("name", JOBS)
def test_every_job_has_an_output_length_for_every_prompt_at_any_scale(name: str) -> None:
    for scale in (1e-6, 0.03):
        prompts, lengths = JOBS[name](scale)
        assert len(prompts) == len(lengths) >= 1 and min(lengths) >= 1
        assert all(0 <= token <= MAX_TOKEN_ID for prompt in prompts for token in prompt)


def test_fresh_prompts_are_nobody_elses() -> None:
    prompts = [fresh(64, seed) for seed in range(50)]
    known = {tuple(prompt[:64]) for job in JOBS.values() for prompt in job(0.05)[0]}
    assert len({tuple(prompt) for prompt in prompts}) == 50 and not known & {tuple(prompt) for prompt in prompts}
    assert 4000 < mean(token for prompt in prompts for token in prompt) < 6000
