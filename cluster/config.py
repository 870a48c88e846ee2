"""The configuration: one flat, frozen table, from a YAML file, the command line, or Serve's application arguments.

Every way of starting Shoal uses it, so a name means the same in a file, as a flag and in the Helm chart's values. A
server of several models has a list of tables in it, `models`, with the same names.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Discriminator, Field, SecretStr, Tag, ValidationError, model_validator
from pydantic_core import ErrorDetails

from cluster import quantity
from cluster.log_lines import LogFormat
from cluster.models import model_name
from router.access.key_file import KeyEntry
from router.config import Aliases, ModelConfig, RouterConfig, UpstreamConfig
from worker.config import WorkerConfig


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line per key. The message is shown to the user unchanged."""


MIN_SHARE = 0.0001  # of a CPU or a GPU: Ray counts in ten thousandths
_SCALING = ("min_replicas", "target_wait_s", "downscale_delay_s")  # mean nothing without max_replicas


class ReplicaConfig(WorkerConfig, ModelConfig):
    """Settings of a model and its replicas."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(
        "SmolLM2-135M-Instruct", min_length=1, description="a known name, a folder, a .gguf file, or a Hugging Face id"
    )
    replicas: int = Field(
        2,
        ge=1,
        description="copies of the model, each with its own KV cache; with max_replicas, those at the start, by "
        "default as near to 2 as it and min_replicas allow",
    )
    max_replicas: int | None = Field(
        None,
        ge=1,
        description=(
            "most replicas that autoscaling starts; set it to let their number follow the demand (docs/MANY_MODELS.md)"
        ),
    )
    min_replicas: int = Field(
        1,
        ge=0,
        description="fewest replicas that autoscaling leaves; with 0 the last one goes too, and a request starts one "
        "and waits for it up to start_timeout_s",
    )
    target_wait_s: float = Field(
        2.0,
        gt=0,
        description=(
            "autoscaling starts replicas when a new request would wait longer than these seconds, for as long; "
            "lower it for quicker first tokens, at the price of more replicas"
        ),
    )
    downscale_delay_s: float = Field(
        300.0,
        gt=0,
        description=(
            "seconds for which one replica fewer must have sufficed before autoscaling takes one away, and "
            "without any request before it takes the last; raise it for models that load slowly"
        ),
    )
    replica_host: str | None = Field(
        None,
        description="address that replicas listen on for routers; by default 127.0.0.1 if Ray is started here, else "
        "the node's own",
    )
    cpus_per_rank: float | None = Field(
        None,
        ge=MIN_SHARE,
        description=(
            "Ray CPUs that one rank reserves, and its number of threads; by default an equal share of this "
            "machine's cores, or 1 on a cluster that is joined"
        ),
    )
    gpus_per_rank: float = Field(
        1.0, ge=MIN_SHARE, le=1, description="Ray GPUs that one rank reserves when the model runs on GPUs"
    )
    start_timeout_s: float = Field(
        600.0,
        gt=0,
        description="seconds that a replica may take to load, downloads included, and that `shoal serve` waits until "
        "the server can answer",
    )

    @property
    def most_replicas(self) -> int:
        """The most replicas that there may be at once, changes of `replicas` aside."""
        return self.max_replicas or self.replicas

    @property
    def may_sleep(self) -> bool:
        """Whether autoscaling may take the last replica away."""
        return self.max_replicas is not None and self.min_replicas == 0

    @model_validator(mode="before")
    @classmethod
    def _quantities(cls, given: Any) -> Any:
        """Takes Kubernetes' quantities where CPUs or bytes are meant."""
        return quantity.numbers(given) if isinstance(given, Mapping) else given

    @model_validator(mode="before")
    @classmethod
    def _start_within_bounds(cls, given: Any) -> Any:
        """Gives `replicas` a default that autoscaling allows."""
        if not isinstance(given, Mapping) or "replicas" in given or given.get("max_replicas") is None:
            return given
        default = ReplicaConfig.model_fields["replicas"].default
        try:
            least, most = int(given.get("min_replicas", 1)), int(given["max_replicas"])
        except (TypeError, ValueError):  # said of the field
            return given
        nearest = min(max(default, least), most)
        return given if nearest < max(1, least) else {**given, "replicas": nearest}

    @model_validator(mode="after")
    def _scales(self) -> Self:
        if self.max_replicas is None:
            if other := [name for name in _SCALING if getattr(self, name) != ReplicaConfig.model_fields[name].default]:
                raise ValueError(f"{', '.join(other)}: without max_replicas there is no autoscaling")
        elif self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is more than max_replicas={self.max_replicas}")
        elif not self.min_replicas <= self.replicas <= self.max_replicas:
            raise ValueError(
                f"replicas={self.replicas}, the number at the start, must be from min_replicas={self.min_replicas} to "
                f"max_replicas={self.max_replicas}"
            )
        return self

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


