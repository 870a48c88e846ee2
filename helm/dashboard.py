"""Writes the dashboard for Grafana: `python helm/dashboard.py` makes `shoal/files/dashboard.json`.

A panel is a title, a unit, and queries with their legends. Metrics that replicas report come from every router alike,
hence `max by` before anything is summed; what routers count themselves is summed, but for what each of them sees.
"""

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "shoal" / "files" / "dashboard.json"
COLUMNS, WIDTH, HEIGHT = 3, 8, 8
RATE = "[$__rate_interval]"
MODEL = '{model=~"$model"}'


def quantiles(metric: str, by: str = "model", where: str = MODEL) -> list[tuple[str, str]]:
    """The median and the 99th percentile of a histogram."""
    labels = f"{by}, le" if by else "le"
    rate = f"sum by ({labels}) (rate({metric}_bucket{where}{RATE}))"
    name = f"{{{{{by}}}}} " if by else ""
    return [(f"histogram_quantile({part}, {rate})", f"{name}P{round(100 * part)}") for part in (0.5, 0.99)]


def reported(metric: str, function: str = "") -> str:
    """The sum over replicas of what they report, to whichever router."""
    inner = f"{function}({metric}{MODEL}{RATE})" if function else f"{metric}{MODEL}"
    return f"sum by (model) (max by (model, replica) ({inner}))"


def counted(metric: str, by: str, where: str = MODEL) -> str:
    """The rate of what routers count themselves, by the second."""
    return f"sum by ({by}) (rate({metric}{where}{RATE}))"


def grown(metric: str) -> str:
    """How much a counter of routers has grown in five minutes, by reason."""
    return f"sum by (reason) (increase({metric}{MODEL}[5m]))"


def seen(metric: str) -> str:
    """The same of a counter of what every router sees."""
    return f"sum by (reason) (max by (model, reason) (increase({metric}{MODEL}[5m])))"


PROMPTS = reported("shoal_prompt_tokens_total", "rate")
CACHED = reported("shoal_cached_tokens_total", "rate")
BAD_STATUS = '{model=~"$model",status=~"5..|429"}'
BROKEN_OFF = '{model=~"$model",finish_reason="failed"}'
STAGES = f"max by (model, replica, stage, spent) (rate(shoal_stage_seconds_total{MODEL}{RATE}))"
ENDED = counted("shoal_sequences_total", "model, finish_reason")
OF_ROUTERS = '{router!=""}'

ROWS: dict[str, list[tuple[str, str, list[tuple[str, str]]]]] = {
    "Is it well?": [
        (
            "Replicas",
            "short",
            [
                (f"max by (model) (shoal_replicas_ready{MODEL})", "{{model}} ready"),
                (f"max by (model) (shoal_replicas_wanted{MODEL})", "{{model}} wanted"),
            ],
        ),
        (
            "Answers that fail or are refused",
            "reqps",
            [
                (counted("shoal_http_responses_total", "model, status", BAD_STATUS), "{{status}}"),
                (counted("shoal_sequences_total", "model", BROKEN_OFF), "broken off"),
                (counted("shoal_refused_requests_total", "model, reason"), "refused: {{reason}}"),
            ],
        ),
        (
            "Replicas lost, streams resumed",
            "short",
            [
                (seen("shoal_replicas_taken_out_total"), "lost: {{reason}}"),
                (grown("shoal_resumed_sequences_total"), "resumed: {{reason}}"),
            ],
        ),
    ],
    "What clients see": [
        ("Time to first token", "s", quantiles("shoal_time_to_first_token_seconds")),
        ("Time between tokens", "s", quantiles("shoal_inter_token_latency_seconds")),
        ("Whole requests", "s", quantiles("shoal_request_seconds")),
        ("Answers", "reqps", [(ENDED, "{{model}} {{finish_reason}}")]),
        ("Tokens of prompts", "short", quantiles("shoal_request_prompt_tokens")),
        ("Tokens of answers", "short", quantiles("shoal_request_output_tokens")),
    ],
    "Where the time goes": [
        ("Wait in the replica", "s", quantiles("shoal_queue_seconds")),
        ("Prefill", "s", quantiles("shoal_prefill_seconds")),
        ("Decode", "s", quantiles("shoal_decode_seconds")),
        (
            "Requests",
            "short",
            [
                (reported("shoal_running_requests"), "{{model}} running"),
                (reported("shoal_waiting_requests"), "{{model}} waiting"),
            ],
        ),
        (
            "Tokens a second",
            "short",
            [
                (reported("shoal_output_tokens_total", "rate"), "{{model}} sampled"),
                (reported("shoal_prompt_tokens_total", "rate"), "{{model}} of prompts"),
                (reported("shoal_cached_tokens_total", "rate"), "{{model}} of them cached"),
            ],
        ),
        (
            "Time of stages",
            "percentunit",
            [(f"sum by (spent) ({STAGES}) / scalar(sum({STAGES}))", "{{spent}}")],
        ),
    ],
    "The cache": [
        ("KV in use", "percentunit", [(f"max by (model, replica) (shoal_kv_usage_ratio{MODEL})", "{{replica}}")]),
        (
            "Hits",
            "percentunit",
            [
                (f"{CACHED} / {PROMPTS}", "{{model}} found"),
                (
                    f"{counted('shoal_expected_cached_tokens_total', 'model')}"
                    f" / {counted('shoal_found_cached_tokens_total', 'model')}",
                    "{{model}} expected, of those found",
                ),
            ],
        ),
        (
            "Evictions and preemptions",
            "short",
            [
                (reported("shoal_kv_tokens_evicted_total", "rate"), "{{model}} tokens evicted"),
                (reported("shoal_preemptions_total", "rate"), "{{model}} preemptions"),
            ],
        ),
    ],
    "Routers": [
        ("Decisions", "s", quantiles("shoal_placement_seconds")),
        ("Lag of the event loop", "s", quantiles("shoal_event_loop_lag_seconds", "router", "")),
        (
            "CPU",
            "percentunit",
            [(f'sum by (router) (rate(process_cpu_seconds_total{{router!=""}}{RATE}))', "{{router}}")],
        ),
        ("Memory", "bytes", [('max by (router) (process_resident_memory_bytes{router!=""})', "{{router}}")]),
        ("Open files", "short", [('max by (router) (process_open_fds{router!=""})', "{{router}}")]),
        ("Versions", "short", [("count by (version, protocol) (shoal_build_info)", "{{version}} ({{protocol}})")]),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana takes it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, shown in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": _place(top, 0, 24, 1)})
        top += 1
        for number, (title, unit, queries) in enumerate(shown):
            panels.append(
                {
                    "type": "timeseries",
                    "title": title,
                    "datasource": {"type": "prometheus", "uid": "$datasource"},
                    "gridPos": _place(top + number // COLUMNS * HEIGHT, number % COLUMNS * WIDTH, WIDTH, HEIGHT),
                    "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                    "targets": [
                        {"expr": query, "legendFormat": legend, "refId": chr(ord("A") + index)}
                        for index, (query, legend) in enumerate(queries)
                    ],
                }
            )
        top += -(-len(shown) // COLUMNS) * HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    model = {
        "name": "model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": "label_values(shoal_replicas_wanted, model)", "refId": "models"},
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }
    return {
        "title": "Shoal",
        "uid": "shoal",
        "schemaVersion": 39,
        "tags": ["shoal"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [source, model]},
        "panels": panels,
    }


def _place(top: int, left: int, width: int, height: int) -> dict[str, int]:
    return {"x": left, "y": top, "w": width, "h": height}


def text() -> str:
    """The file's text."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
