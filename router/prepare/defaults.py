"""The model's own sampling defaults (`generation_config.json`), for requests that leave these parameters out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar, get_type_hints

import msgspec

from router.prepare.sampling import is_greedy
from router.wire.requests import GenerationRequest

Request = TypeVar("Request", bound=GenerationRequest)

FILE = "generation_config.json"
# Not `max_new_tokens`: models set it because `transformers` would otherwise stop after 20 tokens. Here it would cut
# answers that still fit into the context.
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

_TYPES = get_type_hints(GenerationRequest, include_extras=True)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults of one model. `values`: those of FIELDS that are set. `problems`: one line for each value of
    its file that is invalid and was left out. `source`: what says so, for the user."""

    values: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    source: str = FILE

    @classmethod
    def read(
        cls, folder: Path, sampling_defaults: Literal["model", "openai"], card: Mapping[str, float] | None = None
    ) -> "SamplingDefaults":
        """Reads the defaults from a Hugging Face folder; empty for `openai`. `card`: what the model's card recommends,
        for a model whose file sets nothing. A value that a request could not have either is a problem. Raises
        ValueError for a file that is no JSON object."""
        if sampling_defaults == "openai":
            return cls()
        path = folder / FILE
        said = cls._of_file(path) if path.exists() else cls()
        return cls(card, said.problems, "its card") if card and not said.values else said

    @classmethod
    def _of_file(cls, path: Path) -> "SamplingDefaults":
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
        if bytes(said.get("do_sample", b"")) == b"false":  # wins over a temperature, as in transformers
            values["temperature"] = 0.0
        return cls(values, tuple(problems))

    def complete(self, request: Request) -> Request:
        """The request, with the model's values for the parameters that it leaves out. A greedy request (temperature 0)
        stays as it is: the model's penalties would make it choose other tokens."""
        if not self.values or (request.temperature is not None and is_greedy(request.temperature)):
            return request
        missing = {name: value for name, value in self.values.items() if getattr(request, name) is None}
        return msgspec.structs.replace(request, **missing)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())
