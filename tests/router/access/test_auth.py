"""Keys of clients: which are accepted, and when the key file is read again."""

import asyncio
import hashlib
import logging
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from router.access.auth import AUDIT_S, DIGEST_CHARS, LOOK_EVERY_S, MAX_AUDIT_LINES, Keys, client_of
from router.access.key_file import ANYBODY, ApiClient
from router.config import RouterConfig
from router.metrics.metrics import Metrics
from router.wire.errors import ApiError


class Door:
    """Keys with a clock of their own."""

    def __init__(self, file: Path, **settings: Any) -> None:
        self.file, self.metrics = file, Metrics()
        self.at_s, self.now = 0.0, datetime(2026, 1, 1, tzinfo=UTC)
        config = RouterConfig(api_key_file=file, **settings)
        self.keys = Keys(config, self.metrics, clock=lambda: self.at_s, now=lambda: self.now)

    def write(self, text: str) -> None:
        """Replaces the file, as Kubernetes and most editors do, and lets time pass."""
        new = self.file.with_name("new")
        new.write_text(text)
        os.replace(new, self.file)
        self.at_s += LOOK_EVERY_S

    def client(self, key: str) -> ApiClient | str:
        """The client of a key, or why it is refused."""
        headers = [(b"authorization", f"Bearer {key}".encode())]
        request = Request({"type": "http", "path": "/v1/chat\n", "client": ("192.0.2.7", 1), "headers": headers})
        try:
            asyncio.run(self.keys.check(request))
        except ApiError as error:
            return f"{error.status} {error.code}: {error.message}"
        return client_of(request)

    def accepts(self, *keys: str) -> list[bool]:
        return [isinstance(self.client(key), ApiClient) for key in keys]


@pytest.fixture
def door(tmp_path: Path) -> Door:
    (tmp_path / "keys").write_text("one\ntwo\n")
    return Door(tmp_path / "keys", api_key="own")


def test_a_server_without_keys_is_open() -> None:
    keys, request = Keys(RouterConfig()), Request({"type": "http", "headers": []})
    asyncio.run(keys.check(request))
    assert not keys and client_of(request) is ANYBODY and keys.tenant(request) == ""


def test_keys_may_change_while_the_server_runs(door: Door) -> None:
    assert door.accepts("own", "one", "two", "three") == [True, True, True, False]
    before = door.client("two")
    door.write("two\nthree\n")
    assert door.accepts("own", "one", "two", "three") == [True, False, True, True]
    assert door.client("two") == before
    door.write("keys: [{name: batch, key: four, max_priority: -3}]")
    client = door.client("four")
    assert isinstance(client, ApiClient) and (client.name, client.max_priority) == ("batch", -3)
    assert door.accepts("own", "two") == [True, False] and door.keys.highest_priority == -3
    assert b"shoal_api_keys 2.0" in door.metrics.page()


def test_the_file_is_looked_at_once_a_second(door: Door) -> None:
    assert door.accepts("one") == [True]
    door.write("three\n")
    door.at_s -= LOOK_EVERY_S / 2
    assert door.accepts("one", "three") == [True, False]
    door.at_s += LOOK_EVERY_S
    assert door.accepts("one", "three") == [False, True]


@pytest.mark.parametrize("wrong", ["", "keys: [", "a b", "keys: [{name: a, key: sk, weigth: 2}]", None])
def test_a_wrong_new_file_changes_nothing_and_is_told_once(
    door: Door, wrong: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    if wrong is None:
        door.file.unlink()
        door.at_s += LOOK_EVERY_S
    else:
        door.write(wrong)
    for _ in range(3):
        door.at_s += LOOK_EVERY_S
        assert door.accepts("own", "one", "two") == [True, True, True]
    assert len(caplog.records) == 1 and str(door.file) in caplog.text
    assert b"shoal_key_file_errors_total 1.0" in door.metrics.page()
    door.write("three\n")
    assert door.accepts("one", "three") == [False, True]


def test_a_key_ends_when_it_expires(door: Door) -> None:
    door.write("keys: [{name: a, key: one, expires: 2026-01-01T00:00:01}]")
    assert door.accepts("one") == [True]
    door.now += timedelta(seconds=1)
    refusal = door.client("one")
    assert isinstance(refusal, str) and refusal.startswith("401 invalid_api_key: ") and "expired" in refusal


def test_who_tries_keys_is_told_to_the_log_and_the_keys_are_not(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    door.write("keys: [{name: batch, key: sk-old, expires: 2020-01-01}]")
    door.client("sk-old")
    for number in range(50):
        door.client(f"sk-guess-{number}")
        door.client("own")
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == MAX_AUDIT_LINES and "batch" in lines[0]
    assert hashlib.sha256(b"sk-guess-0").hexdigest()[:DIGEST_CHARS] in lines[1]
    assert all("/v1/chat\\n" in line and "192.0.2.7" in line for line in lines)  # what a client sends breaks no line
    door.at_s += AUDIT_S
    door.client("sk-late")
    line = caplog.records[-1].getMessage()
    assert " 41 " in line and hashlib.sha256(b"sk-late").hexdigest()[:DIGEST_CHARS] in line
    assert not any(secret in caplog.text for secret in ("sk-guess", "sk-old", "sk-late"))


def test_an_empty_key_does_not_open_the_server(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="empty"):
        Keys(RouterConfig(api_key=""))  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        Keys(RouterConfig(api_key_file=tmp_path / "none"))
