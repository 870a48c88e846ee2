import os

import pytest

from cluster.rank import Rank
from worker.spinning import limit_spinning


def test_idle_threads_of_a_rank_sleep_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "")  # the patch restores what was there before, also after `Rank`
    monkeypatch.delenv("GOMP_SPINCOUNT")
    Rank()
    assert os.environ["GOMP_SPINCOUNT"] == "20000"


@pytest.mark.parametrize("chosen", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_the_users_own_choice_stays(chosen: dict[str, str]) -> None:
    environment = dict(chosen)
    limit_spinning(environment)
    assert environment == chosen
