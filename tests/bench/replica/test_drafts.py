"""Drafts next to none, with engines that only take time."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.replica import drafts
from bench.replica.draft_workloads import WORKLOADS, DraftRequest, DraftWorkload, edits, forms, schemas
from bench.replica.drafts import SIDES, Comparison, SideRun, differences, sampling_of
from bench.targets import TARGETS


class Letters:
    """Every letter is a token."""

    def prompt(self, asked: DraftRequest) -> list[int]:
        return list(asked.text.encode())

    def prediction(self, asked: DraftRequest) -> list[int]:
        return list(asked.prediction.encode())


class Timed:
    """A side on which each request takes its time and repeats its prompt; the `wrong` ones end otherwise."""

    def __init__(self, name: str, calls: list[str], seconds: float, wrong: str = "") -> None:
        self._name, self._calls, self._seconds, self._wrong = name, calls, seconds, wrong

    def add(self, run: SideRun, prompts: Any, predictions: Any, sampling: Any) -> None:
        assert len(prompts) == len(predictions) == len(sampling)
        self._calls.append(self._name)
        for prompt in prompts:
            run.seconds += self._seconds
            run.outputs.append([*prompt[:3], bytes(prompt).decode() == self._wrong])
            run.tokens, run.steps = run.tokens + 4, run.steps + 2
        run.drafted, run.accepted = {"suffix": 4}, {"suffix": 2}


@pytest.mark.parametrize(("wrong", "different"), [("", 0), ("b1", 1)])
def test_sides_take_turns_and_outputs_are_compared(wrong: str, different: int) -> None:
    calls: list[str] = []
    sides: dict[str, Any] = {"off": Timed("off", calls, 3.0), "auto": Timed("auto", calls, 2.0, wrong)}
    comparison = Comparison(sides, Letters())  # type: ignore[arg-type]
    comparison.compare(
        DraftWorkload("some.vs_off", lambda number: [DraftRequest(f"{each}{number}", 4) for each in "abc"]), 2
    )
    assert calls[:6] == ["auto", "off", "off", "auto", "auto", "off"], "one request after another, in changing order"
    assert calls.count("off") == calls.count("auto") == 9
    assert len(comparison.rounds["some.vs_off"]) == 2, "the first round does not count"
    assert comparison.num_different == different
    (figure,) = comparison.figures("drafts.cpu")
    assert (figure.name, figure.value) == ("drafts.cpu.some.vs_off", 1.5)
    calls.clear()
    comparison.compare(
        DraftWorkload("all.vs_off", lambda number: [DraftRequest("a", 4), DraftRequest("b", 4)], at_once=True), 1
    )
    assert len(calls) == 4, "both requests at once"
    assert json.loads(json.dumps(comparison.raw()))["all.vs_off"][0]["auto"]["tokens"] == 8


def test_where_outputs_differ() -> None:
    runs = {side: SideRun() for side in SIDES}
    runs["off"].outputs, runs["auto"].outputs = [[1, 2], [1, 2, 3], [4]], [[1, 2], [1, 5, 3], [4, 4]]
    assert differences(runs) == [(1, 1), (2, 1)]


def test_the_lower_figure_of_the_edits_counts() -> None:
    comparison = Comparison({}, Letters())  # type: ignore[arg-type]
    for name, seconds in (("edit.predicted.vs_off", 4.0), ("edit.unpredicted.vs_off", 2.0)):
        comparison.rounds[name] = [{"off": SideRun(seconds), "auto": SideRun(1.0)}]
    assert {figure.name: figure.value for figure in comparison.figures("x")}["x.edit.vs_off"] == 2.0


def test_every_round_has_requests_of_its_own() -> None:
    for name, workloads in WORKLOADS.items():
        for workload in workloads if name != "schemas" else ():  # some of their packages are slow to import
            assert workload.requests(1) == workload.requests(1) != workload.requests(2)
    (form, *_), (edit, *_) = forms(1, 2), edits(1, 1, predicted=True)
    assert form.schema is not None and len(form.schema["required"]) == len(form.schema["properties"]) == 8
    assert "deliver_" in edit.prediction and edit.prediction in edit.text
    assert sampling_of(form, 3).grammar is not None
    first, second = schemas(1, 2), schemas(2, 2)
    assert first == schemas(1, 2) != second
    assert [each.schema for each in first] == [each.schema for each in second]
    assert all(each.schema is not None and each.schema["type"] == "object" for each in first)


def test_the_targets_are_figures_of_this_benchmark() -> None:
    there = {f"drafts.cpu.{workload.figure}" for workloads in WORKLOADS.values() for workload in workloads}
    asked = {name for name in TARGETS if name.startswith("drafts.cpu.")}
    assert asked and asked <= there | {"drafts.cpu.edit.vs_off"}


def test_unknown_workloads(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        drafts.main(["--workloads", "form,poems", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert "poems: " in said and "form, schemas, edit, chat" in said