class DeploymentConfig(ReplicaConfig):
    """A model with its name in the API, its replicas and all their settings: an entry of `models`."""

    name: str = Field(min_length=1, description="the model's name in the API")
    model: str = Field(min_length=1, description="a known name, a folder, a .gguf file, or a Hugging Face id")


class UpstreamEntry(BaseModel):
    """A model at another endpoint: an entry of `models`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, description="the model's name in the API")
    aliases: Aliases = Field((), description="further names of the model in the API")
    upstream: UpstreamConfig = Field(description="the endpoint that answers for the model, in place of replicas")


def _kind(entry: Any) -> str:
    is_upstream = "upstream" in entry if isinstance(entry, Mapping) else isinstance(entry, UpstreamEntry)
    return "upstream" if is_upstream else "model"


Entry = Annotated[
    Annotated[DeploymentConfig, Tag("model")] | Annotated[UpstreamEntry, Tag("upstream")], Discriminator(_kind)
]

UPSTREAM_FIELDS = UpstreamConfig.model_fields
KEY_FIELDS = KeyEntry.model_fields  # of an entry of the key file
# Settings of one model alone, which are no defaults for several.
OF_ONE_MODEL = ("model", "served_model_name", "aliases")
# Settings of routers that listen themselves: behind Serve's proxies they would do nothing.
OF_LISTENERS = ("ssl_certfile", "ssl_keyfile", "max_header_bytes", "max_connections", "keep_alive_s")
# Settings that hold, next to `models`, for each entry that does not set them.
DEFAULTS = tuple(name for name in ReplicaConfig.model_fields if name not in OF_ONE_MODEL)


class Config(ReplicaConfig, RouterConfig):
    """All settings of a server.

    It serves one model, or those of `models`.
    """

    served_model_name: str | None = Field(
        None, description="the model's name in the API; by default the name of its folder"
    )
    models: tuple[Entry, ...] = Field(
        (), description="several models, in place of `model`, `served_model_name` and `aliases`"
    )
    routers: int | None = Field(
        None,
        ge=1,
        description=(
            "HTTP processes in front of the replicas, on each machine of router_hosts; by default one per two "
            "replicas (of the most that autoscaling may start) over all machines. Set more for many streams at "
            "once"
        ),
    )
    router_hosts: tuple[str, ...] = Field(
        (),
        description=(
            "machines that routers run on, by their addresses in Ray; by default only the one of `shoal serve`. "
            "Set several so that clients survive the loss of one"
        ),
    )
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 for all network interfaces")
    port: int = Field(8000, ge=1, le=65535, description="TCP port to listen on")
    metrics_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description=(
            "first TCP port for the metrics of single routers: each listens at the first that is free from there on, "
            "and answers /metrics, /ready and /health for itself; by default only the router that a connection to "
            "port comes to answers"
        ),
    )
    address: str | None = Field(
        None,
        description="the Ray cluster to join: host:port, or auto; by default Ray is started on this machine",
    )
    cpus_per_router: float = Field(1.0, ge=MIN_SHARE, description="CPUs that are kept free of replicas for each router")
    health_check_period_s: float = Field(
        0.5,
        ge=0.1,
        description="seconds between health checks of a replica or a router, which is replaced after three failed ones",
    )
    drain_s: float = Field(
        120.0,
        ge=0,
        description=(
            "on shutdown or scale-down, seconds for which running streams may go on. Then streams of a replica "
            "go on at another one, which computes their tokens again; when the whole server ends, they end with "
            "the error server_ends. Raise it for very long answers, lower it where machines are taken back "
            "sooner"
        ),
    )

    log_format: LogFormat = Field(
        "text",
        description="form of the lines in the logs of routers and replicas: text, or json, one object a line",
    )

    @model_validator(mode="before")
    @classmethod
    def _inherit(cls, given: Any) -> Any:
        """Gives the entries of `models` the settings next to it."""
        if not isinstance(given, Mapping) or not isinstance(given.get("models"), list | tuple):
            return given
        defaults = {name: given[name] for name in DEFAULTS if name in given}
        models = [
            defaults | entry if isinstance(entry, dict) and "upstream" not in entry else entry
            for entry in given["models"]
        ]
        return {**given, "models": models}

    @model_validator(mode="after")
    def _named_apart(self) -> Self:
        if self.models and (given := [name for name in OF_ONE_MODEL if name in self.model_fields_set]):
            raise ValueError(f"{', '.join(given)}: for one model; with models, each entry has its own")
        if "models" in self.model_fields_set and not self.models:
            raise ValueError("models: there is no entry; leave models out to serve one model")
        adapters = [name for deployment in self.deployments for name in deployment.lora_modules]
        names = Counter(adapters) + Counter(name for entry in self.entries for name in (entry.name, *entry.aliases))
        if twice := [name for name, count in names.items() if count > 1]:
            raise ValueError(
                f"models: {', '.join(map(repr, twice))}: names and aliases must differ from each other, and from "
                "adapters' names"
            )
        if hosts := [host for host, count in Counter(self.router_hosts).items() if count > 1]:
            raise ValueError(f"router_hosts: {', '.join(hosts)}: named twice; routers says how many run on each")
        if self.router_hosts and self.address is None:
            raise ValueError("router_hosts: without address the server is on this machine alone")
        deployments = Counter(self.deployment_name(entry) for entry in self.deployments)
        if alike := [name for name, count in deployments.items() if count > 1]:
            raise ValueError(f"models: several deployments are named {', '.join(alike)}: names must differ in letters")
        return self

    @property
    def entries(self) -> tuple[DeploymentConfig | UpstreamEntry, ...]:
        """All models. One model alone is one entry."""
        if self.models:
            return self.models
        values = {name: getattr(self, name) for name in ReplicaConfig.model_fields}
        values["name"] = self.served_model_name or model_name(self.model)
        given = {"name", "model"} | self.model_fields_set & values.keys()  # a GPU has other defaults
        return (DeploymentConfig.model_construct(_fields_set=given, **values),)

    @property
    def deployments(self) -> tuple[DeploymentConfig, ...]:
        """The models that replicas serve."""
        return tuple(entry for entry in self.entries if isinstance(entry, DeploymentConfig))

    @property
    def upstreams(self) -> tuple[UpstreamEntry, ...]:
        """The models at other endpoints."""
        return tuple(entry for entry in self.entries if isinstance(entry, UpstreamEntry))

    def changed(self, change: Callable[[DeploymentConfig], DeploymentConfig]) -> Self:
        """The configuration with `change` made to each of its `deployments`."""
        entries = [change(entry) if isinstance(entry, DeploymentConfig) else entry for entry in self.entries]
        return self.model_copy(update={"models": tuple(entries)})

    def deployment_name(self, deployment: DeploymentConfig) -> str:
        """The name of a model's deployment in Ray Serve: Replica for one model, Replica-NAME for one of several."""
        if len(self.deployments) == 1:
            return "Replica"
        return f"Replica-{re.sub('[^A-Za-z0-9_.-]', '-', deployment.name)}"

    @property
    def num_routers(self) -> int:
        """`routers`, or one per two replicas; on each machine of `router_hosts`. A router sends some 20,000 chunks per
        second (at higher rates, longer chunks), and a fast replica makes 10,000 tokens per second."""
        replicas = sum(deployment.most_replicas for deployment in self.deployments)
        return self.routers or max(1, -(-replicas // (2 * max(1, len(self.router_hosts)))))

    def to_yaml(self, defaults: bool = False) -> str:
        """The configuration as YAML, one key per line: the model, and the settings that are not the defaults (with
        `defaults` all settings), those of the model and of the server first, secrets as asterisks. Of an entry of
        `models`, only what differs from the settings next to `models`."""
        values = self.model_dump(mode="json", exclude={"models"})
        first = (*ReplicaConfig.__annotations__, *Config.__annotations__)
        own = {key: values.pop(key) for key in first if key in values}
        values = own | values
        if self.models:
            values = {key: value for key, value in values.items() if key not in OF_ONE_MODEL}
            values["models"] = [_written(entry, values) for entry in self.models]
        if not defaults:
            default = Config.model_validate({}).model_dump(mode="json")
            values = {key: value for key, value in values.items() if key == "model" or value != default[key]}
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=120)


def _written(entry: DeploymentConfig | UpstreamEntry, defaults: Mapping[str, Any]) -> dict[str, Any]:
    values = entry.model_dump(mode="json", exclude_defaults=isinstance(entry, UpstreamEntry))
    first = {key: values.pop(key) for key in ("name", "model", "aliases") if values.get(key)}
    return first | {key: value for key, value in values.items() if key != "aliases" and value != defaults.get(key, ())}


def check_behind_proxies(config: Config) -> None:
    """Raises ConfigError for a setting that does nothing where Serve's proxies take connections."""
    for name in OF_LISTENERS:
        if getattr(config, name) != Config.model_fields[name].default:
            raise ConfigError(f"{name}: Serve's proxies take connections here, and do not know it: leave it out")


def upstream_keys(config: Config) -> dict[str, SecretStr]:
    """The API keys of the other endpoints, by the model's name here, from this process's environment. Raises
    ConfigError."""
    keys = {}
    for entry in config.upstreams:
        variable = entry.upstream.api_key_env
        if variable is not None:
            if not os.environ.get(variable):
                raise ConfigError(f"models: {entry.name}: api_key_env: {variable} is not set in this environment")
            keys[entry.name] = SecretStr(os.environ[variable])
    return keys


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


_SHAPES = {
    "tuple_type": "must be a list",
    "model_type": "must be a table of `key: value` lines",
    "model_attributes_type": "must be a table of `key: value` lines",
}


def _problem(detail: ErrorDetails) -> str:
    place = list(detail["loc"])
    kind = str(place.pop(2)) if place[:1] == ["models"] and len(place) > 2 else ""  # the tag of the entry's type
    key = ".".join(str(part) for part in place)
    message = detail["msg"].removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown{_hint(str(place[-1]), kind, len(place))}"
    if not key:
        return message
    if detail["type"] in _SHAPES:
        return f"{key}: {_SHAPES[detail['type']]}"
    is_shown = "api_key" not in key and detail["type"] != "missing" and (not kind or len(place) > 2)
    shown = f" {detail['input']!r}:" if is_shown else ""
    return f"{key}:{shown} {message[0].lower()}{message[1:]}"


def _hint(key: str, kind: str, depth: int) -> str:
    """The end of the message for an unknown key: of the configuration, of an entry of `models` of this `kind`, or, with
    `depth` 4, of its `upstream`."""
    if not kind:
        return _did_you_mean(key, Config.model_fields)
    if depth > 3:
        return _did_you_mean(key, UPSTREAM_FIELDS)
    if key == "served_model_name":
        return "; did you mean name?"
    if kind == "upstream" and key in DeploymentConfig.model_fields:
        return ": this model has no replicas here"
    if key in Config.model_fields:
        return ": it is a setting of the whole server, next to models"
    return _did_you_mean(key, UpstreamEntry.model_fields | DeploymentConfig.model_fields)


def _did_you_mean(key: str, known: Iterable[str]) -> str:
    close = get_close_matches(key.replace("-", "_"), known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _count(problems: int) -> str:
    return "1 setting is wrong" if problems == 1 else f"{problems} settings are wrong"
