"""The supervisor of a machine of `ray up`, without Ray. tests/deploy has it with Ray, on hosts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster import supervisor
from cluster.supervisor import Machine, Supervisor, up


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder for it, on a machine where Ray does not run."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(supervisor, "stop_ray", lambda: None)
    monkeypatch.setattr(supervisor, "ray_runs", lambda role: False)
    monkeypatch.setitem(supervisor.ENVIRONMENT, "TMPDIR", str(tmp_path / "tmp"))
    supervisor.folder().mkdir()
    return tmp_path


def started(monkeypatch: pytest.MonkeyPatch, *ray: str) -> Supervisor:
    """A supervisor that starts Ray by this command."""
    monkeypatch.setattr(Machine, "ray", list(ray))
    return Supervisor(Machine("worker", "10.0.0.1", [], {}))


def test_a_start_of_ray_that_does_not_end_is_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor, "UP_S", 0.05)
    up().touch()  # of a Ray that ran before
    assert not started(monkeypatch, "sleep", "1000")._has_ray()
    assert not up().exists()
    assert "Ray has not started within 0.05 s" in capfd.readouterr().out


def test_a_start_of_ray_whose_raylet_has_died_begins_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Soon: `ray up` waits for it no longer than for one start."""
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    looks = iter([["raylet"], ["raylet"], []])

    def there(names: tuple[str, ...]) -> list[SimpleNamespace]:
        return [SimpleNamespace(info={"name": name}) for name in next(looks)]

    monkeypatch.setattr(supervisor, "processes", there)
    assert not started(monkeypatch, "sleep", "1000")._has_ray()
    assert "raylet ended while Ray was started" in capfd.readouterr().out


def test_ray_counts_as_started_once_nothing_starts_it_any_more(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(monkeypatch, "true")
    assert one._has_ray() and not up().exists()
    monkeypatch.setattr(supervisor, "ray_runs", lambda role: True)
    assert one._has_ray() and up().exists()


def test_a_worker_says_that_its_head_is_lost_and_starts_ray_once_it_is_back(
    home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Without starts of Ray that cannot be, each of which says so for itself."""
    one = started(monkeypatch, "touch", str(home / "tried"))
    assert one._head is not None
    monkeypatch.setattr(one._head, "is_lost", True)
    assert not one._has_ray() and not (home / "tried").exists()
    monkeypatch.setattr(one._head, "is_lost", False)
    assert one._has_ray() and (home / "tried").exists()


def test_a_head_watches_none() -> None:
    assert Supervisor(Machine("head", "", [], {}))._head is None
