"""The alerts and the dashboard: each alert fires and clears, and all queries name metrics that the server prints.

Prometheus' own `promtool` decides about queries. Where it is not installed, these tests are skipped, and the names of
metrics and labels are still checked.
"""

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.metrics import OTHER_NAMES, described
from router.metrics.replica_times import TIMES
from tests.helm.chart import ROOT, check, render

ALERTS = check.CHART / "files" / "alerts.yaml"
DASHBOARD = check.CHART / "files" / "dashboard.json"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian's package prometheus)")
TINY = 'model="tiny"'
# For each alert the series with which it fires, and how they go on when it has cleared: an hour of each, by minutes.
# `a+bxn` are n further values, each b more than the one before; `_xn` are none.
FIRES: dict[str, list[tuple[str, str, str]]] = {
    "ShoalDown": [("shoal_build_info", "_x60", "1x60")],
    "ShoalNoReplica": [
        (f"shoal_replicas_ready{{{TINY}}}", "0x60", "2x60"),
        (f"shoal_replicas_wanted{{{TINY}}}", "2x60", "2x60"),
    ],
    "ShoalReplicasMissing": [
        (f"shoal_replicas_ready{{{TINY}}}", "1x60", "2x60"),
        (f"shoal_replicas_wanted{{{TINY}}}", "2x60", "2x60"),
    ],
    "ShoalReplicasLost": [(f'shoal_replicas_taken_out_total{{{TINY},reason="lost"}}', "0+1x60", "60x60")],
    "ShoalReplicaStuck": [(f'shoal_replica_load_age_seconds{{{TINY},replica="r"}}', "10+60x60", "1x60")],
    "ShoalRequestsFail": [
        (f'shoal_http_responses_total{{{TINY},status="500"}}', "0+6x60", "360x60"),
        (f'shoal_http_responses_total{{{TINY},status="200"}}', "0+60x60", "3600+60x60"),
    ],
    "ShoalStreamsFail": [(f'shoal_sequences_total{{{TINY},finish_reason="failed"}}', "0+1x60", "60x60")],
    "ShoalRequestsRefused": [(f'shoal_refused_requests_total{{{TINY},reason="overloaded"}}', "0+60x60", "3600x60")],
    "ShoalQueueLong": [
        (f'shoal_queue_seconds_bucket{{{TINY},le="10"}}', "0+50x60", "3000+100x60"),
        (f'shoal_queue_seconds_bucket{{{TINY},le="25"}}', "0+100x60", "6000+100x60"),
        (f'shoal_queue_seconds_bucket{{{TINY},le="+Inf"}}', "0+100x60", "6000+100x60"),
    ],
    "ShoalCacheTooSmall": [
        (f'shoal_preemptions_total{{{TINY},replica="r"}}', "0+60x60", "3600x60"),
        (f'shoal_kv_usage_ratio{{{TINY},replica="r"}}', "0.99x60", "0.99x60"),
    ],
    "ShoalRouterSlow": [
        ('shoal_event_loop_lag_seconds_bucket{router="a",le="0.1"}', "0+50x60", "3000+100x60"),
        ('shoal_event_loop_lag_seconds_bucket{router="a",le="0.25"}', "0+100x60", "6000+100x60"),
        ('shoal_event_loop_lag_seconds_bucket{router="a",le="+Inf"}', "0+100x60", "6000+100x60"),
    ],
    "ShoalRouterFiles": [
        ('process_open_fds{router="a"}', "900x60", "100x60"),
        ('process_max_fds{router="a"}', "1024x60", "1024x60"),
    ],
    "ShoalUpstreamFails": [(f'shoal_upstream_failures_total{{{TINY},reason="timeout"}}', "0+60x60", "3600x60")],
    "ShoalVersionsApart": [(f'shoal_refused_routers_total{{{TINY},replica="r"}}', "0+1x60", "60x60")],
    "ShoalKeysNotRead": [("shoal_key_file_errors_total", "0+1x60", "60x60")],
    "ShoalSlowAttention": [(f'shoal_attention_info{{{TINY},replica="r",problem="no nvcc"}}', "1x60", "_x60")],
    "ShoalTracesLost": [('shoal_trace_spans_total{result="queue_full"}', "0+60x60", "3600x60")],
}


