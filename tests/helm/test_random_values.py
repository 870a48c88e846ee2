"""What renders is accepted: random values are either refused by helm, by name, or what the chart makes of them is what
the server accepts and Ray can place, on paper.

200 cases, half of them of each kind; 2,000 of each with `--hypothesis-profile=search`.
"""

import json
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import Config, ConfigError, DeploymentConfig, check_behind_proxies, load
from tests.helm.chart import check, ray_service_of
from tests.helm.paper import faults, server

CASES = settings(max_examples=max(100, settings.default.max_examples if settings.default else 0))
SCHEMA = json.loads(check.SCHEMA.read_text())

# ---------------------------------------------------------------- settings

NAMES = ["a", "b", "x y/é", "10", "yes", "org/a", "SmolLM2-135M-Instruct", ""]
# Values that a schema does not tell of, right ones and wrong ones.
SPECIAL: dict[str, list[Any]] = {
    "replicas": [None, 1, 2, 5],
    "min_replicas": [0, 1, 2, 4],
    "max_replicas": [None, 1, 2, 3, 6],
    "cpus_per_rank": [None, 0.25, "500m", 1, "1.5", 3, 0, "1e0", "0m", "1 CPU"],
    "cpus_per_router": [0.25, "500m", 1, "2.5", 0, "5u"],
    "max_body_bytes": [1023, "1023", 1024, "1Ki", "64Mi", "1.5k", "0.5", "1e9", "8MB"],
    "max_held_bytes": ["1Gi", "1e9", "1Pi", "1E", 512, "512", "many"],
    "response_store_bytes": [0, "0", "1Gi", "500m", "2.5Ki"],
    "gpus_per_rank": [0.1, 0.3, 0.5, 0.7, 1, 0],
    "drain_s": [0, 0.5, 120, 86400, -1],
    "schedule": [None, "uniform", "offline", "fixed_chunk", "fixed"],
    "tbt_slo": [None, 0, 0.05, -1],
    "page_size": [1, 16, 64, 65],
    "kv_tokens": [None, 15, 16, 48, 4096, 1 << 40],
    "context_length": [None, 1, 48, 4096, 1 << 40],
    "stage_layers": [None, "30", "15,15", "0,30", "a", "10,10,10", ""],
    "draft_model": [None, "org/a", "/cache/tiny", ""],
    "lora_modules": [{}, {"x": "/cache/x"}, {"SmolLM2-135M-Instruct": "/cache/x", "a": "/cache/a"}, {"x": 3}],
    "max_loras": [None, 0, 1, 8],
    "aliases": [[], ["a"], [""], ["a", "a"], ["SmolLM2-135M-Instruct"], "a"],
    "served_model_name": [None, *NAMES],
    "cors_origins": [None, "*", "https://a.example", "https://a.example, http://b:80", "https://a/", "a", ""],
    "response_store_dir": [None, "/cache/r", 3],
    "tool_call_parser": ["auto", "openai", "none", "hermess", ""],
    "reasoning_parser": ["auto", "openai", "none", "deep", ""],
    "url": ["https://example.com/v1", "http://a:80", "example.com", "https://a?b", ""],
    "api_key_env": [None, "KEY", ""],
}


