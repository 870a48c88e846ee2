"""What a request leaves open, as the model's makers want it: `generation_config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_type_hints

import msgspec

from router.requests import GenerationRequest
from router.sampling import is_greedy

Request = TypeVar("Request", bound=GenerationRequest)

FILE = "generation_config.json"
# Not `max_new_tokens`: it is there because `transformers` alone would stop after 20 tokens, and would cut answers that
# have room in the context.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_TYPES = get_type_hints(GenerationRequest, include_extras=True)


@dataclass(frozen=True)
class SamplingDefaults:
    """`values`: of those FIELDS that the model has an opinion on. `problems`: what in its file is not as it should be,
    and was left out, a line each."""

    values: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path, sampling_defaults: Literal["model", "openai"]) -> "SamplingDefaults":
        """Those of the model in this Hugging Face folder; none for `openai`, or if it says nothing. A value that a
        request might not have either is a problem. Raises ValueError for a file that is no JSON object."""
        path = folder / FILE
        if sampling_defaults == "openai" or not path.exists():
            return cls()
        try:
            said = msgspec.json.decode(path.read_bytes(), type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is no JSON object: {error}") from None
        values: dict[str, float] = {}
        problems = []
        for name in FIELDS:
            try:
                value = msgspec.json.decode(said.get(name, b"null"), type=_TYPES[name])
            except msgspec.DecodeError as error:
                problems.append(f"{path}: {name} is {bytes(said[name]).decode()}, which is left out: {error}")
                continue
            if value is not None:
                values[name] = value
        if bytes(said.get("do_sample", b"")) == b"false":  # stronger than a temperature, as in transformers
            values["temperature"] = 0.0
        return cls(values, tuple(problems))

    def complete(self, request: Request) -> Request:
        """The request, with the model's values where it has none. One that asks for the likeliest tokens (temperature
        0) stays as it is: a model's penalties would make it choose others."""
        if not self.values or (request.temperature is not None and is_greedy(request.temperature)):
            return request
        missing = {name: value for name, value in self.values.items() if getattr(request, name) is None}
        return msgspec.structs.replace(request, **missing)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())