# What every router tells alike, of one thing that happened once: what it reads off replicas, and what it sees itself.
SEEN_BY_ALL = {"shoal_replicas_taken_out_total", "shoal_key_file_errors_total"}


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def queries() -> dict[str, str]:
    """All queries by their place, with Grafana's variables filled in."""
    found = {rule["alert"]: rule["expr"] for rule in rules()}
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", "5m").replace("$model", ".*")
            found[f"{panel['title']} {target['refId']}"] = expr
    return found


def promtool(*arguments: str) -> str:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_rule(
    folder: Path, rule: dict[str, Any], series: list[dict[str, str]], expected: list[dict[str, Any]]
) -> None:
    """Holds a rule against what it is to say of these series, at promtool's."""
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    files = {
        "rules": {"groups": [{"name": "one", "rules": [rule]}]},
        "tests": {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]},
    }
    for name, content in files.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    promtool("test", "rules", str(folder / "tests.yaml"))


def test_every_alert_can_be_seen_to_fire_and_has_a_remedy() -> None:
    assert [rule["alert"] for rule in rules()] == list(FIRES)
    page = (ROOT / "docs" / "OPERATING.md").read_text()
    assert re.findall(r"`(Shoal[A-Z]\w+)`", page) == list(FIRES)
    for rule in rules():
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "runbook"}
        assert (ROOT / rule["annotations"]["runbook"]).exists()


@needs_promtool
@pytest.mark.parametrize("alert", FIRES)
def test_an_alert_fires_and_clears(alert: str, tmp_path: Path) -> None:
    """It has not fired in the first seconds, fires within the first hour, and has cleared half an hour later."""
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    series = [{"series": name, "values": f"{fires} {clears}"} for name, fires, clears in FIRES[alert]]
    firing = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
    one = [{"labels": "{}", "value": 1}]
    asked = {"59m": one, "95m": []} if "for" not in rule else {"0m": [], "59m": one, "95m": []}
    told = [{"expr": firing, "eval_time": at, "exp_samples": wanted} for at, wanted in asked.items()]
    check_rule(tmp_path, rule, series, told)


# Series of two routers that saw the same, which is not enough for the alert; summed, it would be.
SEEN_TWICE: dict[str, list[tuple[str, str]]] = {
    "ShoalReplicasLost": [(f'shoal_replicas_taken_out_total{{{TINY},reason="lost"}}', "0x20 2x40")],
    "ShoalCacheTooSmall": [
        (f'shoal_preemptions_total{{{TINY},replica="r"}}', "0+4x60"),
        (f'shoal_kv_usage_ratio{{{TINY},replica="r"}}', "0.99x60"),
    ],
}


@needs_promtool
@pytest.mark.parametrize("alert", SEEN_TWICE)
def test_what_two_routers_see_has_happened_once(alert: str, tmp_path: Path) -> None:
    series = [
        {"series": name.replace("{", f'{{instance="{router}",', 1), "values": values}
        for router in "ab"
        for name, values in SEEN_TWICE[alert]
    ]
    (rule,) = [rule for rule in rules() if rule["alert"] == alert]
    told = [{"expr": f'count(ALERTS{{alertname="{alert}"}})', "eval_time": f"{at}m"} for at in range(60)]
    check_rule(tmp_path, rule, series, told)


