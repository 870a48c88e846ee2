"""Configuration: one table from files and overrides, and errors that say what to do."""

from pathlib import Path

import pytest
import yaml

from cluster.config import Config, ConfigError, DeploymentConfig, UpstreamEntry, load
from router.config import UpstreamConfig


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
        ({"replica": 2}, r"replica: unknown.* replicas\?"),
        ({"page-size": 2}, r"page-size: unknown.* page_size\?"),
        ({"quux": 1}, "quux: unknown"),
        ({"port": 99999}, r"port: 99999: .*\b65535"),
        ({"replicas": 0}, r"replicas: 0: .*\b1"),
        ({"replicas": "many"}, "replicas: 'many': "),
        ({"placement": "random"}, "placement: 'random': .*'cache_aware', 'least_load' or 'round_robin'"),
        ({"model": ""}, "model: '': "),
        ({"tp": 2, "gpus_per_rank": 0.5}, "tp=2, pp=1: "),
        ({"pp": 2, "gpus_per_rank": 0.5}, "tp=1, pp=2: "),
        ({"kv_tokens": 16, "page_size": 32}, "kv_tokens=16 .*page_size=32"),
        ({"kv_tokens": 1024, "context_length": 2048}, "context_length=2048 .*kv_tokens=1024"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(overrides=settings)


def test_every_mistake_is_listed_at_once(tmp_path: Path) -> None:
    path = write(tmp_path, "replica: 2\nport: 0\nplacement: best\n")
    with pytest.raises(ConfigError) as error:
        load(path)
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{path}: 3 ")
    assert {line.split(":")[0].strip() for line in lines[1:]} == {"replica", "port", "placement"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("replicas: [", "YAML"),
        ("replicas: 2\nreplicas: 3\n", "replicas .*twice"),
        ("- replicas\n", "not a list"),
        ("3: 4\n", "keys must be names"),
        ("replicas: !!python/object/apply:os.getpid []\n", "YAML"),
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
    assert list(yaml.safe_load(text)) == ["model", "replicas", "kv_tokens"], "defaults are left out"
    assert load(write(tmp_path, text)) == config


def test_all_settings_can_be_printed(tmp_path: Path) -> None:
    config = load(overrides={"replicas": 5, "api_key": "hunter2"})
    text = config.to_yaml(defaults=True)
    assert yaml.safe_load(text).keys() == Config.model_fields.keys() - {"models"} and "hunter2" not in text
    assert load(write(tmp_path, text)).replicas == 5


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


# ---------------------------------------------------------------- several models

SEVERAL = """\
kv_tokens: 4096
page_size: 32
replicas: 1
models:
  - {name: small, model: org/small, replicas: 3, aliases: [gpt-4o, default]}
  - {name: org/large, model: ./large, tp: 4, page_size: 16, tool_call_parser: hermes}
  - {name: far, upstream: {url: "https://example.com/v1/", model: theirs, api_key_env: FAR_KEY}, aliases: [away]}
"""


def test_what_stands_next_to_models_holds_for_each_that_does_not_say_otherwise(tmp_path: Path) -> None:
    config = load(write(tmp_path, SEVERAL))
    small, large = config.deployments
    assert (small.name, small.model, small.replicas, small.kv_tokens, small.page_size) == (
        *("small", "org/small", 3, 4096, 32),
    )
    assert (large.name, large.replicas, large.tp, large.page_size, large.tool_call_parser) == (
        *("org/large", 1, 4, 16, "hermes"),
    )
    (far,) = config.upstreams
    assert (far.name, far.upstream.url, far.upstream.model) == ("far", "https://example.com/v1", "theirs")
    assert [(entry.name, entry.aliases) for entry in config.entries] == [
        ("small", ("gpt-4o", "default")),
        ("org/large", ()),
        ("far", ("away",)),
    ]
    assert [config.deployment_name(model) for model in config.deployments] == ["Replica-small", "Replica-org-large"]
    assert config.num_routers == 2  # for four replicas


def test_a_gpus_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    """These depend on which settings were given: for one of several models as for one alone."""
    one = load(overrides={"kv_tokens": 4096}).deployments[0]
    small, large = load(write(tmp_path, SEVERAL)).deployments
    for deployment, given in ((one, {"kv_tokens"}), (small, {"kv_tokens", "page_size"}), (large, {"page_size", "tp"})):
        assert (
            given <= deployment.model_fields_set and not {"token_budget", "max_running"} & deployment.model_fields_set
        )


def test_one_model_is_one_entry() -> None:
    config = load(overrides={"model": "org/name", "replicas": 3, "aliases": ["a", "b"], "kv_tokens": 64})
    (entry,) = config.entries
    assert (entry.name, entry.aliases, config.upstreams) == ("org/name", ("a", "b"), ())
    (same,) = load(
        overrides={"models": [{"name": "org/name", "model": "org/name", "replicas": 3, "aliases": ["a", "b"]}]}
        | {"kv_tokens": 64}
    ).entries
    assert entry == same
    assert config.deployment_name(config.deployments[0]) == "Replica"
    assert load(overrides={"served_model_name": "own"}).entries[0].name == "own"


def test_models_that_are_printed_can_be_loaded(tmp_path: Path) -> None:
    config = load(write(tmp_path, SEVERAL))
    text = config.to_yaml()
    assert load(write(tmp_path, text)) == config
    assert yaml.safe_load(text)["models"] == [
        {"name": "small", "model": "org/small", "aliases": ["gpt-4o", "default"], "replicas": 3},
        {"name": "org/large", "model": "./large", "tool_call_parser": "hermes", "tp": 4, "page_size": 16},
        {
            "name": "far",
            "aliases": ["away"],
            "upstream": {"url": "https://example.com/v1", "model": "theirs", "api_key_env": "FAR_KEY"},
        },
    ]


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ({"model": "a"}, r"models\.0\.name: "),
        ({"name": "a"}, r"models\.0\.model: "),
        ({"name": "", "model": "a"}, r"models\.0\.name: '': "),
        ({"name": "a", "model": "a", "page_sise": 16}, r"models\.0\.page_sise: unknown.* page_size\?"),
        ({"name": "a", "model": "a", "page_size": 65}, r"models\.0\.page_size: 65: .*\b64"),
        ({"name": "a", "model": "a", "port": 80}, r"models\.0\.port: unknown: .*whole server"),
        ({"name": "a", "served_model_name": "a", "model": "a"}, r"models\.0\.served_model_name: unknown.* name\?"),
        ({"name": "a", "model": "a", "kv_tokens": 16, "page_size": 32}, r"models\.0: kv_tokens=16 "),
        ({"name": "a", "model": "a", "aliases": ["b", ""]}, r"models\.0\.aliases: \['b', ''\]: "),
        ({"name": "a", "model": "a", "aliases": "b"}, r"models\.0\.aliases: .*list"),
        ({"name": "a", "model": "a", "aliases": ["a"]}, "models: 'a': "),
        ({"name": "a", "upstream": {}}, r"models\.0\.upstream\.url: "),
        ({"name": "a", "upstream": {"url": "example.com"}}, r"models\.0\.upstream\.url: 'example\.com': "),
        ({"name": "a", "upstream": {"url": "http://a", "key": "b"}}, r"models\.0\.upstream\.key: unknown"),
        ({"name": "a", "upstream": {"url": "http://a", "api_key": "b"}}, r"api_key: unknown.* api_key_env\?"),
        ({"name": "a", "upstream": {"url": "http://a"}, "tp": 2}, r"models\.0\.tp: unknown: .*no replicas"),
        ({"name": "a", "upstream": {"url": "http://a"}, "model": "b"}, r"models\.0\.model: unknown: .*no replicas"),
        ("a", r"models\.0: .*`key: value`"),
    ],
)
def test_what_is_wrong_with_an_entry_is_named(entry: object, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        load(overrides={"models": [entry]})
    assert "1 setting " in str(error.value)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"models": "a"}, "models: .*list"),
        ({"models": []}, "models: .*no entry"),
        ({"model": "b"}, "model: .*models"),
        ({"served_model_name": "b", "aliases": ["c"]}, "served_model_name, aliases: "),
        ({"models": [{"name": "a", "model": "a"}, {"name": "a", "model": "b"}]}, "models: 'a': "),
        ({"models": [{"name": "a", "model": "a"}, {"name": "b", "model": "b", "aliases": ["a"]}]}, "models: 'a': "),
        ({"models": [{"name": "a/b", "model": "a"}, {"name": "a-b", "model": "b"}]}, "Replica-a-b"),
    ],
)
def test_models_that_do_not_go_together(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(overrides={"models": [{"name": "a", "model": "a"}]} | settings)


def test_the_page_about_several_models_shows_a_configuration(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "MANY_MODELS.md").read_text()
    text = "\n".join(line[4:] for line in page.split("    shoal serve")[0].splitlines() if line.startswith("    "))
    config = load(write(tmp_path, text))
    assert [entry.name for entry in config.entries] == ["small", "large", "other"]
    assert [model.kv_tokens for model in config.deployments] == [100_000] * 2


def test_every_key_of_an_entry_explains_itself() -> None:
    for model in (DeploymentConfig, UpstreamEntry, UpstreamConfig):
        assert [name for name, field in model.model_fields.items() if not field.description] == []
