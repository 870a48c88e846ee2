"""Result files say what they must and nothing that must not be published; the page is made from them alone."""

import json
import math
from pathlib import Path

import pytest

from bench import results
from bench.results import Figure

FIGURES = [Figure("b.speed", 1234.5678, "tokens/s", True), Figure("a.wait", 0.25, "s", False)]


def test_a_result_has_all_fields_and_the_raw_ones(tmp_path: Path) -> None:
    path = results.write("serve", FIGURES, {"summary": {"x": 1}}, folder=tmp_path)
    result = json.loads(path.read_text())
    assert path == tmp_path / "serve.json" and list(tmp_path.iterdir()) == [path]
    assert {"when", "command", "commit", "machine", "versions", "figures", "summary"} == result.keys()
    assert result["figures"][0] == {"name": "b.speed", "value": 1234.5678, "unit": "tokens/s", "higher_is_better": True}
    assert result["machine"]["cores"] >= 1 and result["machine"]["memory_bytes"] > 2**28
    assert result["versions"]["python"].startswith("3.")


@pytest.mark.parametrize(
    ("name", "figures", "raw", "says"),
    [
        ("../escape", FIGURES, {}, "letters, digits"),
        ("", FIGURES, {}, "letters, digits"),
        ("x", [FIGURES[0], FIGURES[0]], {}, "twice: b.speed"),
        ("x", [Figure("a", math.nan, "s", False)], {}, "not finite numbers: a"),
        ("x", FIGURES, {"machine": 1}, "may not name machine"),
    ],
)
def test_a_wrong_result_is_refused(tmp_path: Path, name: str, figures: list[Figure], raw: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        results.write(name, figures, raw, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/home/me/.venv/bin/shoal", "bench", "serve", "--rate", "4"], "shoal bench serve --rate 4"),
        (["/repo/bench/placement/router.py", "--seed=1"], "python -m bench.placement.router --seed=1"),
        (["shoal", "--trace", "/data/a b.csv"], "shoal --trace 'a b.csv'"),
        (["shoal", "--trace=../data/x.jsonl", "--out", "here/there"], "shoal --trace=x.jsonl --out here/there"),
        (["shoal", "--api-key", "sk-1", "--api-key=sk-2", "--x", "y"], "shoal --api-key *** --api-key=*** --x y"),
    ],
)
def test_the_command_is_published_without_secrets_and_machine_paths(argv: list[str], command: str) -> None:
    assert results.typed(argv) == command


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (0.25, "0.25"),
        (1234.5678, "1,235"),
        (99.996, "100"),
        (0.00012345, "0.0001234"),
        (-3.14159, "-3.142"),
        (1e-7, "1.000e-07"),
        (2e12, "2.000e+12"),
    ],
)
def test_numbers_for_people(value: float, text: str) -> None:
    assert results.number(value) == text


def test_the_page_is_sorted_and_depends_on_the_files_alone(tmp_path: Path) -> None:
    for name in ("z", "a"):
        bounds = {"bounds": {"b.speed": "at least"}} if name == "z" else {}
        results.write(name, FIGURES, bounds, command="cmd", folder=tmp_path)
    page = results.page(results.read(tmp_path))
    assert page == results.page(results.read(tmp_path))
    assert page.index("## a") < page.index("## z")
    assert page.index("| a.wait | 0.25 | s | lower |") < page.index("| b.speed | 1,235 | tokens/s | higher |")
    assert page.count("| b.speed | >= 1,235 | tokens/s | higher |") == 1


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text('{"figures": []}')
    with pytest.raises(ValueError, match=r"odd\.json"):
        results.read(tmp_path)


def test_check_says_when_the_page_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "PAGE", tmp_path / "RESULTS.md")
    monkeypatch.setattr(results, "read", dict)
    assert results.main(["--check"]) == 1
    assert "stale" in capsys.readouterr().err
    assert results.main([]) == 0
    assert results.main(["--check"]) == 0
    (tmp_path / "RESULTS.md").write_text("by hand")
    assert results.main(["--check"]) == 1