def candidates(schema: dict[str, Any]) -> list[Any]:
    """Values about the bounds of a setting's schema, and some of other types."""
    kinds = schema.get("anyOf", [schema])
    found: list[Any] = [schema["default"]] if "default" in schema else []
    for kind in kinds:
        if "enum" in kind or "const" in kind:
            found += [*kind.get("enum", [kind.get("const")]), "other"]
        elif kind["type"] == "boolean":
            found += [True, False]
        elif kind["type"] in ("integer", "number"):
            step = 1 if kind["type"] == "integer" else 0.25
            for bound in {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"} & kind.keys():
                found += [kind[bound] - step, kind[bound], kind[bound] + step]
            found += [4096, 10_000_000, 2.5, 0.0000001]
        elif kind["type"] == "null":
            found.append(None)
    return [*found, "many", [1]]


# Settings that rules bind to each other, with values of which each is right by itself.
BOUND: list[dict[str, list[Any]]] = [
    {"max_replicas": [None, 1, 3, 3, 6], "min_replicas": [0, 1, 2, 4]},
    {"max_replicas": [None, 4], "target_wait_s": [2, 1], "downscale_delay_s": [300, 60]},
    {"kv_tokens": [None, 16, 32, 4096], "page_size": [16, 64], "context_length": [None, 16, 4096, 8192]},
    {"schedule": [None, "uniform", "offline", "fixed_chunk"], "tbt_slo": [None, 0, 0.05], "finish": ["all", "most"]},
    {"draft_model": [None, "org/a", "/cache/tiny"], "speculation": ["auto", "off"]},
    {"lora_modules": [{}, {"x": "/cache/x"}, {"a": "/cache/a"}], "max_loras": [None, 0, 2]},
    {"served_model_name": ["a", "b", None], "aliases": [[], ["a"], ["c"]], "lora_modules": [{}, {"a": "/cache/a"}]},
    {"stage_layers": [None, "30", "15,15", "10,10,10"], "enable_expert_parallel": [False, False, True]},
    {"gpus_per_rank": [0.3, 0.5, 1], "cpus_per_rank": [None, 0.25, 1, 3], "cpus_per_router": [0.5, 1, 2.5]},
]


def drawn(properties: dict[str, Any], without: tuple[str, ...] = ()) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a few settings: some that are bound to each other, and any, each with any value."""
    values = {key: SPECIAL.get(key) or candidates(schema) for key, schema in properties.items() if key not in without}
    single = st.sampled_from(sorted(values)).flatmap(
        lambda key: st.fixed_dictionaries({key: st.sampled_from(values[key])})
    )
    bound = st.sampled_from(BOUND).flatmap(
        lambda group: st.fixed_dictionaries({key: st.sampled_from(group[key]) for key in group if key in values})
    )
    return st.one_of(bound, bound, single, st.tuples(bound, single).map(joined))


def joined(parts: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    return {key: value for part in parts for key, value in part.items()}


OWN = {"name", "model", "upstream", "tp", "pp", "replicas"}
ENTRY = SCHEMA["properties"]["models"]["items"]["else"]["properties"]
UPSTREAM = SCHEMA["properties"]["models"]["items"]["then"]["properties"]["upstream"]["properties"]


def sizes(most: int) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={"tp": st.integers(1, most), "pp": st.sampled_from([1, 1, 2, 3])})


def models() -> st.SearchStrategy[list[dict[str, Any]]]:
    name = st.fixed_dictionaries({"name": st.sampled_from(NAMES)})
    model = st.fixed_dictionaries({"model": st.sampled_from(["org/a", "SmolLM2-135M-Instruct", "/cache/a"])})
    replicas = st.fixed_dictionaries({}, optional={"replicas": st.integers(1, 4)})
    here = st.tuples(name, model, replicas, sizes(4), drawn(ENTRY, tuple(OWN)))
    far = st.tuples(name, drawn(UPSTREAM).map(lambda table: {"upstream": {"url": "http://a/v1"} | table}))
    return st.lists(st.one_of(here, here, far).map(joined), min_size=1, max_size=3)


SETTINGS = st.tuples(
    sizes(8),
    st.fixed_dictionaries({"device": st.sampled_from(["cpu", "cuda"])}),
    st.fixed_dictionaries({}, optional={"replicas": st.sampled_from([None, 1, 2, 3, 7])}),
    st.fixed_dictionaries({"config": drawn(SCHEMA["properties"]["config"]["properties"])}),
    st.one_of(st.just({}), st.just({}), st.fixed_dictionaries({"models": models()})),
    st.just({"env": [{"name": "KEY", "value": "k"}]}),
).map(joined)


def as_file(values: dict[str, Any]) -> dict[str, Any]:
    """The same settings in a configuration file."""
    own = {key: values[key] for key in ("device", "tp", "pp", "models", "replicas") if values.get(key) is not None}
    return {**values["config"], **own}


def rendered(values: dict[str, Any], seen: Counter[str]) -> tuple[dict[str, Any] | None, str]:
    """The RayService; None if helm refuses the values, and its words, which name one of them."""
    try:
        manifest = ray_service_of(check.render(values))
    except check.RefusedError as error:
        seen["refused"] += 1
        message = str(error)
        names = {"workers"} | keys(values) - {"config", "env", "name", "value"}
        assert names & set(re.findall(r"[\w/-]+", message)), message
        return None, message
    seen["accepted"] += 1
    check.check_crd(manifest)
    return manifest, ""


def keys(table: Any) -> set[str]:
    if isinstance(table, dict):
        return {str(key) for key in table} | {name for each in table.values() for name in keys(each)}
    return {name for each in table for name in keys(each)} if isinstance(table, list) else set()


def dumped(config: Config) -> list[Any]:
    return [entry.model_dump(exclude={"device"}) for entry in config.entries]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # for 2,000
def test_settings_are_refused_exactly_if_the_server_refuses_them() -> None:
    seen: Counter[str] = Counter()

    @CASES
    @given(SETTINGS)
    def all_of(values: dict[str, Any]) -> None:
        try:
            asked: Config | None = load(overrides=as_file(values))
            check_behind_proxies(asked)
        except ConfigError:
            asked = None
        manifest, message = rendered(values, seen)
        if manifest is None:
            is_idle = values["device"] == "cuda" and asked is not None and not asked.deployments
            assert asked is None or is_idle, message
            return
        got = server(manifest)
        assert asked is not None, load(overrides=as_file(values))
        assert dumped(got.config) == dumped(asked)
        assert got.routers == asked.num_routers
        assert not list(faults(manifest))

    all_of()
    assert min(seen["refused"], seen["accepted"]) >= 25, seen


# ---------------------------------------------------------------- pods

ODD = st.fixed_dictionaries(
    {},
    optional={
        "cpu": st.sampled_from([1, "5500m", 8, 32, "0.5", "4k", "1e1", "100u", None]),
        "memory": st.sampled_from(["8Gi", "64Gi", "3000M", "1Ti", "16", "100e9", 2e11, "1Pi", "500m", None]),
        "rdma/hca": st.sampled_from([1, "2", "500m"]),
    },
)
TIGHT = st.fixed_dictionaries({"cpu": st.integers(1, 14), "memory": st.just("512Gi")})
RESOURCES = st.one_of(
    st.none(),
    st.fixed_dictionaries({"requests": TIGHT}),
    st.fixed_dictionaries({"requests": TIGHT}),
    st.fixed_dictionaries({}, optional={"requests": ODD, "limits": ODD}),
)
# Those of a rank and a router, and numbers, so that workers are nearly full.
NUMBERS = {
    "replicas": st.sampled_from([1, 2, 3, 4, 5, 8, 16, 64]),
    "routers": st.sampled_from([None, 1, 2, 4, 6, 40]),
    "tp": st.sampled_from([1, 1, 2, 3, 4, 8]),
    "pp": st.sampled_from([1, 1, 2, 3]),
}
WORKERS = st.fixed_dictionaries(
    {"resources": RESOURCES},
    optional={
        "count": st.sampled_from([None, 1, 2, 3, 8]),
        "gpusPerWorker": st.sampled_from([None, 1, 2, 4, 8, 6]),
    },
)
MIXED = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", "b", "c", "d"]), "model": st.just("org/a")},
        optional={
            "tp": st.sampled_from([1, 2, 3, 4]),
            "replicas": st.integers(1, 6),
            "pp": st.integers(1, 2),
            "cpus_per_rank": st.sampled_from([0.5, 1, 2]),
        },
    ),
    min_size=2,
    max_size=3,
    unique_by=lambda entry: entry["name"],
)
SCALED = st.fixed_dictionaries(
    {"enabled": st.booleans()},
    optional={"minWorkers": st.integers(0, 3), "maxWorkers": st.sampled_from([None, 1, 4, 9])},
)
SHARES = st.fixed_dictionaries(
    {},
    optional={
        "cpus_per_rank": st.sampled_from([0.25, 0.5, 1.5, 2]),
        "cpus_per_router": st.sampled_from([0.25, 0.5, 1.5, 2]),
        "max_replicas": st.sampled_from([3, 6]),
        "drain_s": st.sampled_from([0, 600, 1e6]),
    },
)
PODS = st.tuples(
    st.fixed_dictionaries({"device": st.sampled_from(["cpu", "cuda", "cuda"])}),
    st.fixed_dictionaries({}, optional=NUMBERS),
    st.fixed_dictionaries({"workers": WORKERS}),
    st.one_of(
        st.just({}),
        st.fixed_dictionaries({"config": SHARES}),
        st.fixed_dictionaries({"config": SHARES}),
        st.fixed_dictionaries(
            {
                "tp": st.just(1),
                "pp": st.just(1),
                "config": st.fixed_dictionaries({"gpus_per_rank": st.sampled_from([0.1, 0.3, 0.5])}),
            }
        ),
        st.fixed_dictionaries({"models": MIXED}),
        st.fixed_dictionaries({"autoscaling": SCALED}),
        st.fixed_dictionaries({"head": st.fixed_dictionaries({"resources": RESOURCES})}),
    ),
).map(joined)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pods_of_random_sizes_hold_what_runs_in_them() -> None:
    seen: Counter[str] = Counter()

    @CASES
    @given(PODS)
    def all_of(values: dict[str, Any]) -> None:
        manifest, _ = rendered(values, seen)
        assert manifest is None or not list(faults(manifest))

    all_of()
    assert min(seen["refused"], seen["accepted"]) >= 25, seen


def test_every_setting_is_drawn() -> None:
    drawn_keys = {*SCHEMA["properties"]["config"]["properties"], "device", "tp", "pp", "replicas", "models", "model"}
    left = set(Config.model_fields) - drawn_keys - set(check.TAKEN_KEYS) - {"routers"}
    assert not left and set(DeploymentConfig.model_fields) - set(ENTRY) <= {"device", *check.TAKEN_KEYS}
