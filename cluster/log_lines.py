"""Lines of the logs of routers and replicas, as text or as JSON.

    2026-11-25T15:47:07.123Z INFO router.metrics.request_log: request 5f2c ended client=a model=tiny ...
    {"time": "2026-11-25T15:47:07.123Z", "level": "INFO", "logger": "router.metrics.request_log", "message": ...

A line has more fields than its message: what was logged with `extra`, what `set_up` was given for all lines of the
process, and in a router the id of the request for which the running task works. Only the names in `FIELDS` are written,
so nothing gets into the logs by accident.
"""

import json
import logging
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal, assert_never

from router.metrics import request_log
from router.wire import request_id

LogFormat = Literal["text", "json"]

FIELDS = {
    "time": "when it was written, UTC, in the form of RFC 3339",
    "level": "`INFO`, `WARNING`, `ERROR` or `CRITICAL`",
    "logger": "the part of the program",
    "message": "what happened, for people",
    "request_id": "the request that the line is about: the id that its client has, in the header `X-Request-Id` of the "
    "answer",
    "sequence": "which sequence of the request, by its name at replicas: `-0` is the first choice, `.1` its second run",
    "client": "the name of the client's key",
    "model": "the model's own name",
    "replica": "Ray Serve's id of the replica that the line is about, or that has written it; several if a request ran "
    "on several",
    "router": "the name of the router that has written the line, as metrics have it",
    "rank": "the rank of the replica that has written the line",
    "status": "the HTTP status of a request that was refused or has failed",
    "prompt_tokens": "tokens of a request's prompts",
    "cached_tokens": "how many of them a replica had in its cache",
    "output_tokens": "tokens of its answers",
    "finish_reason": "how its answers ended, as `shoal_sequences_total` counts it",
    "queue_s": "seconds that it waited in its replica",
    "first_token_s": "seconds from its arrival to its first token",
    "total_s": "seconds from its arrival to its end",
    "resumed": "times that it went on after its replica was lost, or its reader was too slow",
    "exception": "the traceback; in text the lines that follow",
}
"""The fields of a line, with their meanings. In text, the first four have no names, and ids are not repeated that the
message has."""

FIXED = ("time", "level", "logger", "message", "exception")  # every record has these in its own way
IDS = ("request_id", "sequence", "replica")
OURS = ("cluster", "kernels", "pipeline", "radix", "router", "worker")  # packages whose INFO is written
RAYS = ("ray", "ray.serve")  # loggers of Ray's with handlers of their own
_TEXT = re.compile(r"\S+ (?P<level>[A-Z]+) \S+: (?P<message>.*?)(?: replica=\S+)?")
_PLAIN = re.compile(r'[^\s"=]+')


def set_up(log_format: LogFormat, **fields: str | int) -> None:
    """Lets this process write its lines to standard error in this form, and Ray's loggers theirs where they do.
    `fields`: of all lines."""
    formatter = LineFormatter(log_format, fields)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in OURS:
        logging.getLogger(name).setLevel(logging.INFO)
    for name in RAYS:
        for ray_handler in logging.getLogger(name).handlers:
            target = getattr(ray_handler, "target", None)  # of a handler that only buffers
            (target or ray_handler).setFormatter(formatter)


class LineFormatter(logging.Formatter):
    """Writes records as lines."""

    def __init__(self, log_format: LogFormat, fields: dict[str, str | int]) -> None:
        """`fields`: of all lines. Raises ValueError for a name that is not in `FIELDS`."""
        super().__init__()
        if unknown := fields.keys() - FIELDS.keys():
            raise ValueError(f"no fields of log lines: {', '.join(sorted(unknown))}")
        self._log_format = log_format
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        message = record.message = record.getMessage()  # as every formatter leaves it, for handlers after this one
        fields = self._fields_of(record)
        exception = self.formatException(record.exc_info) if record.exc_info else record.exc_text
        match self._log_format:
            case "json":
                line = {"time": _time(record), "level": record.levelname, "logger": record.name, "message": message}
                line |= fields | ({"exception": exception} if exception else {})
                return json.dumps(line, ensure_ascii=False, default=str)
            case "text":
                text = f"{_time(record)} {record.levelname} {record.name}: {message}"
                text += "".join(
                    f" {name}={_shown(value)}"
                    for name, value in fields.items()
                    if name not in IDS or str(value) not in message
                )
                return f"{text}\n{exception}" if exception else text
            case _:
                assert_never(self._log_format)

    def _fields_of(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields without those that all records have, in the order of `FIELDS`."""
        found = self._fields | {name: value for name, value in vars(record).items() if name in FIELDS}
        if "request_id" not in found:
            if (request := request_log.current()) is not None:
                found["request_id"] = request.request_id
            elif "sequence" in found:
                found["request_id"] = request_id.of_sequence(found["sequence"])
        return {name: found[name] for name in FIELDS if name in found and name not in FIXED}


def errors(text: str) -> Iterator[str]:
    """The messages of the errors among the lines of a process's log, in either form; of each its first line."""
    for line in text.splitlines():
        if line.startswith("{"):
            try:
                told = json.loads(line)
            except ValueError:
                continue  # a part of a line: the file was just being written
            if isinstance(told, dict) and told.get("level") == "ERROR":
                yield next(iter(str(told["message"]).splitlines()), "")
        elif (found := _TEXT.fullmatch(line)) is not None and found["level"] == "ERROR":
            yield found["message"]


def _time(record: logging.LogRecord) -> str:
    written = datetime.fromtimestamp(record.created, UTC)
    return written.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _shown(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