@needs_promtool
def test_a_router_that_is_not_found_by_each_scrape_is_told_of(tmp_path: Path) -> None:
    """Behind one address each scrape finds one of two routers: the other's series has a gap."""
    (rule,) = [rule for rule in rules() if rule["alert"] == "ShoalRouterFiles"]
    series = [
        {"series": 'process_open_fds{router="a"}', "values": " ".join(["900 stale"] * 30)},
        {"series": 'process_max_fds{router="a"}', "values": " ".join(["1024 stale"] * 30)},
    ]
    firing = 'count(ALERTS{alertname="ShoalRouterFiles",alertstate="firing"})'
    told = [{"expr": firing, "eval_time": "45m", "exp_samples": [{"labels": "{}", "value": 1}]}]
    check_rule(tmp_path, rule, series, told)


@needs_promtool
def test_promtool_takes_the_rules_and_every_query(tmp_path: Path) -> None:
    assert f"{len(rules())} rules found" in promtool("check", "rules", str(ALERTS))
    recorded = [{"record": f"query:{number}", "expr": expr} for number, expr in enumerate(queries().values())]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": recorded}]}))
    assert f"{len(recorded)} rules found" in promtool("check", "rules", str(file))


@cache
def printed() -> dict[str, set[str]]:
    """The labels of everything that the server prints, by its name in queries."""
    found: dict[str, set[str]] = {}
    for metric in described():
        labels = {*metric.labels, "router"}
        suffixes = ("_bucket", "_sum", "_count") if metric.kind == "histogram" else ("",)
        for suffix in suffixes:
            found[metric.name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    return found


@pytest.mark.parametrize("place", queries())
def test_queries_name_what_the_server_prints(place: str) -> None:
    expr = queries()[place]
    used = re.findall(r"\b((?:shoal|process|python|vllm)[a-z_:]+)(\{[^}]*\})?", expr)
    assert used
    labels: set[str] = set()
    for name, where in used:
        assert name in printed(), name
        labels |= printed()[name]
        for label in re.findall(r"(\w+)(?:=~|!=|!~|=)", where):
            assert label in printed()[name], (name, label)
    for names in re.findall(r"by \(([^)]*)\)", expr):
        assert {name.strip() for name in names.split(",")} <= labels


def of_all_routers() -> set[str]:
    """The names of what every router tells alike. Histograms of replicas are of the requests of one router."""
    own = {name for name, _, _ in TIMES.values()}
    reported = {metric.name for metric in described() if "replica" in metric.labels and metric.name not in own}
    return reported | SEEN_BY_ALL


@pytest.mark.parametrize("place", queries())
def test_what_every_router_tells_is_counted_once(place: str) -> None:
    expr = queries()[place]
    for name in set(re.findall(r"\bshoal_[a-z_]+", expr)) & of_all_routers():
        once = re.findall(rf"max (?:by \([^)]*\) )?\((?:rate\(|increase\()?{name}\b", expr)
        assert len(once) == len(re.findall(rf"\b{name}\b", expr)), name


def test_the_dashboard_is_made_from_its_source() -> None:
    loaded: dict[str, Any] = {"__name__": "dashboard", "__file__": str(ROOT / "helm" / "dashboard.py")}
    exec(compile((ROOT / "helm" / "dashboard.py").read_text(), "dashboard.py", "exec"), loaded)
    assert loaded["text"]() == DASHBOARD.read_text(), "run python helm/dashboard.py"
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({panel["title"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)


def test_the_chart_renders_both() -> None:
    without = {manifest["kind"] for manifest in render({})}
    assert not without & {"PrometheusRule", "ConfigMap"}
    labels = {"release": "prometheus"}
    manifests = {
        manifest["kind"]: manifest
        for manifest in render({"alerts": {"enabled": True, "labels": labels}, "dashboard": {"enabled": True}})
    }
    rule, board = manifests["PrometheusRule"], manifests["ConfigMap"]
    assert rule["spec"] == yaml.safe_load(ALERTS.read_text())
    assert rule["metadata"]["labels"].items() >= labels.items()
    assert json.loads(board["data"]["shoal.json"]) == json.loads(DASHBOARD.read_text())
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_names_of_vllm_are_of_metrics_that_there_are() -> None:
    names = {metric.name.removesuffix("_total") for metric in described()}
    assert OTHER_NAMES.keys() <= names
