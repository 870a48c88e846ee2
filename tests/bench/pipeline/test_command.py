"""The benchmark of pipelines: its parts on a site that only counts, and all of it on a tiny model."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from bench import results
from bench.load.workload import Session, Vocabulary
from bench.pipeline import command, real_site
from bench.pipeline.capacity_search import CapacitySearch, Carried, together
from bench.pipeline.experiment_grid import ExperimentGrid, print_rows
from bench.pipeline.figures import Findings, Twin, meter_overhead
from bench.pipeline.layout import SCHEDULES, ParallelLayout, Setting
from bench.pipeline.load_generator import OfferedLoad, ServiceObjective, offer, summary
from bench.pipeline.meter_report import causes, decode_bubble, draw_kept, keep, metered
from bench.pipeline.result_store import Points, ResultStore
from bench.pipeline.simulated_site import SimulatedSite
from bench.pipeline.simulator import Hardware
from bench.pipeline.timeline_plot import _window, draw
from bench.pipeline.traffic import PUBLISHED, Traffic, offline, published, traced
from bench.replica import link_speed
from bench.results import Figure, number
from bench.targets import TARGETS, Target, print_table
from pipeline.cost import CostModel
from pipeline.meter import Meter, Span
from pipeline.padding import UNPADDED
from pipeline.roofline import DEVICES, LINKS, MODELS, make_stages
from pipeline.shape import BatchShape
from worker.messages import Failure, Generate, Output

PP4, TP4 = ParallelLayout(1, 4), ParallelLayout(4, 1)
WORDS = Vocabulary(0, 0, 100)


# ---------------------------------------------------------------- loads


@pytest.mark.parametrize("name", PUBLISHED)
def test_requests_are_as_long_as_published(name: str) -> None:
    turns = [session.turns[0] for session in published(name, 4000, seed=1).sessions]
    prompts, outputs = [turn.prompt_tokens for turn in turns], [turn.output_tokens for turn in turns]
    known = PUBLISHED[name]
    # Those that are too long for a context are drawn again, which takes a little off.
    assert np.median(prompts) == pytest.approx(known.prompt[0], rel=0.1)
    assert np.median(outputs) == pytest.approx(known.output[0], rel=0.1)
    assert np.quantile(outputs, 0.9) == pytest.approx(known.output[1], rel=0.1)
    assert max(map(sum, zip(prompts, outputs, strict=True))) <= known.most


def test_the_same_requests_come_at_every_rate() -> None:
    traffic = published("long", 400, seed=3, shrink=8)
    slow, fast = traffic.at(0.5), traffic.at(2.0)
    assert [session.turns for session in slow] == [session.turns for session in fast]
    assert slow[-1].arrival_s == pytest.approx(4 * (fast[-1].arrival_s or 0))
    assert fast[-1].arrival_s == pytest.approx(200, rel=0.15), "two a second"
    assert {session.arrival_s for session in traffic.at_once()} == {0.0}


def test_a_trace_keeps_its_rhythm(tmp_path: Path) -> None:
    rows = [(0, 600), (1000, 100), (4000, 5000), (8000, 700)]
    lines = [
        {"timestamp": at, "input_length": n, "output_length": 5, "hash_ids": list(range(-(-n // 512)))}
        for at, n in rows
    ]
    path = tmp_path / "calls.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    traffic = traced(path, 10, seed=0, most=1000)
    assert traffic.name == "trace_calls" and [session.arrival_s for session in traffic.at(2.0)] == [0.0, 0.125, 1.0]
    with pytest.raises(ValueError, match=r"\b20 tokens"):
        traced(path, 10, seed=0, most=20)
    with pytest.raises(ValueError, match=r"\b3: .*--shrink"):
        traced(path, 10, seed=0, shrink=3)


def test_offline_workloads_have_their_lengths() -> None:
    turns = [session.turns[0] for session in offline("prefill_half").sessions]
    assert {(turn.prompt_tokens, turn.output_tokens) for turn in turns} == {(4096, 1)} and len(turns) == 32
    assert [len(offline(name).sessions) for name in ("mini_1024", "mini_512", "mini_half")] == [1024, 512, 128]


# ---------------------------------------------------------------- offering


class Slow:
    """A replica on a clock of its own: it starts a request when the one before has ended, and takes `step_s` for a
    token."""

    def __init__(self, step_s: float = 0.1) -> None:
        self.now_s, self.step_s = 100.0, step_s
        self.queue: list[tuple[Generate, float]] = []
        self.produced = 0
        self.aborted: list[str] = []
        self.fails = False

    def __call__(self) -> float:
        return self.now_s

    def add(self, request: Generate) -> None:
        self.queue.append((request, self.now_s))

    def take_outputs(self, wait_s: float) -> list[Output]:
        if not self.queue:
            self.now_s += wait_s
            return []
        request, since_s = self.queue[0]
        queue_s = self.now_s - since_s
        self.now_s += self.step_s
        self.produced += 1
        output = Output(request_id=request.request_id, token_ids=[1], queue_s=queue_s if self.produced == 1 else None)
        if self.fails:
            output.finish_reason, output.failure = "error", Failure("internal", "it broke")
        if self.produced == request.sampling.max_tokens:
            self.queue.pop(0)
            self.produced = 0
            output.finish_reason = "length"
        return [output]

    def abort(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


def arriving(*times: float, output: int = 3) -> list[Session]:
    return [Session(session.turns, at) for session, at in zip(together(len(times), 4, output), times, strict=True)]


def test_requests_are_sent_when_they_are_due() -> None:
    replica = Slow()
    point = summary(offer(replica, arriving(0.0, 0.1, 5.0), WORDS, clock=replica), 1.0)
    assert point["requests_per_s"] == pytest.approx(3 / 5.3) and point["output_tok_s"] == pytest.approx(9 / 5.3)
    assert point["ttft_s"]["max"] == pytest.approx(0.3), "the second waited for the first"
    assert point["tbt_s"]["p99"] == pytest.approx(0.1)
    assert point["delay_s"]["p50"] == pytest.approx(0.0) and point["given_up"] is None


@pytest.mark.parametrize(
    ("objective", "reason"),
    [(ServiceObjective("strict", 0.05), "tbt"), (ServiceObjective("strict", 0.2, delay_s=0.15), "delay")],
)
def test_a_load_that_cannot_keep_to_its_objective_is_ended(objective: ServiceObjective, reason: str) -> None:
    replica = Slow()
    offered = offer(replica, arriving(*[0.0] * 20), WORDS, objective, clock=replica)
    assert offered.given_up == reason and offered.seconds < 20 * 0.3
    point = summary(offered, 1.0)
    assert not objective.holds(point) and len(replica.aborted) == 20 - round(point["requests_per_s"] * offered.seconds)


def test_an_objective_is_kept_by_ninety_nine_in_a_hundred() -> None:
    replica = Slow()
    objective = ServiceObjective("strict", 0.11)
    offered = offer(replica, arriving(0.0, 1.0), WORDS, objective, clock=replica)
    assert objective.holds(summary(offered, 1.0))
    assert not ServiceObjective("strict", 0.09).holds(summary(offered, 1.0))


def test_a_request_that_fails_ends_the_load() -> None:
    replica = Slow()
    replica.fails = True
    with pytest.raises(RuntimeError, match="it broke"):
        offer(replica, arriving(0.0), WORDS, clock=replica)


# ---------------------------------------------------------------- studies


class Counting:
    """A site where each layout and setting carries what it is said to."""

    def __init__(self, carries: dict[str, float]) -> None:
        self.carries = carries
        self.asked: list[str] = []

    def offer(self, layout: ParallelLayout, setting: Setting, load: OfferedLoad) -> dict[str, Any]:
        rate = load.rate
        self.asked.append(f"{layout} {setting.schedule} {rate:.3g}")
        most = self.carries.get(f"{layout} {setting.schedule}/{setting.token_budget}", 1.0)
        late = rate > most
        return {
            "rate": rate,
            "given_up": "tbt" if late else None,
            "requests_per_s": 1.0,
            "output_tok_s": 100.0 * most,
            "input_tok_s": 1000.0 * most,
            "ttft_s": {"p50": 0.5 if setting.schedule == "uniform" else 2.0, "p99": 3.0},
            "watts": 1400.0,
            "limit_watts": 2800.0,
            "tbt_s": {"p50": 0.02, "p99": 0.2 if late else 0.03},
            "delay_s": {"p50": 0.1},
            "bubble": 0.1 if setting.schedule == "uniform" else 0.4,
            "parts": {"compute": 0.8, "communication": 0.15, "host": 0.05},
            "stages": [{}] * layout.pp,
            "decode_bubble": 0.2,
            "micro_batches": 100,
            "seconds": 10.0,
            "model_error": 0.03,
        }


CARRIES = {"pp4 uniform/8192": 2.0, "pp4 fixed_chunk/512": 1.6, "pp4 fixed_chunk/1024": 0.4}
CARRIES |= {
    "pp4 offline/8192": 2.0,
    "tp4 offline/8192": 0.5,
    "tp4 uniform/8192": 0.5,
    "tp4 fixed_chunk/512": 0.3,
    "tp4 fixed_chunk/1024": 0.3,
}


def study(points: Points, site: Counting) -> CapacitySearch:
    return CapacitySearch(points, site, 8192, [512, 1024], 512)


def survey(found: CapacitySearch, **more: Any) -> ExperimentGrid:
    asked = {"layouts": [PP4, TP4], "traffics": [published("long", 4, 0)], "jobs": [offline("mini_512")]}
    return ExperimentGrid(found, schedules=["uniform", "fixed_chunk"], objectives=["strict"], **asked | more)


def test_the_best_setting_of_a_schedule_counts() -> None:
    site = Counting(CARRIES)
    carried = study(Points(), site).carried(
        PP4, "fixed_chunk", published("long", 4, 0), ServiceObjective("strict", 0.1)
    )
    assert 1.6 / 1.05 <= carried.rate <= 1.6 and carried.setting.token_budget == 512
    assert sum("1024" not in asked for asked in site.asked) < 12
    assert carried.point is not None and carried.point["given_up"] is None


@pytest.mark.bench
def test_a_sweep_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Counting(CARRIES)
    begun = survey(study(ResultStore("found", tmp_path, {"model": "m"}), first))
    begun.run()
    again = Counting(CARRIES)
    resumed = survey(study(ResultStore("found", tmp_path, {"model": "m"}), again))
    resumed.run()
    assert first.asked and not again.asked and resumed.rows() == begun.rows()
    half = json.loads((tmp_path / "found.json").read_text())
    half["points"].pop(next(key for key in half["points"] if "uniform" in key and "strict" in key))
    (tmp_path / "found.json").write_text(json.dumps(half))
    survey(study(ResultStore("found", tmp_path, {"model": "m"}), again)).run()
    assert len(again.asked) == 1, "only what is missing"
    assert "found.json" in capsys.readouterr().err
    with pytest.raises(ValueError, match="model: --name"):
        ResultStore("found", tmp_path, {"model": "other"})  # whose first point would throw these away
    assert not ResultStore("found", tmp_path, {"model": "m"}, fresh=True).points


def test_a_sweep_says_under_which_commits_its_points_were_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for commit, said in (("aaa", False), ("aaa", False), ("bbb", True)):
        monkeypatch.setattr(results, "commit", lambda commit=commit: commit)
        sweep = ResultStore("found", tmp_path, {})
        shown = capsys.readouterr().err
        assert ("aaa" in shown and "bbb" in shown and "--fresh" in shown) is said
        sweep.point(commit, lambda: 1)
    assert json.loads((tmp_path / "found.json").read_text())["commits"] == {"aaa": "aaa", "bbb": "bbb"}


def test_figures_compare_ours_with_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = survey(study(Points(), Counting(CARRIES)))
    asked.run()
    found = Findings(asked.study, PP4, asked.whole, "pipeline.sockets", "pipeline")
    asked.report(found)
    found.meter(asked.jobs)
    values = {figure.name.removeprefix("pipeline."): figure.value for figure in found.figures}
    assert values["sockets.capacity_strict.vs_fixed_chunk"] == pytest.approx(2.0 / 1.6, rel=0.06)
    assert values["sockets.capacity_strict.vs_tp4"] == pytest.approx(4.0, rel=0.06)
    assert values["sockets.bubble.vs_fixed_chunk"] == pytest.approx(0.25)
    assert values["sockets.mini_512.output_tok_s"] == 200.0 and values["sockets.mini_512.vs_tp4"] == 4.0
    assert values["sockets.ttft_p50.vs_fixed_chunk"] == 0.25
    assert values["cost_model.median_error"] == 0.03 and 0 < values["meter.overhead"] < 0.5
    # What is not reached says why.
    reason = found.reasons["pipeline.sockets.decode_bubble"]
    assert all(part in reason for part in ("pp4", "communication 15.0%", "host 5.0%", "1,400 of 2,800 W")), reason
    print_table(found.figures, tmp_path / "found.json", found.reasons)
    said = capsys.readouterr().out
    assert f"pipeline.sockets.decode_bubble is missed: {reason}" in " ".join(said.split()) and "reached" in said


@pytest.mark.parametrize(("carried", "at"), [(1.02, 1.02), (1.5, 1.0), (0.9, 1.0)])
def test_the_bubble_is_of_about_the_same_rate(carried: float, at: float) -> None:
    ours = Carried(carried, Setting("uniform", 8192), None)
    others = Carried(1.0, Setting("fixed_chunk", 512), None)
    assert study(Points(), Counting({})).beside(ours, others) == at


def test_many_decodes_are_compared_under_their_name() -> None:
    site = Counting(CARRIES)
    asked = survey(study(Points(), site), traffics=[], jobs=[offline("mini_1024")])
    asked.run()
    found = Findings(asked.study, PP4, asked.whole, "pipeline.nvlink", "pipeline")
    asked.report(found)
    values = {figure.name: figure.value for figure in found.figures}
    assert values["pipeline.nvlink.decode_heavy.vs_tp4"] == 4.0
    jobs = ["pp4 offline 0", "pp4 uniform 0", "tp4 offline 0"]  # the second is of decodes alone
    assert site.asked == jobs, "a decode iteration is of use to objectives alone"


def test_others_are_searched_down_to_a_part_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    site = Counting(CARRIES | {"pp4 hybrid/8192": 0.1})
    asked = survey(study(Points(), site))
    asked.schedules = ["uniform", "hybrid"]
    asked.run()
    tried = [float(one.split()[-1]) for one in site.asked if one.startswith("pp4 hybrid")]
    ours = asked.carried[PP4, "uniform", "long", "strict"].rate
    assert tried == [pytest.approx(ours / 8, rel=0.01)]
    found = Findings(asked.study, PP4, asked.whole, "pipeline.sockets", "pipeline")
    asked.report(found)
    values = {figure.name: figure.value for figure in found.figures}
    assert values["pipeline.sockets.capacity_strict.vs_hybrid"] == pytest.approx(8.0)
    (why,) = (found.bounds.pop(name) for name in ["pipeline.sockets.capacity_strict.vs_hybrid"])
    assert "hybrid" in why and f"{number(ours / 8)} requests/s" in why and not found.bounds
    print_rows(asked.rows(), asked.meanings())
    said = capsys.readouterr().out
    assert "< 0.2" in said and "100 ms" in said and "5 decode iterations" in said
    # The schedule of which no rate held has no such row.
    (row,) = (line.split() for line in said.partition("where the stages' time goes")[2].splitlines() if "pp4" in line)
    assert row == ["pp4", "uniform", "long", "strict", "80.0%", "0.0%", "15.0%", "5.0%"]


@pytest.mark.parametrize(("more", "less"), [("uniform/8192", "fixed_chunk/512"), ("fixed_chunk/512", "uniform/8192")])
def test_what_carries_all_that_is_tried_is_in_no_figure(
    more: str, less: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = survey(study(Points(), Counting({f"pp4 {more}": 1e9, f"pp4 {less}": 1.6})), layouts=[PP4])
    asked.run()
    rows = {row["schedule"]: row for row in asked.rows()}
    assert [name for name in rows if "at_least" in rows[name]] == [more.partition("/")[0]]
    found = Findings(asked.study, PP4, None, "x", "x")
    asked.report(found)
    values = {figure.name for figure in found.figures}
    assert not any("vs_fixed_chunk" in name for name in values if "capacity" in name)
    assert ("x.long.capacity_strict" in values) is ("uniform" in less)
    name = "x.capacity_strict.vs_fixed_chunk"
    assert "carries at least" in found.reasons[name] and "--requests" in found.reasons[name]
    print_rows(asked.rows())
    assert ">= " in capsys.readouterr().out


def test_a_search_from_below_ends() -> None:
    site = Counting({"tp4 hybrid/8192": math.inf})
    found = study(Points(), site).carried(
        TP4, "hybrid", published("long", 4, 0), ServiceObjective("strict", 0.1), least=0.2
    )
    assert found.at_least and found.rate == pytest.approx(12.8)


def test_a_load_that_was_ended_early_is_beside_nothing() -> None:
    asked = survey(study(Points(), Counting(CARRIES | {"pp4 uniform/8192": 1.0})), layouts=[PP4])
    asked.run()
    found = Findings(asked.study, PP4, None, "x", "x")
    asked.report(found)
    assert not {"x.bubble.vs_fixed_chunk", "x.ttft_p50.vs_fixed_chunk"} & {figure.name for figure in found.figures}
    assert "(tbt)" in found.reasons["x.bubble.vs_fixed_chunk"]


@pytest.fixture
def twin() -> Twin:
    """Of an 8B model in two stages."""
    stages = make_stages(MODELS["llama-8b"], DEVICES["h200"], 2)
    learned = {"coefficients": [CostModel(s.seconds).coefficients.values for s in stages], "kv_tokens": 1 << 18}
    return Twin.of(learned, LINKS["sockets"], MODELS["llama-8b"].token_bytes, 64, UNPADDED)


def test_a_search_begins_where_the_simulator_says(twin: Twin, capsys: pytest.CaptureFixture[str]) -> None:
    pp2, objective = ParallelLayout(1, 2), ServiceObjective("strict", 10.0, 0.05)
    site = Counting({"pp2 uniform/8192": 1e9})
    asked = study(Points(), site)
    asked.expected = twin.expected(asked, pp2)
    traffic = Traffic("few", tuple(together(8, 200, 12)))
    rate = asked.expected(pp2, "uniform", traffic, objective)
    said = capsys.readouterr().err.splitlines()
    assert said and all(line.lstrip().startswith("simulated: ") for line in said)
    assert rate > 0 and asked.expected(PP4, "uniform", traffic, objective) == 0 and not site.asked
    asked.carried(pp2, "uniform", traffic, objective)
    assert site.asked[0] == f"pp2 uniform {float(f'{rate:.4g}'):.3g}"
    assert sum(key.endswith("/expected") for key in asked.points.points) == 1, "it is simulated once"


def test_what_would_be_needed_is_simulated(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = study(Points(), Counting({}))
    found = Findings(asked, ParallelLayout(1, 2), None, "pipeline.sockets", "pipeline", twin)
    traffic = Traffic("few", tuple(together(8, 200, 12)))

    def simulated(of: CapacitySearch) -> float:
        return float(of.flood(ParallelLayout(1, 2), traffic)["output_tok_s"])

    now = simulated(twin.study(asked))
    with monkeypatch.context() as patch:
        patch.setitem(TARGETS, "pipeline.sockets.some", Target(None, None, now * 1.01))
        found.add("some", now, "tokens/s", True, simulated=simulated)
        patch.setitem(TARGETS, "pipeline.sockets.much", Target(None, None, now * 100))
        found.add("much", now, "tokens/s", True, simulated=simulated)
    some, much = (found.reasons[f"pipeline.sockets.{name}"] for name in ("some", "much"))
    assert "links twice as fast" in some and "none of these" not in some
    assert "none of these" in much and "links twice" in much


# ---------------------------------------------------------------- meters and pictures


@pytest.fixture
def meter() -> Meter:
    """Two stages, four micro-batches of decodes and one of a prompt; the second stage waits for the last two."""
    made = Meter(2)
    for step in range(5):
        shape = BatchShape([(50, 1)] * 8 if step != 2 else [(0, 300)])
        made.planned(step, float(step), shape, 0.5)
        made.ran(step, 0, Span(float(step), float(step), step + 1.0))
        begin = step + 1.0 + 0.25 * (step > 2)
        made.ran(step, 1, Span(begin, begin, begin + (0.75 if step > 2 else 1.0)))
        made.finished(step)
    return made


def test_the_bubble_of_decoding_leaves_prompts_out(meter: Meter) -> None:
    point = metered(meter)
    assert point["bubble"] == pytest.approx(meter.bubble()) and len(point["stages"]) == 2
    # Micro-batches 0, 1, 3 and 4 take 7.5 s on both stages; 0.5 s are waited for before the last two.
    assert point["decode_bubble"] == pytest.approx(0.5 / 8.0)
    assert decode_bubble({"traceEvents": []}) == 0.0
    # The first of these for the link. After the second, which it took less for, it would have waited without a link.
    part = f"{0.25 / 10:.1%}"
    assert causes(point["parts"]) == f"unequal stages {part}, communication {part}"


def test_time_lines_are_drawn(meter: Meter, tmp_path: Path) -> None:
    assert draw({"uniform": meter.trace(), "nothing": Meter(2).trace()}, tmp_path / "stages.png", "Stages")
    assert (tmp_path / "stages.png").read_bytes().startswith(b"\x89PNG")
    assert not draw({"nothing": Meter(2).trace()}, tmp_path / "none.png", "Nothing")
    assert not (tmp_path / "none.png").exists()


def test_a_time_line_shows_its_middle_however_idle_it_is() -> None:
    busy = [(0, "decode", 0.1 * i, 0.1) for i in range(100)]
    assert _window(busy) == (pytest.approx(3.8), pytest.approx(2.4))
    idle = [(0, "decode", 10.0 * i, 0.1) for i in range(100)] + [(0, "nothing_to_do", 0.1, 9.9)]
    begin, seconds = _window(idle)
    assert begin < 500 < 500.1 < begin + seconds and seconds == pytest.approx(9.6)


def test_the_time_lines_of_a_survey_are_those_of_its_own_points(meter: Meter, tmp_path: Path) -> None:
    asked = survey(study(Points(), Counting(CARRIES)), layouts=[PP4])
    asked.run()
    titles = asked.time_lines()
    assert set(titles.values()) <= set(asked.study.points.points)
    ours = asked.carried[PP4, "uniform", "long", "strict"]
    title = f"pp4 long strict: uniform/8192@100ms, {number(ours.rate)} requests/s"
    assert asked.study.points.points[titles[title]] is ours.point
    keep(meter, tmp_path, OfferedLoad("pp4/long/of/another/sweep", []), {})
    assert not draw_kept(tmp_path, titles, tmp_path / "stages.png", "Stages")
    held = {"tbt_s": {"p99": 0.1}, "given_up": None, "delay_s": {"p50": 0.1}}
    load = OfferedLoad(titles[title], [], 1.0, ServiceObjective("strict", 0.1))
    keep(meter, tmp_path, load, held | {"given_up": "tbt"})
    assert not draw_kept(tmp_path, titles, tmp_path / "stages.png", "Stages"), "it is not what is carried"
    keep(meter, tmp_path, load, held)
    assert draw_kept(tmp_path, titles, tmp_path / "stages.png", "Stages")


def test_what_the_meter_takes_is_a_part_of_the_time() -> None:
    point = {"stages": [{}] * 4, "micro_batches": 1000, "seconds": 10.0}
    twice = {**point, "seconds": 1e9}
    assert 0 < meter_overhead(twice, 50) < meter_overhead(point, 50)


def test_layouts_have_names() -> None:
    assert [str(ParallelLayout.parse(name)) for name in ("tp4", "pp4", "tp2pp2", "tp1")] == [
        "tp4",
        "pp4",
        "tp2pp2",
        "tp1",
    ]
    for wrong in ("", "4", "pp", "tp0"):
        with pytest.raises(ValueError, match="not a layout"):
            ParallelLayout.parse(wrong)


# ---------------------------------------------------------------- the command


def run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = ["--out", str(tmp_path), "--traces", str(tmp_path / "traces"), "--name", "found"]
    assert command.main([*arguments, *out]) == 0
    return json.loads((tmp_path / "found.json").read_text())


def test_a_cpu_has_defaults_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args, settings = command.parser().parse_args(["--requests", "7"]), {"device": "cpu"}
    command._complete(args, settings, on_cpu=True)
    assert (args.model, args.requests, args.delay, str(args.out)) == ("small", 7, 0.5, "shoal-bench")
    said = capsys.readouterr().err
    assert settings["kv_tokens"] == 65536 and "--model small" in said and "--requests" not in said
    for line in (["--plan", "llama-70b"], []):
        args = command.parser().parse_args(line)
        command._complete(args, {}, on_cpu=False)
        assert (args.model, args.requests, args.delay, args.out) == ("tiny", 128, 2.0, results.FOLDER)
        assert args.schedules == list(SCHEDULES) and not capsys.readouterr().err


@pytest.mark.bench
def test_loads_of_a_cpu_can_be_too_much_for_it() -> None:
    def stage(shape: BatchShape) -> float:  # as of the small model on one core
        return 0.006 + 0.0002 * shape.tokens if shape.tokens else 0.0

    chosen, layout = command.ON_CPU, ParallelLayout(1, 2)
    site = SimulatedSite(lambda _: Hardware([stage, stage]), lambda _: 65536, 64, UNPADDED)
    made = CapacitySearch(Points(), site, 512, [128], 64, chosen["shrink"], chosen["precision"], chosen["seconds"])
    traffic = published("long", command.DEFAULTS["requests"], 0, chosen["shrink"])
    asked = ExperimentGrid(made, [layout], ["uniform", "prefill_first"], [traffic], [], chosen["objectives"])
    asked.delay_s = chosen["delay"]
    asked.run()
    ours, other = asked.rows()
    assert not ours.get("at_least") and not other.get("at_least") and other["requests_per_s"]
    assert other["bubble"] > 2 * ours["bubble"] and other["requests_per_s"] < ours["requests_per_s"]


@pytest.mark.bench
def test_machines_that_are_not_there_are_planned(tmp_path: Path) -> None:
    few = ["--requests", "16", "--precision", "0.5", "--chunk-budgets", "512", "--schedules", "uniform,fixed_chunk"]
    for name, value in (("simulated.llama-70b", 90.0), ("pipeline.sockets", 100.0)):
        figures = [Figure(f"{name}.mini_half.output_tok_s", value, "tokens/s", True)]
        results.write(
            name, figures, {"simulator": {"errors": {"mini_half": 0.02}}} if value == 100 else {}, folder=tmp_path
        )
    found = run(tmp_path, "--plan", "falcon-180b", "--layouts", "tp8pp2", *few)
    names = {figure["name"] for figure in found["figures"]}
    assert "simulated.falcon-180b.capacity_strict.vs_fixed_chunk" in names
    assert {row["schedule"] for row in found["capacities"]} == {"uniform", "fixed_chunk"}
    validated = {name: said["errors"] for name, said in found["validation"].items()}
    assert validated["pipeline.sockets"] == {"mini_half": 0.02}
    assert validated["pipeline.sockets as planned"] == {"mini_half.output_tok_s": pytest.approx(-0.1)}
    kept = {path.name for path in (tmp_path / "traces" / "found").iterdir()}
    assert "stages.png" in kept and "tp8pp2.long.uniform.8192.flood.trace.json" in kept, kept


@pytest.mark.bench
def test_all_of_it_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(link_speed, "measure", lambda device: link_speed.Speed({1: 1e-4}, 1e-4, 2e9))
    monkeypatch.syspath_prepend(str(Path(command.__file__).parents[2]))
    arguments = "--device cpu --model tiny --cpu-threads 1 --kv-tokens 8192 --layouts pp2 --stage-layers 1,1"
    arguments += " --schedules uniform,fixed_chunk --shrink 64 --requests 6 --precision 0.9 --chunk-budgets 64"
    arguments += " --objectives relaxed"
    found = run(tmp_path, *arguments.split())
    figures = {figure["name"]: figure["value"] for figure in found["figures"]}
    assert [row["schedule"] for row in found["capacities"]] == ["uniform", "fixed_chunk"]
    capacity, ours = "cpu.pipeline.long.capacity_relaxed", found["capacities"][0]
    assert capacity in (found["missed"] if ours.get("at_least") else figures)
    assert set(found["commits"]) == set(found["points"]) and set(found["commits"].values()) == {found["commit"]}
    assert figures["cpu.pipeline.link.bytes_per_s"] == 2e9
    assert math.isfinite(figures["cpu.pipeline.simulator.throughput_error"])
    flood = next(point for key, point in found["points"].items() if key.endswith("/flood"))
    assert flood["micro_batches"] > 0 and sum(flood["parts"].values()) == pytest.approx(1.0, abs=1e-5)  # of six digits
    assert "cpu.pipeline.simulator.throughput_error" in capfd.readouterr().out


class Calibrated(Counting):
    """A site on which nothing runs, in place of `RealSite`. A layout's costs are those of as many stages."""

    calibrated: ClassVar[list[str]] = []

    def __init__(self, *_: Any) -> None:
        super().__init__(CARRIES)

    def calibrate(self, layout: ParallelLayout, *_: Any) -> dict[str, Any]:
        self.calibrated.append(str(layout))
        stages = make_stages(MODELS["llama-8b"], DEVICES["h200"], layout.pp)
        return {"coefficients": [CostModel(s.seconds).coefficients.values for s in stages], "kv_tokens": 1 << 16}


