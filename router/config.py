"""What a router may be told. `cluster.config` composes this into the configuration file."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class RouterConfig(BaseModel):
    """Settings of the HTTP side and of placement."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    served_model_name: str | None = Field(
        None, description="the model's name in the API; by default that of its folder"
    )
    placement: Literal["cache_aware", "least_load", "round_robin"] = Field(
        "cache_aware", description="how a replica is chosen for a request"
    )
    replica_wait_s: float = Field(
        60.0,
        ge=0,
        description="seconds that a request, or a stream that lost its replica, waits where there is no other, before "
        "it ends with no_replica",
    )
    api_key: SecretStr | None = Field(None, description="clients must send this key; without one the server is open")
    api_key_file: Path | None = Field(None, description="a file with one accepted key a line")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body, in bytes; larger ones get 413")
    max_prompts: int = Field(256, ge=1, description="most sequences (prompts times n) in one HTTP request")
    sampling_defaults: Literal["model", "openai"] = Field(
        "model",
        description="what holds where a request says nothing: temperature, top_p, top_k, min_p and repetition_penalty "
        "of the model's generation_config.json, or what OpenAI has (temperature 1, no filters)",
    )
