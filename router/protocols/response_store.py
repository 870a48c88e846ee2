"""The responses that clients may ask for again, in an SQLite file that the routers of a machine share.

A response is seen by the tenant that made it and by no other. Those that were used least recently are forgotten where
all take more than their bytes, or where they have reached their age. What runs in the background has a heart: its
router beats it, and a response whose heart has stopped has failed.
"""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from router.protocols.responses_objects import ENDED, ResponseError, ResponseObject

FILE = "responses-1.sqlite3"  # the number is the layout's
BUSY_S = 10.0
RETRY_S = 0.05
STALE_S = 30.0  # without a beat
LOST = ResponseError("server_error", "The router that made this response has ended before it was complete.")

_TABLES = """
PRAGMA auto_vacuum = FULL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, previous TEXT, status TEXT NOT NULL, response BLOB NOT NULL,
    input BLOB NOT NULL, bytes INTEGER NOT NULL, used_s REAL NOT NULL, beat_s REAL NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS used ON responses (used_s, bytes);
CREATE TABLE IF NOT EXISTS items (
    tenant TEXT NOT NULL, id TEXT NOT NULL, response TEXT NOT NULL, PRIMARY KEY (tenant, id)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners ON items (response);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (response, number)
) WITHOUT ROWID;
"""
_RUNS = "status IN ('queued', 'in_progress')"

