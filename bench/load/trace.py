"""Readers of published request traces: lengths, arrival times and shared prefixes, in a common form.

The format is recognised by the file's first line. A trace holds no text; `bench.load.workload` makes prompts of its
rows.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

MOONCAKE_BLOCK = 512  # tokens that one id in `hash_ids` stands for
FORMATS = (
    "Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's JSON lines (timestamp, input_length, "
    "output_length, hash_ids) or Vidur's CSV of lengths (num_prefill_tokens, num_decode_tokens)"
)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request of a trace.

    `arrival_s` counts from the trace's first request. It is None if the trace has no times.

    `blocks` has the ids of the prompt's blocks of `block_tokens` tokens each; the last block may be shorter. Rows whose
    `blocks` begin with the same ids have prompts that begin with the same tokens. Prompts without blocks share nothing.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


def read(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first `limit` rows of a trace in order of arrival. The first row arrives at 0 s.

    | format | file | fields |
    | --- | --- | --- |
    | Azure's LLM inference trace | CSV | TIMESTAMP, ContextTokens, GeneratedTokens |
    | Mooncake's | JSON lines | timestamp (ms), input_length, output_length, hash_ids |
    | Vidur's lengths | CSV | num_prefill_tokens, num_decode_tokens |

    A length of zero becomes one token. Raises ValueError, naming the file, for any other format, for a row that cannot
    be parsed and for a trace without rows; OSError if the file cannot be read.
    """
    with path.open(newline="", encoding="utf-8") as lines:
        first = lines.readline()
        lines.seek(0)
        columns = {column.strip() for column in first.split(",")}
        try:
            if first.lstrip().startswith("{"):
                rows = [_mooncake(json.loads(line)) for line in lines if line.strip()]
            elif {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= columns:
                rows = [_azure(row) for row in csv.DictReader(lines)]
            elif {"num_prefill_tokens", "num_decode_tokens"} <= columns:
                rows = [_lengths(row) for row in csv.DictReader(lines)]
            else:
                raise ValueError(f"unknown format: expected {FORMATS}")
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: a row lacks a field or has one of the wrong type: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
    if not rows:
        raise ValueError(f"{path}: the trace has no requests")
    return _from_zero(rows)[:limit]


def _azure(row: dict[str, str]) -> TraceRequest:
    # The fraction of the second has seven digits, and datetime accepts six.
    when = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
    seconds = (when.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()
    return TraceRequest(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), seconds)


def _mooncake(row: dict) -> TraceRequest:
    prompt, blocks = int(row["input_length"]), tuple(int(block) for block in row["hash_ids"])
    if -(-prompt // MOONCAKE_BLOCK) != len(blocks):
        raise ValueError(f"input_length {prompt} does not fit {len(blocks)} blocks of {MOONCAKE_BLOCK} tokens")
    seconds = float(row["timestamp"]) / 1000
    return TraceRequest(max(1, prompt), max(1, int(row["output_length"])), seconds, blocks, MOONCAKE_BLOCK)


def _lengths(row: dict[str, str]) -> TraceRequest:
    return TraceRequest(max(1, int(row["num_prefill_tokens"])), max(1, int(row["num_decode_tokens"])))


def _from_zero(rows: list[TraceRequest]) -> list[TraceRequest]:
    if rows[0].arrival_s is None:
        return rows
    timed = sorted(rows, key=lambda row: row.arrival_s or 0.0)
    start = timed[0].arrival_s or 0.0
    return [replace(row, arrival_s=(row.arrival_s or 0.0) - start) for row in timed]


def shrink(rows: Sequence[TraceRequest], divisor: int = 1, max_prompt: int | None = None) -> list[TraceRequest]:
    """The same trace for a smaller model: every length is divided by `divisor` and rounded up, then prompts are cut to
    `max_prompt` tokens.

    Blocks shrink by the same factor (with a divisor of 16, from 512 to 32 tokens), so the shared part of each prompt
    keeps its proportion. Cutting keeps the front of a prompt, which is the part that requests share.

    Raises ValueError if `divisor` does not divide the block size, since blocks of different requests would no longer
    line up, and if `divisor` or `max_prompt` is below 1.
    """
    if divisor < 1 or (max_prompt is not None and max_prompt < 1):
        raise ValueError("a trace is shrunk by a divisor of at least 1, to prompts of at least 1 token")
    return [_shrink(row, divisor, max_prompt) for row in rows]


def _shrink(row: TraceRequest, divisor: int, max_prompt: int | None) -> TraceRequest:
    if row.block_tokens % divisor:
        raise ValueError(f"a block of {row.block_tokens} tokens does not divide by {divisor}")
    block = row.block_tokens // divisor
    prompt = -(-row.prompt_tokens // divisor)
    if max_prompt is not None:
        prompt = min(prompt, max_prompt)
    blocks = row.blocks[: -(-prompt // block)] if block else ()
    return replace(
        row, prompt_tokens=prompt, output_tokens=-(-row.output_tokens // divisor), blocks=blocks, block_tokens=block
    )
