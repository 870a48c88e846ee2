"""Settings of a router. `cluster.config` composes them into the configuration file."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from worker.formats.families import PARSERS, THINKING, THINKING_ALIASES, TOOL_ALIASES, TOOLS

_ORIGIN = re.compile(r"https?://[^/?#@,\s]+")
_BASE = re.compile(r"https?://[^/?#@\s]+(/[^?#\s]*)?")


def _is_url(value: str) -> bool:
    """Whether it is `_BASE`, with a port that is one."""
    try:
        return _BASE.fullmatch(value) is not None and urlsplit(value).port != 0
    except ValueError:
        return False


def _checked(value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise ValueError("a name has at least one character")
    return value


Aliases = Annotated[
    tuple[str, ...],
    AfterValidator(_checked),
    Field(json_schema_extra={"items": {"type": "string", "minLength": 1}}),
]


class ModelConfig(BaseModel):
    """Settings of one model at the router."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    aliases: Aliases = Field((), description="further names of the model in the API; answers have its own name")
    placement: Literal["cache_aware", "least_load", "round_robin"] = Field(
        "cache_aware",
        description=(
            "how a router chooses the replica for a request: cache_aware takes the one where the answer begins "
            "soonest, by caches and load; least_load and round_robin leave caches out, for comparison"
        ),
    )
    replica_wait_s: float = Field(
        60.0,
        ge=0,
        description=(
            "seconds that a request, or a stream that lost its replica, waits while no replica is there, before "
            "it ends with no_replica; raise it above the time that a replica takes to start, so that none fails "
            "meanwhile"
        ),
    )
    max_prompts: int = Field(2048, ge=1, description="most sequences (prompts times n) per HTTP request")
    clamp_max_tokens: bool = Field(
        False,
        description=(
            "set this for clients that send a large max_tokens with every request: the answer then ends where "
            "the context does, with finish_reason length; otherwise such a request is refused. Messages are "
            "always answered so"
        ),
    )
    max_waiting_tokens: int = Field(
        1 << 22,
        ge=1,
        description=(
            "prompt tokens that may wait at a replica, as a router knows them; when as many wait at each, new "
            "requests get 429 before they are tokenised. Lower it to refuse early instead of letting clients "
            "wait"
        ),
    )
    max_priority: int = Field(
        0,
        ge=0,
        le=(1 << 31) - 1,
        description="highest priority that a request may have, where its API key says none; running requests of lower "
        "priority give up their KV pages for it. With 0, clients can only lower the priority of a request, with a "
        "negative one",
    )
    tool_call_parser: str = Field(
        "auto",
        description=f"how the model writes calls of tools: {', '.join(sorted(TOOLS))}, openai, another name of "
        "these in vLLM or SGLang, or none for text; auto: as its chat template says",
        json_schema_extra={"enum": [*sorted({*PARSERS, *TOOLS, *TOOL_ALIASES})]},
    )
    reasoning_parser: str = Field(
        "auto",
        description=f"how the model writes what it thinks: {', '.join(sorted(THINKING))}, another name of "
        "these in vLLM or SGLang, or none for text; auto: as its chat template or vocabulary says",
        json_schema_extra={"enum": [*sorted({*PARSERS, *THINKING, *THINKING_ALIASES})]},
    )
    pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="hidden states that make an embedding: the last token's, or the mean over all tokens; auto is as "
        "the model's 1_Pooling/config.json says, else last",
    )
    scoring: Literal["auto", "reranker", "embedding"] = Field(
        "auto",
        description="how /v1/rerank and /v1/score get their scores: reranker asks the model for yes or no by the "
        "prompt of Qwen3-Reranker, embedding is the cosine between embeddings; auto is reranker for models with "
        "Reranker in their name and for classifiers (ForSequenceClassification), else embedding",
    )
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="source of the sampling parameters that a request leaves out: model takes temperature, top_p, "
        "top_k, min_p and repetition_penalty from generation_config.json, or from the card of a known name; openai is "
        "temperature 1 without filters",
    )

    @field_validator("tool_call_parser", "reasoning_parser")
    @classmethod
    def _parsers(cls, value: str, info: ValidationInfo) -> str:
        of_tools = info.field_name == "tool_call_parser"
        known = {*PARSERS, *((*TOOLS, *TOOL_ALIASES) if of_tools else (*THINKING, *THINKING_ALIASES))}
        if value not in known:
            raise ValueError(f"there is none of that name; there are {', '.join(sorted(known))}")
        return value


