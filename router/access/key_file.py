"""The key file: the API keys that a server accepts, and what each of its clients may do.

Two forms, told apart by the first line that is neither empty nor a comment:

    sk-one                          keys:
    sk-two                            - key: sk-one
                                        name: batch
                                        requests_per_minute: 600

On the left one key a line, without limits. On the right a table in YAML, whose entries are `KeyEntry`.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

INT31 = (1 << 31) - 1
TABLE = "keys:"
UNNAMED = "unnamed"  # in metrics and logs: the clients of keys without a name
_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"


KeyTexts = SecretStr | Annotated[list[SecretStr], Field(min_length=1)]


class KeyEntry(BaseModel):
    """An entry of the table: a client with its key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: KeyTexts = Field(description="the key, or a list of several: to exchange a key, accept both for a while")
    name: str = Field(
        description="the client's name in metrics and logs: up to 64 letters, digits, `_`, `.` and `-`. What a client "
        "has stored stays its own while the name does",
    )
    requests_per_minute: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=INT31,
        description="most requests in a minute, over all routers; by default any number",
    )
    tokens_per_minute: int | None = Field(
        None,
        strict=True,
        ge=1,
        le=INT31,
        description="most tokens in a minute, prompts and answers together, over all routers. A request is refused "
        "while more than these were used, so a long one may go beyond them once; by default any number",
    )
    concurrent_requests: int | None = Field(
        None, strict=True, ge=1, le=INT31, description="most requests at once, over all routers; by default any number"
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1e6,
        description="the client's share of a busy server, relative to others: one of weight 2 is served twice as many "
        "tokens as one of weight 1 while both wait",
    )
    by_user: bool = Field(
        False,
        strict=True,
        description="whether the share is divided among the users that its requests name (safety_identifier, else "
        "user), as if each were a client",
    )
    own_cache: bool = Field(
        False,
        strict=True,
        description="whether its prefixes are cached for itself only, so that neither times nor cached_tokens tell it "
        "what others have asked, or others what it has",
    )
    max_priority: int | None = Field(
        None,
        strict=True,
        ge=-INT31 - 1,
        le=INT31,
        description="highest priority that its requests may have, in place of the model's max_priority; with a "
        "negative one, all its requests yield to those of others",
    )
    admin: bool = Field(
        False,
        strict=True,
        description="whether its client may empty the caches of all replicas (/flush_cache, /reset_prefix_cache)",
    )
    expires: datetime | None = Field(
        None,
        description="date, or date and time (UTC unless it says otherwise), from which the key is refused; by default "
        "never",
    )

    @field_validator("name")
    @classmethod
    def _fit_for_logs(cls, value: str) -> str:
        if not re.fullmatch(_NAME, value):
            raise ValueError("a name has up to 64 letters, digits, '_', '.' and '-', and begins with no sign")
        return value

    @field_validator("expires")
    @classmethod
    def _with_zone(cls, value: datetime | None) -> datetime | None:
        return value if value is None or value.tzinfo is not None else value.replace(tzinfo=UTC)


@dataclass(frozen=True)
class ApiClient:
    """The sender of a request, as its key tells.

    | field | meaning |
    | --- | --- |
    | `tenant` | an opaque name of the client's own, which reveals no key; empty for the clients of an open server |
    | others | as in `KeyEntry` |
    """

    tenant: str
    name: str = UNNAMED
    weight: float = 1.0
    by_user: bool = False
    own_cache: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    max_priority: int | None = None
    admin: bool = False
    expires: datetime | None = None

    def user(self, name: str | None) -> str:
        """An opaque name for one of the client's users, where its key tells them apart; empty otherwise."""
        return _tenant(name.encode("utf-8", "surrogatepass")) if self.by_user and name else ""

    def cache_salt(self, asked: str | None) -> str:
        """The salt of a request's prefixes, from the one that it asks for; empty if all clients share them."""
        parts = [self.tenant if self.own_cache else "", asked or ""]
        return _tenant("\n".join(parts).encode("utf-8", "surrogatepass")) if any(parts) else ""


ANYBODY = ApiClient("", "")  # all clients of an open server


def keyed(key: str) -> ApiClient:
    """The client of a key without a name."""
    return ApiClient(_tenant(key.encode()))


def read_keys(text: str) -> dict[str, ApiClient]:
    """The clients of a key file's `text`, by key. Raises ValueError, with a message that has no key in it, for a text
    that is no key file."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not lines:
        raise ValueError("has no key in it: write one key per line")
    if lines[0].startswith(TABLE):
        return dict(_of_table(text))
    # The lines of a table that is none would be keys that anybody can guess.
    if any(re.search(r"\s", line) for line in lines):
        raise ValueError(f"a line has a space in it: write one key per line, or a table that begins with {TABLE!r}")
    return {line: keyed(line) for line in lines}


def _of_table(text: str) -> Iterator[tuple[str, ApiClient]]:
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" at line {mark.line + 1}"
        raise ValueError(f"is not YAML{where}") from None
    entries = table["keys"]
    if set(table) != {"keys"} or not isinstance(entries, list) or not entries:
        raise ValueError("must be a table with one list, `keys`, of at least one entry")
    names, keys = set(), set()
    for number, given in enumerate(entries, 1):
        entry = _entry(number, given)
        if entry.name in names:
            raise ValueError(f"entry {number}: another client is named {entry.name}, too; list several keys of one")
        names.add(entry.name)
        settings = entry.model_dump(exclude={"key"})
        client = ApiClient(_tenant(b"name " + entry.name.encode()), **settings)
        for secret in [entry.key] if isinstance(entry.key, SecretStr) else entry.key:
            key = secret.get_secret_value()
            if not key or key != key.strip():
                raise ValueError(f"entry {number} ({entry.name}): a key must not be empty, nor begin or end in space")
            if key in keys:
                raise ValueError(f"entry {number} ({entry.name}): its key was there before")
            keys.add(key)
            yield key, client


def _entry(number: int, given: Any) -> KeyEntry:
    if not isinstance(given, dict):
        raise ValueError(f"entry {number} must be a table: key, name, ...")
    name = given.get("name")
    known = f" ({name})" if isinstance(name, str) and re.fullmatch(_NAME, name) else ""
    try:
        return KeyEntry(**given)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_input=False)[0]
        if detail["type"] != "extra_forbidden":
            message = detail["msg"].removeprefix("Value error, ")
            raise ValueError(f"entry {number}{known}: {detail['loc'][0]}: {message[0].lower()}{message[1:]}") from None
    except TypeError:  # a name of a setting that is no text
        pass
    # The name is not shown: it may be a key.
    raise ValueError(f"entry {number}{known}: may have {', '.join(KeyEntry.model_fields)}, and nothing else")


def _tenant(client: bytes) -> str:
    return hashlib.blake2b(client, digest_size=12).hexdigest()
