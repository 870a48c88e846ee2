"""The form of log lines, and who writes them."""

import io
import json
import logging
import subprocess
import sys
from typing import Any, get_args

import pytest

from cluster import log_lines
from cluster.log_lines import FIELDS, LineFormatter, LogFormat
from router.metrics.request_log import RequestLog, serving
from router.wire import request_id

AT_S = 1_764_085_627.1239


def line(log_format: LogFormat, message: str, *, of: dict[str, Any] | None = None, **extra: Any) -> str:
    record = logging.LogRecord("router.service", logging.WARNING, "service.py", 1, message, None, None)
    record.created = AT_S
    vars(record).update(extra)
    return LineFormatter(log_format, of or {}).format(record)


def test_text_has_the_time_the_level_and_the_fields() -> None:
    told = line("text", "it goes on", of={"replica": "r0", "rank": 1}, request_id="abc", client="a b", total_s=0.25)
    head = "2025-11-25T15:47:07.123Z WARNING router.service: it goes on"
    assert told == head + ' request_id=abc client="a b" replica=r0 rank=1 total_s=0.25'


def test_text_repeats_no_id_of_the_message() -> None:
    told = line("text", "abc3 went to r0", request_id="abc3", replica="r0", output_tokens=3)
    assert told.endswith(": abc3 went to r0 output_tokens=3")


def test_json_has_one_object_a_line() -> None:
    told = line("json", 'a "message"\nof two lines: é', of={"rank": 0}, sequence="abc-0.1", secret="of another library")
    assert "\n" not in told and json.loads(told) == {
        "time": "2025-11-25T15:47:07.123Z",
        "level": "WARNING",
        "logger": "router.service",
        "message": 'a "message"\nof two lines: é',
        "request_id": "abc",
        "sequence": "abc-0.1",
        "rank": 0,
    }


def test_a_traceback_belongs_to_its_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("worker", logging.ERROR, "", 1, "it failed", None, sys.exc_info())
    told = json.loads(LineFormatter("json", {}).format(record))
    assert told["message"] == "it failed" and told["exception"].endswith("ValueError: no")
    assert LineFormatter("text", {}).format(record).splitlines()[-1] == "ValueError: no"


def test_a_line_of_a_requests_task_has_its_id() -> None:
    with serving(RequestLog("abc")):
        assert json.loads(line("json", "an upstream broke off"))["request_id"] == "abc"
        assert json.loads(line("json", "of another", request_id="d"))["request_id"] == "d"
    assert "request_id" not in json.loads(line("json", "of no request"))


@pytest.mark.parametrize("known", ["5f" * 16, "mine", "mine-0", "mine-12-again1.3", "x-0.1-answer"])
@pytest.mark.parametrize("ending", ["-0.0", "-12.3", "-1-again2.0", "-0-answer.1", "-3-then"])
def test_the_request_of_a_sequence(known: str, ending: str) -> None:
    name = known if known == "5f" * 16 else request_id.name(known)
    assert request_id.of_sequence(name + ending) == known


def test_fields_are_those_of_the_reference() -> None:
    whole = RequestLog("abc", client="a", model="m", queue_s=0.1, first_token_s=0.2, resumed=1)
    whole.began("r0")
    assert whole.fields().keys() <= FIELDS.keys()
    with pytest.raises(ValueError, match="nonsense"):
        LineFormatter("text", {"nonsense": 1})


@pytest.mark.parametrize("log_format", get_args(LogFormat))
def test_errors_are_found_again(log_format: LogFormat) -> None:
    written = io.StringIO()
    for level, message in ((logging.ERROR, "rank 0: it died (pid=3)\nat once"), (logging.INFO, "ERROR x: no")):
        record = logging.LogRecord("ray.serve", level, "", 1, message, None, None)
        print(LineFormatter(log_format, {"replica": "r0"}).format(record), file=written)
    assert list(log_lines.errors(written.getvalue() + '{"level": "ERR')) == ["rank 0: it died (pid=3)"]


def test_a_process_writes_its_lines_in_one_form() -> None:
    """Ours from INFO on, of others warnings, and Ray's where its loggers write them."""
    code = """
import io, logging, logging.handlers
from cluster import log_lines
file = io.StringIO()
ray = logging.getLogger("ray.serve")
ray.propagate = False
ray.addHandler(logging.handlers.MemoryHandler(1, target=logging.StreamHandler(file)))
log_lines.set_up("json", replica="r0", rank=2)
logging.getLogger("worker.engine").info("ours")
logging.getLogger("httpx").info("a library's")
logging.getLogger("uvicorn.error").warning("a warning")
ray.error("of Ray")
print(file.getvalue(), end="")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = [json.loads(each) for each in done.stderr.splitlines()]
    assert [(each["logger"], each["message"]) for each in told] == [
        ("worker.engine", "ours"),
        ("uvicorn.error", "a warning"),
    ]
    (of_ray,) = [json.loads(each) for each in done.stdout.splitlines()]
    assert of_ray["message"] == "of Ray" and all(each["rank"] == 2 for each in (*told, of_ray))
