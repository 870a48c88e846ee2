"""Every known format is read as what it says, and what it is not is refused with the reason."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.load import trace
from bench.load.trace import TraceRequest

AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,0
"""
MOONCAKE = [
    {"timestamp": 500, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 2]},
    {"timestamp": 2500, "input_length": 512, "output_length": 7, "hash_ids": [0]},
]
LENGTHS = """\
num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio
3772,54,3826,69.85
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_azure(tmp_path: Path) -> None:
    first, second = trace.read(written(tmp_path, AZURE))
    assert first == TraceRequest(4808, 10, 0.0)
    assert (second.prompt_tokens, second.output_tokens) == (3180, 1)
    assert second.arrival_s == pytest.approx(0.052, abs=1e-6)


def test_mooncake(tmp_path: Path) -> None:
    path = written(tmp_path, "\n".join(json.dumps(row) for row in MOONCAKE) + "\n\n")
    assert trace.read(path) == [TraceRequest(1300, 20, 0.0, (0, 1, 2), 512), TraceRequest(512, 7, 2.0, (0,), 512)]
    assert len(trace.read(path, limit=1)) == 1


def test_lengths_have_no_times(tmp_path: Path) -> None:
    assert trace.read(written(tmp_path, LENGTHS)) == [TraceRequest(3772, 54)]


def test_rows_come_in_order_of_arrival(tmp_path: Path) -> None:
    rows = trace.read(written(tmp_path, "\n".join(json.dumps(row) for row in reversed(MOONCAKE))))
    assert [row.arrival_s for row in rows] == [0.0, 2.0] and rows[0].prompt_tokens == 1300


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "unknown format"),
        ("a,b\n1,2\n", "unknown format"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9,x,1\n", "invalid literal"),
        ("num_prefill_tokens,num_decode_tokens\n5\n", "lacks a field"),
        ('{"timestamp": 0, "input_length": 5}\n', "hash_ids"),
        ('{"timestamp": 0, "input_length": 5000, "output_length": 1, "hash_ids": [1]}\n', "does not fit 1 blocks"),
        ("{nonsense\n", "Expecting property name"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_name(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says) as raised:
        trace.read(written(tmp_path, text))
    assert str(tmp_path) in str(raised.value)


def test_shrinking_keeps_blocks_in_line() -> None:
    rows = [TraceRequest(1300, 20, 0.0, (0, 1, 2), 512), TraceRequest(512, 7, 2.0, (0,), 512)]
    assert trace.shrink(rows, 16) == [TraceRequest(82, 2, 0.0, (0, 1, 2), 32), TraceRequest(32, 1, 2.0, (0,), 32)]
    assert trace.shrink(rows, 16, max_prompt=33)[0] == TraceRequest(33, 2, 0.0, (0, 1), 32)
    with pytest.raises(ValueError, match=r"\b512 tokens\b.*\b3\b"):
        trace.shrink(rows, 3)
    with pytest.raises(ValueError, match="at least 1"):
        trace.shrink(rows, 0)


@settings(deadline=None)
@given(st.integers(1, 20000), st.sampled_from([1, 2, 16, 64, 512]), st.none() | st.integers(1, 400))
def test_a_shrunk_row_has_as_many_blocks_as_it_needs(prompt: int, divisor: int, most: int | None) -> None:
    blocks = tuple(range(-(-prompt // 512)))
    (row,) = trace.shrink([TraceRequest(prompt, 1, 0.0, blocks, 512)], divisor, most)
    assert 1 <= row.prompt_tokens <= (most or prompt)
    assert len(row.blocks) == -(-row.prompt_tokens // row.block_tokens)
    assert row.blocks == blocks[: len(row.blocks)]
