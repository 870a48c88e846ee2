"""All that is asked of some layouts and schedules under some loads, in an order that loads each layout once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.pipelines.findings import Findings
from bench.pipelines.layout import Layout, Setting
from bench.pipelines.offered import Objective
from bench.pipelines.study import OBJECTIVES, OURS, Carried, Study
from bench.pipelines.traffic import Traffic
from bench.results import number

LEAST = 1 / 8  # of what ours carries: that others carry less than this is all that is found out


@dataclass
class Survey:
    """`traffics` arrive at rates that are searched for, `jobs` all at once; where there are none, `traffics` do that
    too. Objectives are multiples of a decode iteration of the first layout. Of other schedules and layouts, rates are
    searched down to a part of what ours carries on the first, `least`; with 0 to the end."""

    study: Study
    layouts: Sequence[Layout]
    schedules: Sequence[str]
    traffics: Sequence[Traffic]
    jobs: Sequence[Traffic]
    objectives: Sequence[str]
    least: float = LEAST
    carried: dict[tuple[Layout, str, str, str], Carried] = field(default_factory=dict)

    @property
    def whole(self) -> Layout | None:
        """The layout without a pipeline on as many devices as the first one, if it is among them."""
        first = self.layouts[0]
        alike = (layout for layout in self.layouts if layout.pp == 1 and layout.devices == first.devices)
        return next(alike, None) if first.pp > 1 else None

    @property
    def floods(self) -> Sequence[Traffic]:
        """What comes all at once."""
        return self.jobs or self.traffics

    def run(self) -> None:
        """Measures everything that is not there yet."""
        for layout in self.layouts:
            for load in self.floods if layout == self.layouts[0] else self.jobs:
                self.study.flood(layout, load)
            if self.jobs and layout == self.layouts[0]:
                self.study.decoding(layout)
            for traffic in self.traffics:
                for name in self.objectives:
                    self._carried(layout, traffic, self.objective(name))

    def objective(self, name: str) -> Objective:
        return Objective(name, OBJECTIVES[name] * self.study.decode_s(self.layouts[0]))

    def _carried(self, layout: Layout, traffic: Traffic, objective: Objective) -> None:
        for schedule in self.schedules:
            ours = self._of(self.layouts[0], OURS, traffic, objective)
            least = self.least * ours.rate if ours is not None and ours.rate and self.least else None
            carried = self.study.carried(layout, schedule, traffic, objective, least)
            self.carried[layout, schedule, traffic.name, objective.name] = carried
        fixed = self._of(layout, "fixed_chunk", traffic, objective)
        ours = self._of(layout, OURS, traffic, objective)
        if layout == self.layouts[0] and fixed is not None and fixed.rate and not fixed.at_least and ours:
            setting, rate = Setting(OURS, self.study.budget, objective.tbt_s), self.study.beside(ours, fixed)
            self.study.at(layout, setting, traffic, rate, objective)

    def _of(self, layout: Layout, schedule: str, traffic: Traffic, objective: Objective) -> Carried | None:
        return self.carried.get((layout, schedule, traffic.name, objective.name))

    def report(self, findings: Findings) -> None:
        """Figures of all that was measured."""
        if self.traffics and self.objectives:  # or it is measured for nothing
            findings.add("decode_iteration.seconds", self.study.decode_s(self.layouts[0]), "s", False)
        for job in self.jobs:
            findings.offline(job)
        if self.jobs:
            findings.decoding()
        for traffic in self.traffics:
            for name in self.objectives:
                objective = self.objective(name)
                found = {
                    (layout, schedule): carried
                    for layout in self.layouts
                    for schedule in self.schedules
                    if (carried := self._of(layout, schedule, traffic, objective)) is not None
                }
                findings.capacities(found, traffic, objective)
                if (
                    name == "strict"
                    and (fixed := found.get((self.layouts[0], "fixed_chunk")))
                    and (ours := found.get((self.layouts[0], OURS)))
                ):
                    findings.bubble(ours, fixed, traffic, objective)

    def time_lines(self) -> dict[str, str]:
        """Titles of what is drawn, and the keys of these points: what came at once, and what each carries."""
        shown = {}
        for layout in self.layouts:
            for load in self.floods if layout == self.layouts[0] else self.jobs:
                name = f"{layout} {load.name}: {self.study.setting_of(load)}, all at once"
                shown[name] = self.study.flood_key(layout, load)
        if self.jobs:
            shown[f"{self.layouts[0]}: decodes alone"] = self.study.decoding_key(self.layouts[0])
        for (layout, _, traffic, objective), carried in self.carried.items():
            name = f"{layout} {traffic} {objective}: {carried.setting}, {number(carried.rate)} requests/s"
            if carried.key:
                shown[name] = carried.key
        return shown

    def rows(self) -> list[dict[str, Any]]:
        """What each layout and schedule carries, for the table and the result file."""
        rows = []
        for (layout, schedule, traffic, objective), carried in self.carried.items():
            row: dict[str, Any] = {
                "layout": str(layout),
                "schedule": schedule,
                "traffic": traffic,
                "objective": objective,
                "requests_per_s": carried.rate,
                "less_than": carried.below,
                "setting": str(carried.setting),
            }
            if carried.at_least:
                row["at_least"] = True
            if carried.point is not None:
                row |= {key: carried.point[key] for key in ("output_tok_s", "bubble", "ttft_s", "tbt_s", "parts")}
            rows.append(row)
        return rows


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Capacities as a table, with what happened at each."""
    from rich.console import Console
    from rich.table import Table

    table = Table("layout", "schedule", "traffic", "objective", box=None, header_style="dim")
    for heading in ("requests/s", "tokens/s", "bubble", "TTFT P50", "P99 s", "TBT P50", "P99 ms", "with"):
        table.add_column(heading, justify="right")
    for row in rows:
        rate = number(row["requests_per_s"]) if not row["less_than"] else f"< {number(row['less_than'])}"
        if row.get("at_least"):
            rate = f">= {rate}"
        cells = [row["layout"], row["schedule"], row["traffic"], row["objective"], rate]
        if "bubble" in row:
            ttft, tbt = row["ttft_s"], row["tbt_s"]
            cells += [number(row["output_tok_s"]), f"{row['bubble']:.1%}"]
            cells += [number(ttft["p50"]), number(ttft["p99"])]
            cells += [number(tbt["p50"] * 1e3), number(tbt["p99"] * 1e3)] if tbt else ["-", "-"]
            cells.append(row["setting"].partition("/")[2])
        table.add_row(*cells)
    Console(width=140).print(table)
