"""Quantities of Kubernetes in the configuration: where CPUs or bytes are meant, and nowhere else."""

from typing import Any

import pytest

from cluster.config import Config, ConfigError, DeploymentConfig, load
from cluster.quantity import SETTINGS, number
from shoal.flags import given
from shoal.serve import parser


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("4", 4), ("1.5", 1.5), (".5", 0.5), ("2.", 2), ("500m", 0.5), ("2000m", 2), ("1e3", 1000),
        ("100e9", 10**11), ("1.5e3", 1500), ("1E-1", 0.1), ("1E", 10**18), ("1Ei", 1 << 60), ("1Pi", 1 << 50),
        ("0.5Gi", 1 << 29), ("1k", 1000), ("5u", 5e-6), ("7n", 7e-9),
    ],
)  # fmt: skip
def test_what_a_quantity_is_as_a_number(text: str, value: float) -> None:
    found = number(text)
    assert found == value and isinstance(found, int) is isinstance(value, int)


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "8GB", "8 Gi", "-1", "+1", "1e", "1e100", "1,5", "0x10", "\N{ARABIC-INDIC DIGIT ONE}", "1m\n", "1K"],
)
def test_what_none_is(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        number(text)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"cpus_per_rank": "500m"}, {"cpus_per_rank": 0.5}),
        ({"cpus_per_router": "1e-1"}, {"cpus_per_router": 0.1}),
        ({"max_body_bytes": "64Mi", "max_held_bytes": "1e9"}, {"max_body_bytes": 64 << 20, "max_held_bytes": 10**9}),
    ],
)
def test_settings_take_them(settings: dict[str, str], found: dict[str, float]) -> None:
    config = load(overrides=settings)
    assert {key: getattr(config, key) for key in settings} == found
    flags = [word for key, text in settings.items() for word in (f"--{key.replace('_', '-')}", text)]
    assert load(overrides=given(parser().parse_args(flags), Config)) == config


def test_models_take_them_from_their_entries_and_from_next_to_them() -> None:
    models = [{"name": "a", "model": "org/a", "cpus_per_rank": "250m"}, {"name": "b", "model": "org/b"}]
    config = load(overrides={"models": models, "cpus_per_rank": "1500m"})
    assert [each.cpus_per_rank for each in config.deployments] == [0.25, 1.5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_body_bytes": "1.5"}, "max_body_bytes: 1.5"),
        ({"max_body_bytes": "8MB"}, "max_body_bytes: '8MB'"),
        ({"cpus_per_rank": "0m"}, "cpus_per_rank: "),
        ({"kv_tokens": "64k"}, "kv_tokens: '64k'"),  # tokens are no bytes
        ({"replicas": "1k"}, "replicas: '1k'"),
    ],
)
def test_what_is_none_is_refused_by_name(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load(overrides=settings)
    assert words in str(refused.value)


def test_the_settings_are_those_in_cpus_and_bytes() -> None:
    named = {name for name in Config.model_fields if name.endswith("_bytes") or name.startswith("cpus_per_")}
    assert named == set(SETTINGS)
    assert set(SETTINGS) & set(DeploymentConfig.model_fields) == {"cpus_per_rank"}
