"""What makes no sense on a benchmark's command line is said in a line, before anything is measured."""

from pathlib import Path

import pytest

from shoal import cli

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("host --batches x", "--batches: 'x' "),
        ("host --batches 8,0", "--batches: '0' "),
        ("host --steps 0", "--steps: '0' "),
        ("overhead --rounds 0", "--rounds: '0' "),
        ("overhead --step-ms -1", "--step-ms: '-1' "),
        ("offline --rounds 0", "--rounds: '0' "),
        ("offline --batch 16 0", "--batch: '0' "),
        ("quality --pieces 0", "--pieces: '0' "),
        ("exactness --tp 1,0", "--tp: '0' "),
        ("exactness --device cuda", "GPU: --device cpu"),
    ],
)
def test_what_makes_no_sense_is_refused(
    line: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as raised:
        cli.main(["bench", *line.split()])
    assert raised.value.code == 2 and says in capsys.readouterr().err


@pytest.mark.parametrize("line", ["offline --model {folder}", "quality --model {folder}"])
def test_a_model_that_is_not_there_is_one_line(line: str, tmp_path: Path, capsys: Captured) -> None:
    assert cli.main(["bench", *line.format(folder=tmp_path / "none").split()]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"shoal bench {line.split()[0]}: ") and len(said.splitlines()) == 1


def test_a_text_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("cluster.models.resolve", lambda model, dequantize: tmp_path)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda folder: None)
    assert cli.main(["bench", "quality", "--text", str(tmp_path / "none")]) == 1
    assert "No such file" in capsys.readouterr().err
