"""The names under which other servers have Shoal's metrics."""

import re

from prometheus_client.parser import text_string_to_metric_families

from router.metrics.aliases import ALIASES, LABELS
from router.metrics.metrics import Metrics
from worker.messages import ReplicaLoad


def page(router: str = "") -> str:
    metrics = Metrics(router)
    model = metrics.model("tiny")
    load = ReplicaLoad(
        incarnation="one",
        running=2,
        kv_tokens_total=320,
        kv_tokens_used=80,
        page_size=16,
        steps=7,
        step_tokens=[1, 2, 0, 4, *[0] * 12],
        computed_tokens=33,
        prompt_tokens=5,
    )
    model.told("r0", load)
    model.replica("r0").first_token.observe(0.2)
    model.ended("stop")
    return metrics.page().decode()


def test_every_name_is_on_the_page_and_says_the_same() -> None:
    families = {family.name: family for family in text_string_to_metric_families(page())}
    for own, other in ALIASES.items():
        ours, theirs = families[own], families[other]
        assert ours.type == theirs.type
        mine = [
            (sample.name.replace(own, other, 1), {LABELS.get(k, k): v for k, v in sample.labels.items()}, sample.value)
            for sample in ours.samples
        ]
        assert [(sample.name, sample.labels, sample.value) for sample in theirs.samples] == mine
        assert mine or own.endswith("_seconds") or "tokens" in own


def test_what_an_inference_gateway_reads() -> None:
    """The metrics that the endpoint picker of the Gateway API Inference Extension looks for in vLLM."""
    lines = page("a").splitlines()
    where = 'engine="r0",model_name="tiny"'
    assert f"vllm:num_requests_running{{{where}}} 2.0" in lines
    assert f"vllm:num_requests_waiting{{{where}}} 0.0" in lines
    assert f"vllm:kv_cache_usage_perc{{{where}}} 0.25" in lines
    (config,) = [line for line in lines if line.startswith("vllm:cache_config_info{")]
    assert {'block_size="16"', 'num_gpu_blocks="20"'} <= set(re.findall(r'\w+="\w+"', config))


def test_a_routers_own_have_its_name_under_both() -> None:
    assert 'vllm:request_success_total{finished_reason="stop",model_name="tiny",router="a"} 1.0' in page("a")
    assert 'vllm:time_to_first_token_seconds_count{engine="r0",model_name="tiny",router="a"} 1.0' in page("a")
    assert 'vllm:prompt_tokens_total{engine="r0",model_name="tiny"} 5.0' in page("a")
