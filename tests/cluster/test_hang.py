"""When work counts as stalled, and which ranks are to blame."""

import subprocess
import sys

import pytest

from cluster.hang import Stalled, suspects
from worker.progress import NewestSteps, WorkProgress


def test_work_is_stalled_once_its_number_has_stayed_for_the_limit() -> None:
    stalled = Stalled(2.0)
    assert [stalled.look(WorkProgress(5, 6.0)) for _ in range(4)] == [None, None, None, 6.0]


def test_any_progress_and_any_rest_begin_anew() -> None:
    stalled = Stalled(2.0)
    seen = [
        WorkProgress(1, 4.0),
        WorkProgress(1, 4.0),
        WorkProgress(2, 4.0),
        WorkProgress(2, 4.0),
        None,
        WorkProgress(2, 4.0),
    ]
    assert [stalled.look(at) for at in seen] == [None] * 6
    assert stalled.look(WorkProgress(2, 4.0)) is None
    assert stalled.look(WorkProgress(2, 4.0)) == 4.0


def test_the_limit_is_that_of_the_work_now() -> None:
    stalled = Stalled(2.0)
    assert [stalled.look(WorkProgress(1, 100.0)) for _ in range(9)] == [None] * 9
    assert stalled.look(WorkProgress(1, 15.0)) == 15.0


AT = NewestSteps


@pytest.mark.parametrize(
    ("steps", "tp", "leading", "late"),
    [
        pytest.param([AT(7, 6)], 1, 0, [0], id="alone, on its device"),
        pytest.param([AT(6, 6)], 1, 0, [0], id="alone, in its host's code"),
        pytest.param([AT(7, 6), None], 2, 0, [1], id="the one that does not answer"),
        pytest.param([AT(7, 6), AT(6, 6)], 2, 0, [1], id="the one that has not begun"),
        pytest.param([AT(6, 6), AT(7, 6)], 2, 0, [0], id="the leading one has not begun"),
        pytest.param([AT(7, 6), AT(7, 6)], 2, 0, [0, 1], id="both devices wait"),
        pytest.param([AT(7, 7), AT(7, 7)], 2, 0, [0], id="no plan comes"),
        pytest.param([AT(9, 8), AT(9, 4), AT(5, 4)], 1, 2, [1], id="the second stage, of which the third gets nothing"),
        pytest.param([AT(9, 4), AT(5, 4), AT(5, 4)], 1, 2, [0], id="the first stage"),
        pytest.param([AT(9, 9), AT(9, 9), AT(5, 4)], 1, 2, [2], id="the last stage"),
        pytest.param([AT(9, 9), AT(9, 9), AT(5, 4), AT(4, 4)], 2, 2, [3], id="one rank of the last stage"),
        pytest.param([AT(9, 9), AT(9, 9), AT(4, 4), AT(5, 4)], 2, 2, [2], id="the leading rank of the last stage"),
    ],
)
def test_the_rank_that_the_others_wait_for(
    steps: list[NewestSteps | None], tp: int, leading: int, late: list[int]
) -> None:
    assert suspects(steps, tp, leading) == late


STUCK = """
import asyncio
from cluster import hang
hang.STUCK_S = 3.0

async def run():
    watching = hang.end_if_stuck()
    await asyncio.sleep(4)
    print("lives", flush=True)
    while True:
        pass  # and never gives way

asyncio.run(run())
"""


@pytest.mark.slow
def test_a_process_whose_loop_stands_still_ends_and_says_where() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "lives\n")
    assert "in run" in done.stderr
