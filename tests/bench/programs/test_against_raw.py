"""What the benchmark of programs makes of its measurements, and what it refuses."""

import asyncio
from typing import Any

import pytest

from bench.programs import against_raw
from bench.programs.raw_client import RawClient


def test_figures_are_rates_divided_by_each_other() -> None:
    found = {
        "forks": {
            "language": 2.0,
            "raw": 3.0,
            "serial": 5.0,
            "no_cache": 8.0,
            "singles": {"language": 0.3, "raw": 0.4},
        },
        "rag": {"language": 1.0, "raw": 0.5},
    }
    figures = {figure.name: (figure.value, figure.higher_is_better) for figure in against_raw.figures("p", found)}
    assert figures == {
        "p.forks.vs_raw": (1.5, True),
        "p.forks.vs_serial": (2.5, True),
        "p.forks.vs_no_cache": (4.0, True),
        "p.forks.singles.vs_raw": (pytest.approx(0.75), False),
        "p.rag.vs_raw": (0.5, True),
        "p.median.vs_raw": (1.0, True),
        "p.least.vs_raw": (0.5, True),
        "p.best.vs_no_cache": (4.0, True),
    }


@pytest.mark.parametrize(
    ("argv", "says"),
    [(["--workloads", "mmlu"], "'mmlu'"), (["--forms", "raw,serial"], "language and raw")],
)
def test_what_there_is_not(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        against_raw.main(argv)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("serial", "most"), [(False, 3), (True, 1)])
def test_independent_calls(serial: bool, most: int) -> None:
    running = most_running = 0

    async def call(number: int) -> int:
        nonlocal running, most_running
        running += 1
        most_running = max(most_running, running)
        await asyncio.sleep(0)
        running -= 1
        return number

    async def run() -> Any:
        client: Any = None
        return await RawClient(client, "model", serial=serial).all(call(1), call(2), call(3))

    assert asyncio.run(run()) == [1, 2, 3]
    assert most_running == most
