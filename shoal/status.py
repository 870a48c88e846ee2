"""`shoal status`: the state of a running server, model by model and replica by replica, read from its HTTP pages."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from shoal.client import Client, ServerError
from shoal.help import Parser

DESCRIPTION = "What a running server is doing, model by model and replica by replica."
EPILOG = """\
columns:
  model           only of a server with several models; one at another endpoint has no replicas
  run, wait       requests in the batch, and waiting for a place in it
  KV, kept        parts of the KV cache: held by running requests, and kept for reuse from past requests
  prompt, cached  prompt tokens so far, and the part that was in the cache: the hit rate
  output          tokens generated so far
  TTFT, TBT       mean times to the first token and between tokens so far, as the router sees them
  done, failed    requests so far

columns of drafts, of servers that verify them, model by model and drafter by drafter:
  drafted         drafts of tokens that steps verified so far
  accepted        the part of them that was right
  tokens a step   output tokens of a sequence for each step with drafts of it; 1 without drafts

examples:
  shoal status
  shoal status --url http://gpu-box:8000 --watch 1
  shoal status --json

exit code: 0 if the server can answer, otherwise 1; with --watch 0 after Ctrl-C.
"""
# Metrics of the server as a whole, for the fields of Status.
READY, WANTED = "shoal_replicas_ready", "shoal_replicas_wanted"
ATTENTION = "shoal_attention_info"  # for the fields `attention` and `attention_problem` of ReplicaStatus
# The metrics behind the fields of DrafterStatus.
DRAFTS = {
    "proposals": "shoal_proposals_total",
    "drafted": "shoal_drafted_tokens_total",
    "accepted": "shoal_accepted_tokens_total",
}
# The metric behind each field of ReplicaStatus.
METRICS = {
    "running": "shoal_running_requests",
    "waiting": "shoal_waiting_requests",
    "kv_tokens": "shoal_kv_tokens",
    "kv_tokens_used": "shoal_kv_tokens_used",
    "kv_tokens_cached": "shoal_kv_tokens_cached",
    "prompt_tokens": "shoal_prompt_tokens_total",
    "cached_tokens": "shoal_cached_tokens_total",
    "output_tokens": "shoal_output_tokens_total",
    "finished": "shoal_finished_requests_total",
    "failed": "shoal_failed_requests_total",
    "ttft_count": "shoal_time_to_first_token_seconds_count",
    "ttft_sum_s": "shoal_time_to_first_token_seconds_sum",
    "tbt_count": "shoal_inter_token_latency_seconds_count",
    "tbt_sum_s": "shoal_inter_token_latency_seconds_sum",
}


@dataclass
class DrafterStatus:
    """The drafts of one drafter since the replica's start.

    | field | meaning |
    | --- | --- |
    | `proposals` | how often a step verified drafts of one sequence |
    | `drafted`, `accepted` | drafts that were verified, and those that were right |
    """

    proposals: float = 0
    drafted: float = 0
    accepted: float = 0


@dataclass
class ReplicaStatus:
    """The state of one replica, as it reports it. Counts are since its start: of requests, or of tokens.
    `attention_problem`: why its attention is not a faster one; empty if all is well. `model`: its name in the API.
    `drafters`: those whose drafts were verified, by name."""

    name: str
    model: str = ""
    running: float = 0
    waiting: float = 0
    kv_tokens: float = 0
    kv_tokens_used: float = 0
    kv_tokens_cached: float = 0
    prompt_tokens: float = 0
    cached_tokens: float = 0
    output_tokens: float = 0
    finished: float = 0
    failed: float = 0
    ttft_count: float = 0
    ttft_sum_s: float = 0
    tbt_count: float = 0
    tbt_sum_s: float = 0
    attention: str = ""
    attention_problem: str = ""
    drafters: dict[str, DrafterStatus] = field(default_factory=dict)


@dataclass
class ModelStatus:
    """How many replicas of a model can answer, and how many there should be; None if the server does not say."""

    name: str
    ready: int | None = None
    wanted: int | None = None


@dataclass
class Status:
    """The state of a server at one moment.

    | field | meaning |
    | --- | --- |
    | `problem` | why it cannot answer; None if it can |
    | `names` | all names of models, aliases too |
    | `models` | the models that replicas serve |
    """

    url: str
    problem: str | None
    names: list[str]
    replicas: list[ReplicaStatus]
    models: list[ModelStatus] = field(default_factory=list)


def look(client: Client) -> Status:
    """Asks the server for its state. Raises ServerError if there is no server, or it wants a key."""
    answer = client.get("/ready")
    problem = None
    if answer.status_code == 404:
        problem = "this server has no /ready: it is not Shoal's"
    elif answer.status_code != 200:
        problem = "not ready" + (f": {reason}" if (reason := _reason(answer.text)) else "")
    metrics = client.get("/metrics")
    found, models = replicas(metrics.text) if metrics.status_code == 200 else ([], [])
    return Status(client.url, problem, list(client.models()), found, models)


def replicas(page: str) -> tuple[list[ReplicaStatus], list[ModelStatus]]:
    """The replicas on a page of Prometheus metrics, sorted by model and name, and their models in the page's order.
    Ignores metrics that are not Shoal's. A lost replica, of which only times are left, is not among them."""
    fields = {metric: name for name, metric in METRICS.items()}
    drafts = {metric: name for name, metric in DRAFTS.items()}
    found: dict[str, ReplicaStatus] = {}
    models: dict[str, ModelStatus] = {}
    reporting: set[str] = set()
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                model = sample.labels.get("model", "")
                if sample.name in (READY, WANTED):
                    whole = models.setdefault(model, ModelStatus(model))
                    setattr(whole, "ready" if sample.name == READY else "wanted", int(sample.value))
                elif sample.name in fields and (name := sample.labels.get("replica")):
                    setattr(found.setdefault(name, ReplicaStatus(name)), fields[sample.name], sample.value)
                    if sample.name == METRICS["running"]:
                        reporting.add(name)
                        found[name].model = model
                elif sample.name in drafts and (name := sample.labels.get("replica")):
                    drafters = found.setdefault(name, ReplicaStatus(name)).drafters
                    drafter = drafters.setdefault(sample.labels.get("drafter", ""), DrafterStatus())
                    setattr(drafter, drafts[sample.name], sample.value)
                elif sample.name == ATTENTION and (name := sample.labels.get("replica")):
                    replica = found.setdefault(name, ReplicaStatus(name))
                    replica.attention = sample.labels.get("backend", "")
                    replica.attention_problem = sample.labels.get("problem", "")
    except ValueError:
        raise ServerError("/metrics is not a page of Prometheus metrics") from None
    order = {model: number for number, model in enumerate(models)}
    of_model = sorted((order.get(found[name].model, len(order)), name) for name in reporting)
    return [found[name] for _, name in of_model], list(models.values())


