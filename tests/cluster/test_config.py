"""Configuration: one table from files and overrides, and errors that say what to do."""

from pathlib import Path

import pytest
import yaml

from cluster.config import Config, ConfigError, load


def write(folder: Path, text: str) -> Path:
    path = folder / "shoal.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_run_the_small_model_twice() -> None:
    config = load()
    assert (config.model, config.replicas, config.address) == ("SmolLM2-135M-Instruct", 2, None)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    config = load(write(tmp_path, "replicas: 3\nport: 9000\nplacement: round_robin\n"), {"replicas": 4})
    assert (config.replicas, config.port, config.placement) == (4, 9000, "round_robin")


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n"])
def test_an_empty_file_is_the_default(tmp_path: Path, text: str) -> None:
    assert load(write(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"replica": 2}, "replica: unknown; did you mean replicas?"),
        ({"page-size": 2}, "page-size: unknown; did you mean page_size?"),
        ({"quux": 1}, "quux: unknown"),
        ({"port": 99999}, "port: 99999: input should be less than or equal to 65535"),
        ({"replicas": 0}, "replicas: 0: input should be greater than or equal to 1"),
        ({"replicas": "many"}, "replicas: 'many': input should be a valid integer"),
        ({"placement": "random"}, "placement: 'random': input should be 'cache_aware', 'least_load' or 'round_robin'"),
        ({"model": ""}, "model: '': string should have at least 1 character"),
        ({"tp": 2, "gpus_per_rank": 0.5}, "tp=2, pp=1: ranks cannot share a GPU"),
        ({"pp": 2, "gpus_per_rank": 0.5}, "tp=1, pp=2: ranks cannot share a GPU"),
        ({"kv_tokens": 16, "page_size": 32}, "kv_tokens=16 is less than one page (page_size=32)"),
        ({"kv_tokens": 1024, "context_length": 2048}, "context_length=2048 does not fit into kv_tokens=1024"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(overrides=settings)
    assert complaint in str(error.value)


def test_every_mistake_is_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "replica: 2\nport: 0\nplacement: best\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    lines = str(error.value).splitlines()
    assert lines[0] == f"{path}: 3 settings are wrong"
    assert {line.split(":")[0].strip() for line in lines[1:]} == {"replica", "port", "placement"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("replicas: [", "is not YAML"),
        ("replicas: 2\nreplicas: 3\n", "replicas is given twice"),
        ("- replicas\n", "not a list"),
        ("3: 4\n", "keys must be names"),
        ("replicas: !!python/object/apply:os.getpid []\n", "is not YAML"),
    ],
)
def test_a_file_that_is_no_configuration(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(write(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml")


def test_no_secret_is_shown() -> None:
    config = load(overrides={"api_key": "hunter2"})
    assert "hunter2" not in config.to_yaml() + repr(config)
    assert config.api_key is not None and config.api_key.get_secret_value() == "hunter2"
    with pytest.raises(ConfigError) as error:
        load(overrides={"api_key": ["hunter2"]})
    assert "hunter2" not in str(error.value)


def test_what_is_printed_can_be_loaded(tmp_path: Path) -> None:
    config = load(overrides={"model": "org/模型", "replicas": 5, "kv_tokens": 4096})
    text = config.to_yaml()
    assert list(yaml.safe_load(text))[:2] == ["model", "replicas"]
    assert load(write(tmp_path, text)) == config


def test_a_configuration_does_not_change() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().replicas = 3  # type: ignore[misc]


def test_every_field_explains_itself() -> None:
    assert [name for name, field in Config.model_fields.items() if not field.description] == []


@pytest.mark.parametrize(
    ("replicas", "routers", "number"), [(1, None, 1), (2, None, 1), (3, None, 2), (8, None, 4), (8, 1, 1)]
)
def test_there_are_enough_routers_for_fast_replicas(replicas: int, routers: int | None, number: int) -> None:
    assert load(overrides={"replicas": replicas, "routers": routers}).num_routers == number
