"""The configuration: one flat, frozen table, from a YAML file, the command line, or Serve's application arguments.

Every way of starting Shoal uses it, so a name means the same in a file, as a flag and in the Helm chart's values.
"""

from collections.abc import Hashable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails

from router.config import RouterConfig
from worker.config import WorkerConfig


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line per key. The message is shown to the user unchanged."""


class Config(WorkerConfig, RouterConfig):
    """All settings of a deployment of Shoal."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "SmolLM2-135M-Instruct", min_length=1, description="a known name, a folder, a .gguf file, or a Hugging Face id"
    )
    replicas: int = Field(2, ge=1, description="copies of the model, each with its own KV cache")
    routers: int | None = Field(
        None,
        ge=1,
        description="HTTP processes in front of the replicas, sharing one port; by default one per two replicas",
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all network interfaces")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on")
    address: str | None = Field(
        None,
        description="the Ray cluster to join: host:port, or auto; by default Ray is started on this machine",
    )
    replica_host: str | None = Field(
        None,
        description="address that replicas listen on for routers; by default 127.0.0.1 if Ray is started here, else "
        "the node's own",
    )
    cpus_per_rank: float | None = Field(
        None,
        gt=0,
        description="Ray CPUs that one rank reserves, and its number of threads; by default an equal share of this "
        "machine's cores, or 1 on a cluster that is joined",
    )
    gpus_per_rank: float = Field(
        1.0, gt=0, le=1, description="Ray GPUs that one rank reserves when the model runs on GPUs"
    )
    cpus_per_router: float = Field(1.0, gt=0, description="Ray CPUs that one router reserves")
    health_check_period_s: float = Field(
        0.5,
        ge=0.1,
        description="seconds between health checks of a replica or a router, which is replaced after three failed ones",
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that a replica may take to load, downloads included, and that `shoal serve` waits until "
        "the server can answer",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.num_ranks > 1 and self.gpus_per_rank < 1:
            raise ValueError(f"tp={self.tp}, pp={self.pp}: ranks cannot share a GPU; leave gpus_per_rank at 1")
        if self.kv_tokens is not None and self.kv_tokens < self.page_size:
            raise ValueError(f"kv_tokens={self.kv_tokens} is less than one page (page_size={self.page_size})")
        if self.kv_tokens is not None and self.context_length is not None and self.context_length > self.kv_tokens:
            raise ValueError(
                f"context_length={self.context_length} does not fit into kv_tokens={self.kv_tokens}: "
                "raise kv_tokens or lower context_length"
            )
        return self

    @property
    def num_routers(self) -> int:
        """`routers`, or one per two replicas: a router sends some 20,000 chunks per second (at higher rates, longer
        chunks), and a fast replica makes 10,000 tokens per second."""
        return self.routers or -(-self.replicas // 2)

    def to_yaml(self) -> str:
        """The effective configuration as YAML, one key per line: own fields first, secrets as asterisks."""
        values = self.model_dump(mode="json")
        own = {key: values.pop(key) for key in Config.__annotations__ if key in values}
        return yaml.safe_dump({**own, **values}, sort_keys=False, allow_unicode=True, width=120)


def load(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Reads a YAML file (or nothing), applies `overrides` on top, and checks the result.

    Raises ConfigError, with every unknown key and every wrong value in one message.
    """
    settings = {**(_read(path) if path is not None else {}), **(overrides or {})}
    source = f"{path}" if path is not None else "configuration"
    try:
        return Config(**settings)
    except ValidationError as error:
        problems = [_problem(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n  ".join([f"{source}: {_count(len(problems))}", *problems])) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {error}") from None
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must be a table of `key: value` lines, not a {type(settings).__name__}")
    if wrong := [key for key in settings if not isinstance(key, str)]:
        raise ConfigError(f"{path}: keys must be names, not {wrong[0]!r}")
    return settings


class _UniqueKeys(yaml.SafeLoader):
    """A YAML loader that refuses duplicate keys, which are a mistake here. In plain YAML the last one wins."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _problem(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown{_did_you_mean(key, Config.model_fields)}"
    if not key:
        return message
    shown = "" if "api_key" in key else f" {detail['input']!r}:"
    return f"{key}:{shown} {message[0].lower()}{message[1:]}"


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    close = get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _count(problems: int) -> str:
    return "1 setting is wrong" if problems == 1 else f"{problems} settings are wrong"