def _reason(text: str) -> str:
    try:
        value = json.loads(text)
        return "no replica answers" if value.get("replicas") == 0 else str(value["error"]["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:200]


def render(status: Status) -> RenderableType:
    """The status for a terminal."""
    state = Text("ready", "bold green") if status.problem is None else Text(status.problem, "bold red")
    several = len(status.models) > 1
    for model in status.models:
        if model.ready is not None and model.wanted is not None and model.ready < model.wanted:
            of = f" of {model.name}" if several else ""
            state.append(f", {model.ready} of {model.wanted} replicas{of}", "bold red")
    head = Text.assemble((", ".join(status.names) or "no model", "bold"), (f"  {status.url}  ", "dim"), state)
    if not status.replicas:
        return Group(head, Text("no replica has reported yet", "dim"))
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    if several:
        table.add_column("model", no_wrap=True)
    table.add_column("replica", no_wrap=True)
    for column in ("run", "wait", "KV", "kept", "prompt", "cached", "output", "TTFT", "TBT", "done", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for replica in status.replicas:
        table.add_row(*([replica.model] if several else []), *_row(replica))
    if len(status.replicas) > 1:
        table.add_section()
        table.add_row(*([""] if several else []), *_row(total(status.replicas)), style="bold")
    problems = sorted({replica.attention_problem for replica in status.replicas} - {""})
    drafts = _drafts(status.replicas, several)
    return Group(head, Text(), table, *drafts, *(Text(problem, "red") for problem in problems))


def _drafts(found: list[ReplicaStatus], several: bool) -> list[RenderableType]:
    """The table of drafts, of all replicas of a model together; nothing if none were verified."""
    sums: dict[tuple[str, str], DrafterStatus] = {}
    for replica in found:
        for name, drafter in replica.drafters.items():
            whole = sums.setdefault((replica.model, name), DrafterStatus())
            for count in DRAFTS:
                setattr(whole, count, getattr(whole, count) + getattr(drafter, count))
    if not sums:
        return []
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for column in (*(["model"] if several else []), "drafter"):
        table.add_column(column, no_wrap=True)
    for column in ("drafted", "accepted", "tokens a step"):
        table.add_column(column, justify="right", no_wrap=True)
    for (model, name), each in sums.items():
        tokens = f"{1 + each.accepted / each.proposals:.2f}" if each.proposals else "-"
        share = _share(each.accepted, each.drafted)
        table.add_row(*([model] if several else []), name, compact(each.drafted), share, tokens)
    return [Text(), table]


def total(found: list[ReplicaStatus]) -> ReplicaStatus:
    """The sum over all replicas, as one row."""
    return ReplicaStatus("all", **{name: sum(getattr(replica, name) for replica in found) for name in METRICS})


def _row(replica: ReplicaStatus) -> list[str]:
    cells = [replica.name, f"{replica.running:.0f}", f"{replica.waiting:.0f}"]
    cells += [_share(tokens, replica.kv_tokens) for tokens in (replica.kv_tokens_used, replica.kv_tokens_cached)]
    cells += [compact(replica.prompt_tokens), _share(replica.cached_tokens, replica.prompt_tokens)]
    cells += [compact(replica.output_tokens), _mean(replica.ttft_sum_s, replica.ttft_count)]
    return [*cells, _mean(replica.tbt_sum_s, replica.tbt_count), compact(replica.finished), compact(replica.failed)]


def compact(count: float) -> str:
    """A count in three digits: 950, 12.3k, 4.56M."""
    for letter in ("", "k", "M"):
        if count < 999.5:
            return f"{count:.3g}{letter}"
        count /= 1000
    return f"{count:.3g}G"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _mean(sum_s: float, count: float) -> str:
    if not count:
        return "-"
    mean_s = sum_s / count
    return f"{mean_s:.2f} s" if mean_s >= 1 else f"{mean_s * 1000:.0f} ms"


def main(argv: list[str] | None = None) -> int:
    """Prints the status. Returns 0 if the server can answer, or was watched until Ctrl-C; otherwise 1."""
    parser = Parser("shoal status", DESCRIPTION, EPILOG)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument(
        "--api-key", metavar="KEY", default=os.environ.get("OPENAI_API_KEY"), help="default: $OPENAI_API_KEY"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--watch", type=float, metavar="S", help="look again every S seconds, until Ctrl-C")
    how.add_argument("--json", action="store_true", help="as JSON, for scripts")
    args = parser.parse_args(argv)
    if args.watch is not None and not args.watch > 0:
        parser.error("--watch: the seconds must be above 0")
    try:
        with Client(args.url, args.api_key) as client:
            status = look(client)
            if args.watch is not None:
                with suppress(KeyboardInterrupt):
                    _watch(client, args.watch)
                return 0
            if args.json:
                print(json.dumps(asdict(status), indent=2))
            else:
                Console(highlight=False).print(render(status))
    except ServerError as error:
        print(f"shoal status: {error}", file=sys.stderr)
        return 1
    return 0 if status.problem is None else 1


def _watch(client: Client, every_s: float) -> None:
    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        while True:
            try:
                shown = render(look(client))
            except ServerError as error:
                shown = Text(str(error), "bold red")  # it may come back
            live.update(shown, refresh=True)
            time.sleep(every_s)
