"""A configuration file that changes while the server runs: what takes effect, and what is refused."""

import io
from pathlib import Path
from typing import Any

import pytest
import ray
from rich.console import Console

from cluster import launch
from cluster.app import numbers, settle
from cluster.config import Config, ConfigError, load
from cluster.followed_config import FollowedConfig, rescaled
from cluster.local import fit
from shoal import serve

MODELS = [
    {"name": "a", "model": "org/a", "replicas": 2},
    {"name": "b", "model": "org/b", "replicas": 1, "tp": 2},
    {"name": "far", "upstream": {"url": "http://far:1/v1"}},
]


def test_a_file_is_read_again_when_its_content_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("replicas: 2\n")
    followed = FollowedConfig(path, {"port": 9000})
    assert followed.changed() is None
    path.write_text("replicas: 3\n")
    new = followed.changed()
    assert new is not None and (new.replicas, new.port) == (3, 9000)
    assert followed.changed() is None
    again = followed.changed(again=True)
    assert again is not None and again.replicas == 3


def test_a_file_that_is_wrong_or_gone_is_told_once_and_read_when_it_is_right(tmp_path: Path) -> None:
    path = tmp_path / "shoal.yaml"
    path.write_text("replicas: 2\n")
    followed = FollowedConfig(path, {})
    path.write_text("replicsa: 3\n")
    with pytest.raises(ConfigError, match=r"replicsa: unknown.* replicas\?"):
        followed.changed()
    assert followed.changed() is None
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        followed.changed()
    assert followed.changed() is None
    path.write_text("replicas: 4\n")
    new = followed.changed()
    assert new is not None and new.replicas == 4


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ({"replicas": 2}, {"replicas": 5}, {"Replica": 5, "Router": 3}),
        ({"replicas": 2, "routers": 1}, {"replicas": 5, "routers": 1}, {"Replica": 5, "Router": 1}),
        ({"routers": 4}, {}, {"Replica": 2, "Router": 1}),
        (
            {"models": MODELS},
            {"models": [MODELS[0] | {"replicas": 7}, *MODELS[1:]], "routers": 2},
            {"Replica-a": 7, "Replica-b": 1, "Router": 2},
        ),
    ],
)
def test_numbers_take_effect_and_all_else_stays_as_it_was_settled(
    before: dict[str, Any], after: dict[str, Any], found: dict[str, int]
) -> None:
    given = load(overrides={"cpus_per_rank": 1, **before})
    running, _ = settle(fit(given), gpus=0)
    new = rescaled(running, given, load(overrides={"cpus_per_rank": 1, **after}))
    assert numbers(new) == found
    assert rescaled(new, given, given) == running


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({}, {"page_size": 32, "port": 9000, "replicas": 3}, "^page_size, port: "),
        ({}, {"drain_s": 5}, "^drain_s: "),
        ({"models": MODELS}, {"models": MODELS[:2]}, "^models: "),
        ({"models": MODELS}, {"models": [MODELS[0] | {"model": "org/c"}, *MODELS[1:]]}, r"^models\.a\.model: "),
        ({"models": MODELS}, {"models": MODELS, "tp": 2}, r"^tp, models\.a\.tp: "),
        ({"models": MODELS}, {"models": [*MODELS[:2], {**MODELS[2], "aliases": ["x"]}]}, r"^models\.far: "),
    ],
)
def test_other_settings_are_refused_by_name(before: dict[str, Any], after: dict[str, Any], named: str) -> None:
    given = load(overrides=before)
    with pytest.raises(ConfigError, match=named):
        rescaled(given, given, load(overrides=after))


def test_a_server_tells_serve_the_numbers_that_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, out = tmp_path / "shoal.yaml", io.StringIO()
    scaled: list[tuple[str, int]] = []
    monkeypatch.setattr(launch, "scale", lambda *its: scaled.append(its))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": 4.0})
    monkeypatch.setattr(launch._Launch, "_reserve", lambda *its: None)
    settings = {"device": "cuda", "routers": 1}
    path.write_text("replicas: 2\n")
    followed = FollowedConfig(path, settings)
    run = launch._Launch(load(path, settings), Console(file=out, width=500), followed)

    def look(text: str) -> str:
        path.write_text(text)
        out.truncate(out.seek(0))
        run._follow()
        return out.getvalue()

    assert look("replicas: 2\n") == "" and scaled == []
    assert "Replica: 2 become 4" in look("replicas: 4\n") and scaled == [("Replica", 4)]
    assert " 4: " in look("replicas: 5\n")
    assert "page_size: " in look("replicas: 3\npage_size: 32\n")
    assert scaled == [("Replica", 4)] and numbers(run._config) == {"Replica": 4, "Router": 1}
    assert "Replica: 4 become 3" in look("replicas: 3\n") and scaled[1:] == [("Replica", 3)]
    run._ask_to_read(1, None)
    assert look("replicas: 3\n") == "" and not run._is_asked_to_read
    launch._Launch(Config(), Console(file=out))._follow()  # a server that follows none


def test_there_must_be_a_file_to_follow(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        serve.main(["--follow"])
    assert "--config" in capsys.readouterr().err
