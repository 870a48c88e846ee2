"""All experiments on some layouts and schedules under some loads, in an order that loads each layout once."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.pipeline.capacity import DELAY_S
from bench.pipeline.capacity_search import OBJECTIVES, OURS, CapacitySearch, Carried
from bench.pipeline.figures import Findings
from bench.pipeline.layout import ParallelLayout, Setting
from bench.pipeline.load_generator import ServiceObjective
from bench.pipeline.traffic import Traffic
from bench.results import number
from pipeline.meter import CAUSES

if TYPE_CHECKING:
    from rich.table import Table

MIN_CAPACITY_SHARE = 1 / 8  # of our capacity; for others that carry less, only this bound is reported


@dataclass
class ExperimentGrid:
    """The experiments, and the capacities that they found (`carried`).

    - `traffics` arrive at rates that are searched for. `jobs` arrive all at once; if there are none, `traffics` do so
      too.
    - `objectives` are multiples of a decode iteration of the first layout.
    - `least`: lowest rate that is tried for other schedules and layouts, as a fraction of our capacity on the first
      layout; 0 for no limit.
    - `delay_s`: seconds within which half of the requests have to be scheduled.
    """

    study: CapacitySearch
    layouts: Sequence[ParallelLayout]
    schedules: Sequence[str]
    traffics: Sequence[Traffic]
    jobs: Sequence[Traffic]
    objectives: Sequence[str]
    least: float = MIN_CAPACITY_SHARE
    delay_s: float = DELAY_S
    carried: dict[tuple[ParallelLayout, str, str, str], Carried] = field(default_factory=dict)

    @property
    def whole(self) -> ParallelLayout | None:
        """The layout without a pipeline on as many devices as the first layout, if there is one."""
        first = self.layouts[0]
        alike = (layout for layout in self.layouts if layout.pp == 1 and layout.devices == first.devices)
        return next(alike, None) if first.pp > 1 else None

    @property
    def floods(self) -> Sequence[Traffic]:
        """The loads that arrive all at once."""
        return self.jobs or self.traffics

    def run(self) -> None:
        """Measures everything that is not yet in the result store."""
        for layout in self.layouts:
            for load in self.floods if layout == self.layouts[0] else self.jobs:
                self.study.flood(layout, load)
            if self.jobs and layout == self.layouts[0]:
                self.study.decoding(layout)
            for traffic in self.traffics:
                for name in self.objectives:
                    self._carried(layout, traffic, self.objective(name))

    def objective(self, name: str) -> ServiceObjective:
        return ServiceObjective(name, OBJECTIVES[name] * self.study.decode_s(self.layouts[0]), self.delay_s)

    def meanings(self) -> list[str]:
        """The definition of capacity in words, one line for each objective."""
        lines = []
        for objective in map(self.objective, self.objectives if self.traffics else ()):
            iterations, gap_ms = OBJECTIVES[objective.name], number(objective.tbt_s * 1e3)
            lines.append(
                f"{objective.name}: the highest rate at which 99 of 100 tokens come within {gap_ms} ms of the last one "
                f"({iterations:g} decode iterations), and half of the requests begin within {self.delay_s:g} s"
            )
        return lines

    def _carried(self, layout: ParallelLayout, traffic: Traffic, objective: ServiceObjective) -> None:
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

    def _of(
        self, layout: ParallelLayout, schedule: str, traffic: Traffic, objective: ServiceObjective
    ) -> Carried | None:
        return self.carried.get((layout, schedule, traffic.name, objective.name))

    def report(self, findings: Findings) -> None:
        """Adds the figures of all measurements to `findings`."""
        if self.traffics and self.objectives:  # otherwise the iteration is not needed
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
        """Keys of the points to draw, by title: loads that arrive all at once, and the load at each capacity."""
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
        """The capacity of each layout and schedule, for the table and the result file."""
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


def print_rows(rows: Sequence[dict[str, Any]], meanings: Sequence[str] = ()) -> None:
    """Prints a table of capacities with the outcome at each, then `meanings`, then the causes of the stages' idle
    time."""
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
    console = Console(width=140, highlight=False)
    console.print(table)
    for meaning in meanings:
        console.print(meaning, markup=False, soft_wrap=True)
    if measured := [row for row in rows if "parts" in row]:
        console.print("\nwhere the stages' time goes at these rates; the bubble is all but the first two:")
        console.print(_where_time_went(measured))


def _where_time_went(rows: Sequence[dict[str, Any]]) -> "Table":
    """A table with columns for `compute`, for `nothing_to_do`, and for each cause that took at least a thousandth in
    any row."""
    from rich.table import Table

    bubble = [cause for cause in CAUSES if any(row["parts"].get(cause, 0.0) >= 1e-3 for row in rows)]
    shown = ["compute", "nothing_to_do", *(cause for cause in bubble if cause != "nothing_to_do")]
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for heading in ("layout", "schedule", "traffic", "objective"):
        table.add_column(heading, no_wrap=True)
    for cause in shown:
        words = cause.split("_")
        table.add_column(" ".join(words), justify="right", min_width=max(map(len, words)))
    for row in rows:
        parts = [f"{row['parts'].get(cause, 0.0):.1%}" for cause in shown]
        table.add_row(row["layout"], row["schedule"], row["traffic"], row["objective"], *parts)
    return table