class UpstreamConfig(BaseModel):
    """Settings of another endpoint that answers for a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str = Field(
        description="base URL of an OpenAI-compatible endpoint, as https://example.com/v1",
        json_schema_extra={"pattern": f"^{_BASE.pattern}$"},
    )
    model: str | None = Field(None, min_length=1, description="the model's name there; by default the name here")
    api_key_env: str | None = Field(
        None,
        min_length=1,
        description="environment variable with the endpoint's API key, read where the server is started; without it "
        "no key is sent",
    )
    timeout_s: float = Field(
        600.0, gt=0, description="seconds that the endpoint may be silent before and during an answer, which then fails"
    )
    connect_timeout_s: float = Field(10.0, gt=0, description="seconds that a connection to the endpoint may take")

    @field_validator("url")
    @classmethod
    def _url(cls, value: str) -> str:
        if not _is_url(value):
            raise ValueError("a base URL is a scheme, a host and a path, as https://example.com/v1, and no more")
        return value.rstrip("/")


class RouterConfig(ModelConfig):
    """Settings of the HTTP side."""

    api_key: SecretStr | None = Field(None, description="key that clients must send; without one the server is open")
    api_key_file: Path | None = Field(
        None,
        description="file with accepted keys: one per line, or a table that gives each a name and limits; read again "
        "when it changes",
    )
    require_auth_for_metrics_endpoint: bool = Field(
        False,
        description="whether /metrics needs a key, and with it all that tells of the server and its clients: /state, "
        "/docs, /redoc and /openapi.json; any accepted key will do",
    )
    ssl_certfile: Path | None = Field(
        None,
        description="file with the certificate (PEM, and those that it depends on) by which the server speaks TLS; "
        "read again when it changes. Only for routers that listen themselves, not behind Serve's proxies",
    )
    ssl_keyfile: Path | None = Field(None, description="file with the private key (PEM) of ssl_certfile")
    allow_runtime_lora_updating: bool = Field(
        False,
        description="whether clients may load and unload LoRA adapters (/v1/load_lora_adapter, "
        "/v1/unload_lora_adapter), from any folder that replicas can read; also needs max_loras",
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body, in bytes; larger ones get 413")
    max_held_bytes: int = Field(
        256 << 20,
        ge=1024,
        description=(
            "most bytes of request bodies that a router holds at once, each until its answer ends; a client "
            "beyond its share gets 503 (docs/LIMITS.md). Raise it for long prompts of many clients"
        ),
    )
    max_header_bytes: int = Field(
        32 << 10,
        ge=256,
        description="most bytes of request line and headers together; larger ones get 431 (or 414)",
    )
    max_connections: int = Field(
        8192,
        ge=1,
        description="most client connections to one router; a further one takes the place of one that waits for a "
        "request, and gets 503 if all are being answered",
    )
    header_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds that a client has to send the headers of a request, to begin its first request, for each "
        "8 KiB of a body, and for a TLS handshake",
    )
    body_timeout_s: float = Field(
        60.0, gt=0, description="seconds that a client has to send the body of a request; slower ones get 408"
    )
    keep_alive_s: float = Field(
        90.0, gt=0, description="seconds that an idle connection is kept open after an answer, for the next request"
    )
    cors_origins: str | None = Field(
        None,
        description="origins whose pages may send requests from a browser (CORS), comma-separated, as "
        "https://chat.example.com; * for any; by default none",
        json_schema_extra={"pattern": rf"^\s*({_ORIGIN.pattern}|\*)\s*(,\s*({_ORIGIN.pattern}|\*)\s*)*$"},
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="URL to which routers send traces of requests for OpenTelemetry (OTLP over HTTP, protobuf), as "
        "http://collector:4318/v1/traces; by default nothing is traced",
        json_schema_extra={"pattern": f"^{_BASE.pattern}$"},
    )
    trace_sampling_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="part of the traces that is kept, for requests whose clients do not say so by a traceparent header",
    )
    response_store_bytes: int = Field(
        256 << 20,
        ge=0,
        description="most bytes on disk for the responses of /v1/responses that clients may ask for again. Of the "
        "client with the most bytes, those used least recently are forgotten first; the running ones of a client may "
        "take half. With 0 none are stored: answers say store false, and previous_response_id and background are "
        "refused",
    )
    response_store_age_s: float = Field(
        30 * 86400.0, gt=0, description="seconds after which a stored response that was not used is forgotten"
    )
    response_store_dir: Path | None = Field(
        None,
        description="folder of the stored responses, which the routers of a machine share; by default `responses` in "
        "the cache folder",
    )
    max_background_responses: int = Field(
        64,
        ge=1,
        description=(
            "most responses that a router makes in the background at once; further ones get 429, as do a "
            "client's beyond its share (docs/LIMITS.md)"
        ),
    )

    @field_validator("cors_origins")
    @classmethod
    def _origins(cls, value: str | None) -> str | None:
        for origin in [] if value is None else value.split(","):
            if origin.strip() != "*" and not _ORIGIN.fullmatch(origin.strip()):
                raise ValueError("an origin is a scheme and a host, with nothing after them: https://chat.example.com")
        return value

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _receiver(cls, value: str | None) -> str | None:
        if value is not None and not _is_url(value):
            raise ValueError("a receiver's URL is a scheme, a host and a path, as http://collector:4318/v1/traces")
        return value

    @model_validator(mode="after")
    def _doors(self) -> Self:
        if self.require_auth_for_metrics_endpoint and self.api_key is None and self.api_key_file is None:
            raise ValueError("require_auth_for_metrics_endpoint: there are no keys; set api_key or api_key_file")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile: set both, or neither")
        return self

    @property
    def origins(self) -> list[str]:
        """The origins in `cors_origins`, as a list."""
        return [] if self.cors_origins is None else [origin.strip() for origin in self.cors_origins.split(",")]
