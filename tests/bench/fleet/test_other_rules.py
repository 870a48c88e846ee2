"""Other systems' rules, by tables: what each does where it differs from the others."""

import numpy as np
import pytest

from bench.fleet.other_rules import OTHER_RULES, Dynamo, EventRule, InFlightRule, LlmD, SglangApproximate, SglangEvents
from bench.fleet.workloads import FleetRequest, token_ids
from bench.load.workload import SHARED, UNIQUE, TokenSpan
from radix.events import Stored
from worker.messages import CacheEvents, ReplicaLoad


def prompt(number: int, shared: int = 320, own: int = 160) -> FleetRequest:
    return FleetRequest(number, 0.0, (TokenSpan((SHARED, 0), shared), TokenSpan((UNIQUE, number), own)), 10)


def place(rule: InFlightRule, request: FleetRequest, now_s: float = 0.0) -> int:
    return rule.place(request, token_ids(request.spans), now_s).replica


def cache(rule: EventRule, replica: int, request: FleetRequest) -> None:
    tokens = token_ids(request.spans).tobytes()
    rule.apply_events(replica, CacheEvents("", 0, [Stored(1, 0, tokens)], 16))


@pytest.mark.parametrize("name", OTHER_RULES)
def test_idle_replicas_are_used_in_turn_for_prompts_that_share_nothing(name: str):
    rule = OTHER_RULES[name](4)
    requests = [FleetRequest(n, 0.0, (TokenSpan((UNIQUE, n), 160),), 10) for n in range(4)]
    used = {place(rule, request) for request in requests}
    assert len(used) == 4 or name == "llm_d"  # its load is what the replicas told last
    for request in requests:
        rule.first_token(request)
        rule.ended(request)
    assert not rule.requests.any()


def test_sglang_keeps_to_its_tree_until_both_thresholds_are_passed():
    rule = SglangApproximate(2)
    first = place(rule, prompt(0))
    assert {place(rule, prompt(n)) for n in range(1, 65)} == {first}
    assert place(rule, prompt(65)) != first


def test_sglang_with_events_needs_half_of_the_prompt():
    rule = SglangEvents(2)
    cache(rule, 1, prompt(0))
    assert place(rule, prompt(1)) == 1
    assert place(rule, prompt(2, own=400)) == 0  # 320 of 720 tokens, and the other has fewer requests


def test_dynamo_weighs_prefill_and_decode_blocks_alike():
    rule = Dynamo(2)
    cache(rule, 1, prompt(0))
    assert [place(rule, prompt(n)) for n in (1, 2)] == [1, 1]  # 10 + 30 blocks against 30 + 30; 20 + 40 against 30 + 30
    rule.first_token(prompt(1))
    rule.first_token(prompt(2))
    assert np.array_equal(rule._prefill_tokens, [0, 0])
    assert rule._decode_tokens[1] == 320 + 2 * 160


def test_llm_d_adds_normalised_scores():
    rule = LlmD(2)
    cache(rule, 1, prompt(0))
    assert place(rule, prompt(1)) == 1
    rule.apply_load(1, ReplicaLoad(incarnation="", waiting=1, kv_tokens_used=500, kv_tokens_total=1000))
    rule.apply_load(0, ReplicaLoad(incarnation="", waiting=0, kv_tokens_used=0, kv_tokens_total=1000))
    assert place(rule, prompt(2)) == 0  # 3 x 2/3 + 0 + 1 against 0 + 2 + 2