@pytest.mark.bench
def test_layouts_of_one_file_are_simulated_with_the_costs_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_speed, "measure", lambda device: link_speed.Speed({1: 1e-4}, 1e-4, 2e9))
    monkeypatch.setattr(real_site, "RealSite", Calibrated)
    monkeypatch.setattr(Calibrated, "calibrated", [])
    alike = ["--device", "cpu", "--model", "tiny", "--traffic", "", "--jobs", "mini_half", "--shrink", "64"]
    for layouts in ("pp2", "tp2", "pp2,tp2"):
        found = run(tmp_path, *alike, "--layouts", layouts)
    assert Calibrated.calibrated == ["pp2", "tp2"]
    stages = {key: len(point["coefficients"]) for key, point in found["points"].items() if "calibration" in key}
    assert stages == {"pp2/calibration": 2, "tp2/calibration": 1}
    assert "cpu.pipeline.mini_half.vs_tp2" in {figure["name"] for figure in found["figures"]}


@pytest.mark.parametrize("flag", ["--shrink", "--requests", "--seconds", "--precision"])
def test_a_number_that_makes_no_sense_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([flag, "0"])
    assert f"{flag}: '0' " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--nodes -1", "'-1' "),
        ("--chunk-budgets 512,0", "'0' "),
        ("--chunk-budgets ,", "',' "),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(arguments.split())
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model tiny --layouts pp2,pp9", "pp=9 "),
        ("--layouts pp2 --traffic ,", "nothing to offer"),
        ("--trace {folder}/none", "No such file"),
        ("--name a/b", "result name 'a/b'"),
        ("--out {folder}/file", "--out"),
        ("--traces {folder}/file", "--traces"),
        ("--plan falcon-180b --layouts pp2", " 0 tokens"),
        ("--plan falcon-180b --layouts tp9pp2", "there are 16"),
        ("--plan falcon-180b --link sockets", "--link "),
        ("--plan falcon-180b --cpu-threads 1", "--cpu-threads "),
    ],
)
def test_what_cannot_work_is_said_before_anything_is_measured(
    arguments: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for measures in ((link_speed, "measure"), (command.SimulatedSite, "offer")):
        monkeypatch.setattr(*measures, lambda *_: pytest.fail("something was measured"))
    folders = {"--out": tmp_path, "--traces": tmp_path / "traces"}
    given = arguments.format(folder=tmp_path).split()
    others = [str(word) for option in folders.items() if option[0] not in given for word in option]
    where = [] if "--plan" in given else ["--device", "cpu"]
    assert command.main([*given, *others, *where]) == 1
    assert said in capsys.readouterr().err