Item = dict[str, Any]
_encode = msgspec.json.encode
_decode = msgspec.json.decode


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the items that it was asked with, without those of the responses before it."""

    response: ResponseObject
    input: list[Item]

    @property
    def has_ended(self) -> bool:
        return self.response.status in ENDED

    @property
    def items(self) -> list[Item]:
        """The items that the next response begins with: what was asked, and what was answered."""
        output: list[Item] = [msgspec.to_builtins(item) for item in self.response.output]
        return [*self.input, *output]


class ResponseStore:
    """The file. To be used by one thread at a time. Reading and writing raise sqlite3.Error when the disk fails."""

    def __init__(self, folder: Path, max_bytes: int, age_s: float, clock: Callable[[], float] = time.time) -> None:
        self._max_bytes = max_bytes
        self._age_s = age_s
        self._clock = clock
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / FILE
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))  # conversations are not for other users
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._lay_out()

    def close(self) -> None:
        self._database.close()

    def put(self, tenant: str, stored: StoredResponse, new: bool = True) -> None:
        """Keeps a response, or, if it is not `new`, its new state: one that has ended or was forgotten stays so.
        Forgets what is too old or too much."""
        response, now = stored.response, self._clock()
        body, asked = _encode(response), _encode(stored.input)
        row = (response.previous_response_id, response.status, body, asked, len(body) + len(asked), now, now)
        with self._writing():
            found = self._row("SELECT status FROM responses WHERE id = ?", response.id)
            if not new and (found is None or found[0] in ENDED):
                return
            self._database.execute(
                "INSERT INTO responses (previous, status, response, input, bytes, used_s, beat_s, id, tenant) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET previous = excluded.previous, "
                "status = excluded.status, response = excluded.response, input = excluded.input, "
                "bytes = excluded.bytes + (SELECT coalesce(sum(length(data)), 0) FROM events WHERE response = id), "
                "used_s = excluded.used_s, beat_s = excluded.beat_s",
                (*row, response.id, tenant),
            )
            self._database.executemany(
                "INSERT OR REPLACE INTO items (tenant, id, response) VALUES (?, ?, ?)",
                [(tenant, item["id"], response.id) for item in stored.items],
            )
            self._trim(now)

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant, or None. One whose router has ended is found as failed."""
        if not response_id.isascii():  # ids are; and a lone surrogate is no text for SQLite
            return None
        query = "SELECT response, input, status, beat_s, used_s FROM responses WHERE id = ? AND tenant = ?"
        found = self._row(query, response_id, tenant)
        now = self._clock()
        if found is None or found[4] < now - self._age_s:
            return None
        stored = StoredResponse(_decode(found[0], type=ResponseObject), _decode(found[1]))
        stored.response.status = found[2]
        if not stored.has_ended and found[3] < now - STALE_S:
            stored.response.status, stored.response.error = "failed", LOST
            self.put(tenant, stored, new=False)
        return stored

    def chain(self, tenant: str, response_id: str) -> list[StoredResponse] | None:
        """The responses that led to this one, and it, the first first. None where one of them is not there."""
        found: list[StoredResponse] = []
        following: str | None = response_id
        while following is not None:
            stored = self.get(tenant, following)
            if stored is None:
                return None
            found.append(stored)
            following = stored.response.previous_response_id
        now = self._clock()
        with self._writing():
            self._database.executemany(
                "UPDATE responses SET used_s = ? WHERE id = ?", [(now, stored.response.id) for stored in found]
            )
        return found[::-1]

    def items(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        """The tenant's items by their ids, as far as they are there."""
        found: dict[str, Item] = {}
        for name in ids:
            if name in found or not name.isascii():
                continue
            row = self._row("SELECT response FROM items WHERE tenant = ? AND id = ?", tenant, name)
            stored = None if row is None else self.get(tenant, row[0])
            if stored is not None:
                found |= {item["id"]: item for item in stored.items}
        return found

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response. Returns whether it was there."""
        if not response_id.isascii():
            return False
        with self._writing():
            if self._row("SELECT 1 FROM responses WHERE id = ? AND tenant = ?", response_id, tenant) is None:
                return False
            self._forget([response_id])
        return True

    def beat(self, response_id: str, status: str, events: Sequence[tuple[int, bytes]] = ()) -> bool:
        """Says that a response is still being made, and keeps new events, each with its number. Returns False where it
        has ended or was forgotten meanwhile: the caller is to stop."""
        size = sum(len(data) for _, data in events)
        with self._writing():
            changed = self._database.execute(
                f"UPDATE responses SET beat_s = ?, status = ?, bytes = bytes + ? WHERE id = ? AND {_RUNS}",
                (self._clock(), status, size, response_id),
            )
            if not changed.rowcount:
                return False
            self._database.executemany(
                "INSERT OR IGNORE INTO events (response, number, data) VALUES (?, ?, ?)",
                [(response_id, number, data) for number, data in events],
            )
            if size:
                self._trim(self._clock())
        return True

    def events(self, response_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """The next events of a response after one's number."""
        query = "SELECT number, data FROM events WHERE response = ? AND number > ? ORDER BY number LIMIT ?"
        return self._database.execute(query, (response_id, after, limit)).fetchall()

    def _lay_out(self) -> None:
        """Makes the tables. Tried again while another router makes them: SQLite does not wait for a change of mode."""
        for _ in range(int(BUSY_S / RETRY_S)):
            try:
                self._database.executescript(_TABLES)
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode not in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                    raise
                time.sleep(RETRY_S)
        self._database.executescript(_TABLES)

    def _trim(self, now: float) -> None:
        old = self._database.execute("SELECT id FROM responses WHERE used_s < ?", (now - self._age_s,)).fetchall()
        self._forget([name for (name,) in old])
        (total,) = self._row("SELECT coalesce(sum(bytes), 0) FROM responses") or (0,)
        over = total - self._max_bytes
        while over > 0:
            oldest = self._row("SELECT id, bytes FROM responses ORDER BY used_s LIMIT 1")
            assert oldest is not None
            self._forget([oldest[0]])
            over -= oldest[1]

    def _forget(self, ids: Sequence[str]) -> None:
        names = [(name,) for name in ids]
        self._database.executemany("DELETE FROM items WHERE response = ?", names)
        self._database.executemany("DELETE FROM events WHERE response = ?", names)
        self._database.executemany("DELETE FROM responses WHERE id = ?", names)

    def _row(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """A transaction. Other routers wait for its end."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")
