"""Other names of Shoal's metrics: those of vLLM, which the Gateway API Inference Extension reads too.

Dashboards and schedulers that know vLLM find what they look for. A sample has Shoal's labels under the names of vLLM
(`LABELS`), so `model_name` is the model and `engine` the replica. vLLM has a page for each engine; a page of Shoal has
all replicas that a router knows.
"""

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

ALIASES = {
    "shoal_running_requests": "vllm:num_requests_running",
    "shoal_waiting_requests": "vllm:num_requests_waiting",
    "shoal_kv_usage_ratio": "vllm:kv_cache_usage_perc",
    "shoal_kv_config_info": "vllm:cache_config_info",
    "shoal_prompt_tokens": "vllm:prompt_tokens",
    "shoal_output_tokens": "vllm:generation_tokens",
    "shoal_preemptions": "vllm:num_preemptions",
    "shoal_step_tokens": "vllm:iteration_tokens_total",
    "shoal_sequences": "vllm:request_success",
    "shoal_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "shoal_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "shoal_request_seconds": "vllm:e2e_request_latency_seconds",
    "shoal_queue_seconds": "vllm:request_queue_time_seconds",
    "shoal_prefill_seconds": "vllm:request_prefill_time_seconds",
    "shoal_decode_seconds": "vllm:request_decode_time_seconds",
    "shoal_request_prompt_tokens": "vllm:request_prompt_tokens",
    "shoal_request_output_tokens": "vllm:request_generation_tokens",
}
"""vLLM's names by Shoal's, without the suffixes of counters and histograms."""

LABELS = {
    "model": "model_name",
    "replica": "engine",
    "finish_reason": "finished_reason",
    "page_size": "block_size",
    "pages": "num_gpu_blocks",
}
"""vLLM's names of labels by Shoal's."""


def alias(metric: Metric) -> Metric | None:
    """The metric under its other name, without samples; None if it has none."""
    name = ALIASES.get(metric.name)
    return None if name is None else Metric(name, f"As {metric.name}", metric.type)


def renamed(samples: Iterator[Sample], own: str) -> Iterator[Sample]:
    """The samples of the metric `own` under its other name."""
    name = ALIASES[own]
    for sample in samples:
        labels = {LABELS.get(label, label): value for label, value in sample.labels.items()}
        yield sample._replace(name=name + sample.name.removeprefix(own), labels=labels)
