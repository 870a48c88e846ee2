"""What is said of a way to compute a model, beside float32."""

import json
import math
from pathlib import Path

import pytest

from bench.correctness import quality, reference
from bench.correctness.quality import Read, judge


def test_ways_are_held_to_float32() -> None:
    exact = Read([-1.0, -2.0, -3.0, -2.0], [1, 2, 3, 4], [[1, 2, 3], [4, 5, 6]])
    own = Read([-1.5, -2.0, -2.5, -2.0], [1, 2, 3, 0], [[1, 2, 3], [4, 0, 6]])
    found = judge(own, exact)
    assert (found.perplexity, found.difference) == pytest.approx((math.exp(2), 0.25))
    assert (found.agreement, found.greedy) == pytest.approx((3 / 4, 4 / 6))
    same = judge(exact, exact)
    assert (same.difference, same.agreement, same.greedy) == (0, 1, 1)


def test_the_text_that_is_read_by_default_is_there() -> None:
    assert all(path.is_file() for path in quality.TEXTS)


@pytest.mark.bench
def test_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text"
    text.write_text("Some words, and then some more of them. " * 40)
    monkeypatch.setattr(quality, "PIECE_TOKENS", 200)
    folder = reference.make("tiny", tmp_path / "tiny")
    arguments = [
        "--model",
        str(folder),
        "--text",
        str(text),
        "--pieces",
        "2",
        "--out",
        str(tmp_path),
        "--name",
        "found",
    ]
    assert quality.main(arguments) == 0
    found = {figure["name"]: figure["value"] for figure in json.loads((tmp_path / "found.json").read_text())["figures"]}
    # A rounding of 3 bits is seen, and is larger than that of 7.
    assert 0 < 4 * found["cpu.quality.bfloat16.difference"] < found["cpu.quality.fp8.difference"] < 1
    assert found["cpu.quality.fp8.agreement"] < found["cpu.quality.bfloat16.agreement"] <= 1
    assert len(capsys.readouterr().out.splitlines()) == 5
    with pytest.raises(SystemExit):
        quality.main(["--ways", "int3"])
