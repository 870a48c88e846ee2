"""Features of a client package, each a function that uses one feature on a server and raises if anything is wrong."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar


@dataclass(frozen=True)
class ServedModel:
    """The server that a client is pointed at.

    | field | meaning |
    | --- | --- |
    | `url` | of the server, without `/v1` |
    | `model` | the model's name there |
    | `folder` | of the model's files on this machine, for clients that count tokens or compute log-likelihoods themselves; None if there is none |
    """  # noqa: E501

    url: str
    model: str
    folder: Path | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def long_text(self) -> str:
        """A text that no context has room for."""
        return long_text(self.url)


def long_text(url: str) -> str:
    """A text that the context of no model of a server has room for."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        longest = max(model.get("max_model_len") or 0 for model in json.load(answer)["data"])
    return "so it goes on and on, " * (longest // 4)  # some seven tokens


Refusal = TypeVar("Refusal", bound=Exception)
Check = Callable[[ServedModel], None]


@dataclass(frozen=True)
class CheckedFeature:
    """The result of one check. `error`: the exception's type and text; None if the feature works."""

    feature: str
    error: str | None
    seconds: float


def refused(kind: type[Refusal], request: Callable[[], Any]) -> Refusal:
    """The error that a request ends with, which must be of this kind. Raises AssertionError if there is none."""
    try:
        request()
    except kind as error:
        return error
    raise AssertionError("the request was not refused")


class Checks:
    """The checks of one client, by feature.

        checks = Checks()

        @checks("chat")
        def chat(at: ServedModel) -> None: ...

    A feature is tried once; a check that raises says that it does not work.
    """

    def __init__(self) -> None:
        self.features: dict[str, Check] = {}

    def __call__(self, feature: str) -> Callable[[Check], Check]:
        def add(check: Check) -> Check:
            if feature in self.features:
                raise ValueError(f"two checks are called {feature!r}")
            self.features[feature] = check
            return check

        return add

    def run(self, at: ServedModel) -> Iterator[CheckedFeature]:
        """The outcome of each check, as it ends."""
        for feature, check in self.features.items():
            start = time.perf_counter()
            try:
                check(at)
                error = None
            except Exception as raised:  # a client's exceptions have no common type
                error = f"{type(raised).__name__}: {raised}"
            yield CheckedFeature(feature, error, time.perf_counter() - start)
