"""Published traces of requests: lengths, arrival times and shared prefixes, read into one form.

The format is told from the file's first line. A trace holds no text; `bench.workload` makes prompts of its rows.
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
class Row:
    """One request of a trace.

    `arrival_s` counts from the trace's first request and is None where the trace has no times. `blocks` are the ids of
    the prompt's blocks of `block_tokens` tokens each, the last one possibly cut; two rows whose ids begin alike have
    prompts that begin alike. Without blocks, no prompt shares anything with another.
    """

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    blocks: tuple[int, ...] = ()
    block_tokens: int = 0


def read(path: Path, limit: int | None = None) -> list[Row]:
    """The first `limit` rows of a trace, in order of arrival, the first at 0 s.

    Known formats: Azure's LLM inference trace (CSV: TIMESTAMP, ContextTokens, GeneratedTokens), Mooncake's (JSON lines:
    timestamp in ms, input_length, output_length, hash_ids) and Vidur's lengths (CSV: num_prefill_tokens,
    num_decode_tokens). Rows without a prompt or without output are kept at one token. Raises ValueError with the file
    and line for anything else, OSError for a file that cannot be read.
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


def _azure(row: dict[str, str]) -> Row:
    # Seven digits of a second's fraction: more than datetime takes.
    when = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26])
    seconds = (when.replace(tzinfo=None) - datetime(2000, 1, 1)).total_seconds()
    return Row(max(1, int(row["ContextTokens"])), max(1, int(row["GeneratedTokens"])), seconds)


def _mooncake(row: dict) -> Row:
    prompt, blocks = int(row["input_length"]), tuple(int(block) for block in row["hash_ids"])
    if -(-prompt // MOONCAKE_BLOCK) != len(blocks):
        raise ValueError(f"input_length {prompt} does not fit {len(blocks)} blocks of {MOONCAKE_BLOCK} tokens")
    seconds = float(row["timestamp"]) / 1000
    return Row(max(1, prompt), max(1, int(row["output_length"])), seconds, blocks, MOONCAKE_BLOCK)


def _lengths(row: dict[str, str]) -> Row:
    return Row(max(1, int(row["num_prefill_tokens"])), max(1, int(row["num_decode_tokens"])))


def _from_zero(rows: list[Row]) -> list[Row]:
    if rows[0].arrival_s is None:
        return rows
    timed = sorted(rows, key=lambda row: row.arrival_s or 0.0)
    start = timed[0].arrival_s or 0.0
    return [replace(row, arrival_s=(row.arrival_s or 0.0) - start) for row in timed]


def shrink(rows: Sequence[Row], divisor: int = 1, max_prompt: int | None = None) -> list[Row]:
    """The same trace for a smaller model: every length divided by `divisor`, then prompts cut to `max_prompt` tokens.

    A block shrinks with the rest (512 tokens by a divisor of 16 are 32), so what was shared stays shared, in the same
    proportion. Lengths are rounded up. Cutting keeps the front of a prompt, which is what requests share. Raises
    ValueError when a block cannot be divided evenly: blocks of different requests would then no longer line up.
    """
    if divisor < 1 or (max_prompt is not None and max_prompt < 1):
        raise ValueError("a trace is shrunk by a divisor of at least 1, to prompts of at least 1 token")
    return [_shrink(row, divisor, max_prompt) for row in rows]


def _shrink(row: Row, divisor: int, max_prompt: int | None) -> Row:
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
