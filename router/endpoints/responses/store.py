"""The responses that clients may ask for again, in an SQLite file that the routers of a machine share.

A response is seen by the tenant that made it and by no other. Where all take more than their bytes, the tenant with the
most of them loses those that it used least recently; so what one tenant stores costs no other what is below its share.
What was not used for the store's age is forgotten too.

What runs in the background has a heart: its router beats it, and a response whose heart has stopped has failed. Beats
are by the machine's monotonic clock, which all of its processes share and no command sets. Running responses stay.

| table | what is in it |
| --- | --- |
| `responses` | what followers, beats and chains need, in small rows: no more is read or written for them |
| `bodies` | the response without its output, its output, and the items that it was asked with, as JSON |
| `items` | digests of the ids of items, for references to them |
| `events` | events of streams in the background, by the response's number and their own |
| `tenants` | the sums of bytes, which triggers keep |
"""

import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import msgspec

from router.wire.responses_objects import ENDED, OutputItem, ResponseError, ResponseObject, Status

log = logging.getLogger(__name__)

FILE = "responses-2.sqlite3"  # the number is the layout's
BEFORE = "responses-1.sqlite3"
BUSY_S = 10.0
RETRY_S = 0.05
STALE_S = 30.0  # without a beat
HANDOVER_S = 60.0  # after the last write to a file of the layout before, until it is taken over
LOST = ResponseError("server_error", "The router that made this response has ended before it was complete.")
EVENTS_BYTES = 1 << 20  # of events that are read at once, or one event
MAX_EXPIRED_RESPONSES = 64  # responses that one change forgets for their age
RUNNING_SHARE = 2  # the running responses of a tenant may take all bytes by this number

# What rows take on the disk besides their contents, with their indexes and with pages that are not full.
PAGE_BYTES = 4096
ROW_BYTES = 400
ITEM_BYTES = 64
EVENT_BYTES = 16

_TABLES = """
PRAGMA auto_vacuum = FULL;
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA journal_size_limit = 8388608;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, previous TEXT,
    status TEXT NOT NULL, bytes INTEGER NOT NULL, item_bytes INTEGER NOT NULL, event_bytes INTEGER NOT NULL,
    used_s REAL NOT NULL, boot TEXT NOT NULL, beat_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS used ON responses (tenant, used_s);
CREATE INDEX IF NOT EXISTS ages ON responses (used_s);
CREATE INDEX IF NOT EXISTS runs ON responses (tenant, bytes) WHERE status IN ('queued', 'in_progress');
CREATE TABLE IF NOT EXISTS bodies (
    response INTEGER PRIMARY KEY, head BLOB NOT NULL, output BLOB NOT NULL, input BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
    name INTEGER NOT NULL, response INTEGER NOT NULL, PRIMARY KEY (name, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS owners ON items (response);
CREATE TABLE IF NOT EXISTS events (place INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tenants (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS put AFTER INSERT ON responses BEGIN
    INSERT INTO tenants (tenant, bytes) VALUES (new.tenant, new.bytes)
    ON CONFLICT (tenant) DO UPDATE SET bytes = bytes + new.bytes;
END;
CREATE TRIGGER IF NOT EXISTS changed AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE tenants SET bytes = bytes + new.bytes - old.bytes WHERE tenant = new.tenant;
END;
CREATE TRIGGER IF NOT EXISTS forgotten AFTER DELETE ON responses BEGIN
    UPDATE tenants SET bytes = bytes - old.bytes WHERE tenant = old.tenant;
    DELETE FROM tenants WHERE tenant = old.tenant AND bytes = 0;
END;
"""
RUNNING = ("queued", "in_progress")
_RUNS = "status IN ('queued', 'in_progress')"
_LIVES = f"({_RUNS} AND boot = ? AND beat_s >= ?)"
_LOST = "lost"  # the status of one whose heart has stopped

Item = dict[str, Any]
_encode = msgspec.json.encode
_decode = msgspec.json.decode


class StoreFull(Exception):
    """The responses that a tenant runs take all that they may."""


class TooLarge(Exception):
    """More bytes were asked for than the caller takes."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the items that it was asked with, without those of the responses before it."""

    response: ResponseObject
    input: list[Item]

    @property
    def has_ended(self) -> bool:
        return self.response.status in ENDED

    @property
    def ids(self) -> list[str]:
        """The ids of the items that were asked and answered."""
        return [*(item["id"] for item in self.input), *(item.id for item in self.response.output)]


@dataclass(frozen=True)
class Chain:
    """Responses of which each continues the one before, the first first. `items`: what was asked and answered, with
    `num_bytes` of JSON. `status`: of the last."""

    ids: list[str]
    items: list[Item]
    num_bytes: int
    status: str


@dataclass(frozen=True)
class Position:
    """Where a response is. `last`: the number of the last event that is kept, -1 without any."""

    status: str
    last: int

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


@dataclass(frozen=True)
class _Row:
    number: int
    previous: str | None
    status: Status  # `_LOST` is failed
    is_lost: bool
    item_bytes: int
    bodies: list[bytes]


class ResponseStore:
    """The file, by a connection of its own. To be used by one thread at a time. Reading and writing raise sqlite3.Error
    when the disk fails."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        age_s: float,
        clock: Callable[[], float] = time.time,
        beats: Callable[[], float] = time.monotonic,
        boot: str | None = None,
    ) -> None:
        """`clock`: the time of day, for ages. `beats`: a clock that all processes of the machine share since it was
        started, and no command sets. `boot`: which start of which machine that is; by default the kernel's name."""
        self._max_bytes = max_bytes
        self._age_s = age_s
        self._clock = clock
        self._beats = beats
        self._boot = _boot_id() if boot is None else boot
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / FILE
        # Conversations are not for other users. A file that is there is not opened: with its descriptor, all locks
        # that SQLite has on the file for this process would go, and who closes it elsewhere would take the log away.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        self._lay_out()
        self._take_over(folder / BEFORE)

    def close(self) -> None:
        self._database.close()

    # ------------------------------------------------ writing

    def put(self, tenant: str, stored: StoredResponse, new: bool = True) -> None:
        """Keeps a response, or, if it is not `new`, its new state: one that has ended or was forgotten stays so.
        Forgets what is too old or too much. Raises StoreFull for one that is to run."""
        response = stored.response
        head = _encode(msgspec.structs.replace(response, output=[]))
        output, asked = _encode(response.output), _encode(stored.input)
        names = {_name(tenant, name) for name in stored.ids}
        item_bytes = len(output) + len(asked)
        size = ROW_BYTES + _on_disk(len(head) + item_bytes) + ITEM_BYTES * len(names)
        with self._writing():
            found = self._one("SELECT number, status, event_bytes FROM responses WHERE id = ?", response.id)
            if not new and (found is None or found[1] not in RUNNING):
                return
            now, beat_s = self._clock(), self._beats()
            if found is None:
                number = self._database.execute(
                    "INSERT INTO responses (id, tenant, previous, status, bytes, item_bytes, event_bytes, used_s, "
                    "boot, beat_s) VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?)",
                    (
                        response.id, tenant, response.previous_response_id, response.status, size, item_bytes,
                        now, self._boot, beat_s,
                    ),
                ).lastrowid  # fmt: skip
                assert number is not None
            else:
                number, _, event_bytes = found
                size += event_bytes
                self._forget_body(number)
                self._database.execute(
                    "UPDATE responses SET status = ?, bytes = ?, item_bytes = ?, used_s = ?, boot = ?, beat_s = ? "
                    "WHERE number = ?",
                    (response.status, size, item_bytes, now, self._boot, beat_s, number),
                )
            self._database.execute("INSERT INTO bodies VALUES (?, ?, ?, ?)", (number, head, output, asked))
            self._database.executemany("INSERT INTO items VALUES (?, ?)", [(name, number) for name in names])
            if not stored.has_ended:
                self._check_room(tenant)
            elif size > self._max_bytes:
                self._forget([number])
            self._trim()

    def beat(self, response_id: str, status: str, events: Sequence[tuple[int, bytes]] = ()) -> bool:
        """Says that a response is still being made, and keeps new events, each with its number. Returns False where it
        has ended or was forgotten meanwhile: the caller is to stop. Raises StoreFull."""
        size = sum(_on_disk(len(data) + EVENT_BYTES) for _, data in events)
        with self._writing():
            found = self._one(f"SELECT number, tenant FROM responses WHERE id = ? AND {_RUNS}", response_id)
            if found is None:
                return False
            number, tenant = found
            self._database.execute(
                "UPDATE responses SET boot = ?, beat_s = ?, status = ?, bytes = bytes + ?, "
                "event_bytes = event_bytes + ? WHERE number = ?",
                (self._boot, self._beats(), status, size, size, number),
            )
            self._database.executemany(
                "INSERT OR IGNORE INTO events VALUES (?, ?)",
                [(_place(number, place), data) for place, data in events],
            )
            if size:
                self._check_room(tenant)
                self._trim()
        return True

    def cancel(self, tenant: str, response_id: str) -> None:
        """Ends a response that runs: its router stops with the next beat."""
        self._database.execute(
            f"UPDATE responses SET status = 'cancelled' WHERE id = ? AND tenant = ? AND {_RUNS}", (response_id, tenant)
        )

    def touch(self, ids: Sequence[str]) -> None:
        """Says that responses were used."""
        now = self._clock()
        with self._writing():
            self._database.executemany("UPDATE responses SET used_s = ? WHERE id = ?", [(now, name) for name in ids])

    def delete(self, tenant: str, response_id: str) -> bool:
        """Forgets a response. Returns whether it was there."""
        if not response_id.isascii():
            return False
        with self._writing():
            found = self._one("SELECT number FROM responses WHERE id = ? AND tenant = ?", response_id, tenant)
            if found is None:
                return False
            self._forget(found)
        return True

    # ------------------------------------------------ reading

    def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response of the tenant, or None. One whose router has ended is found as failed."""
        response = self.response(tenant, response_id)
        return None if response is None else StoredResponse(response, self.input(tenant, response_id) or [])

    def response(self, tenant: str, response_id: str) -> ResponseObject | None:
        """As `get`, without the items that it was asked with."""
        row = self._find(tenant, response_id, "head", "output")
        if row is None:
            return None
        head, output = row.bodies
        response = _decode(head, type=ResponseObject)
        response.output = _decode(output, type=list[OutputItem])
        response.status = row.status
        if row.is_lost:
            response.error = LOST
        return response

    def input(self, tenant: str, response_id: str) -> list[Item] | None:
        """The items that a response was asked with."""
        row = self._find(tenant, response_id, "input")
        return None if row is None else _decode(row.bodies[0], type=list[Item])

    def position(self, tenant: str, response_id: str) -> Position | None:
        """Where a response is. Costs the same, however long it is."""
        row = self._find(tenant, response_id)
        if row is None:
            return None
        first, end = _place(row.number, 0), _place(row.number + 1, 0)
        (place,) = self._one("SELECT max(place) FROM events WHERE place >= ? AND place < ?", first, end)
        return Position(row.status, -1 if place is None else place - first)

    def events(self, response_id: str, after: int, limit: int) -> list[tuple[int, bytes]]:
        """The next events of a response after one's number: at most `limit`, and of at most EVENTS_BYTES together, but
        one where there is one."""
        found = self._one("SELECT number FROM responses WHERE id = ?", response_id)
        if found is None:
            return []
        first, end = _place(found[0], 0), _place(found[0] + 1, 0)
        query = "SELECT place, data FROM events WHERE place > ? AND place < ? ORDER BY place LIMIT ?"
        events: list[tuple[int, bytes]] = []
        size = 0
        with contextlib.closing(self._database.execute(query, (first + after, end, limit))) as rows:
            for place, data in rows:
                events.append((place - first, data))
                size += len(data)
                if size >= EVENTS_BYTES:
                    break
        return events

    def chain(self, tenant: str, response_id: str, max_bytes: int) -> Chain | None:
        """The responses that led to this one, and it. None where one of them is not there. Raises TooLarge."""
        rows: list[_Row] = []
        ids: list[str] = []
        size = 0
        following: str | None = response_id
        while following is not None:
            row = self._find(tenant, following)
            if row is None:
                return None
            ids.append(following)
            rows.append(row)
            size += row.item_bytes
            following = row.previous
        if size > max_bytes:
            raise TooLarge(size)
        bodies = [self._body(row.number) for row in reversed(rows)]
        items = [item for body in bodies if body is not None for item in _items(body)]
        # One may have been forgotten just now.
        return None if None in bodies else Chain(ids[::-1], items, size, rows[0].status)

    def items(self, tenant: str, ids: Sequence[str], max_bytes: int) -> dict[str, Item]:
        """The tenant's items by their ids, as far as they are there. Raises TooLarge for more bytes of the responses
        that they are part of."""
        wanted = {name for name in ids if name.isascii()}
        looked: set[str] = set()
        found: dict[str, Item] = {}
        size = 0
        for name in wanted:
            if name in found:
                continue
            query = "SELECT id FROM items JOIN responses ON number = response WHERE name = ? AND tenant = ?"
            for (owner,) in self._database.execute(query, (_name(tenant, name), tenant)).fetchall():
                row = None if owner in looked else self._find(tenant, owner)
                body = None if row is None else self._body(row.number)
                if row is None or body is None:
                    continue
                looked.add(owner)
                size += row.item_bytes
                if size > max_bytes:
                    raise TooLarge(size)
                found |= {item["id"]: item for item in _items(body) if item["id"] in wanted}
        return found

    # ------------------------------------------------ rows

    def _find(self, tenant: str, response_id: str, *bodies: str) -> _Row | None:
        """A response of the tenant that is not too old, with columns of `bodies`. One that runs without a beat is
        marked as lost."""
        if not response_id.isascii():  # ids are; and a lone surrogate is no text for SQLite
            return None
        columns = ", ".join(["number, previous, status, item_bytes, used_s, boot, beat_s", *bodies])
        join = "JOIN bodies ON response = number" if bodies else ""
        found = self._one(f"SELECT {columns} FROM responses {join} WHERE id = ? AND tenant = ?", response_id, tenant)
        if found is None:
            return None
        number, previous, status, item_bytes, used_s, boot, beat_s, *contents = found
        if status in RUNNING:
            if boot == self._boot and beat_s >= self._beats() - STALE_S:
                return _Row(number, previous, status, False, item_bytes, contents)
            marked = self._database.execute(
                f"UPDATE responses SET status = ? WHERE number = ? AND {_RUNS} AND boot = ? AND beat_s = ?",
                (_LOST, number, boot, beat_s),
            )
            if not marked.rowcount:  # something has happened to it just now
                return self._find(tenant, response_id, *bodies)
            status = _LOST
        if used_s < self._clock() - self._age_s:
            return None
        is_lost = status == _LOST
        return _Row(number, previous, "failed" if is_lost else status, is_lost, item_bytes, contents)

    def _body(self, number: int) -> tuple[bytes, bytes] | None:
        found: tuple[bytes, bytes] | None = self._one("SELECT input, output FROM bodies WHERE response = ?", number)
        return found

    @property
    def _living(self) -> tuple[str, float]:
        """The values of `_LIVES`."""
        return self._boot, self._beats() - STALE_S

    def _check_room(self, tenant: str) -> None:
        """Raises StoreFull where what a tenant runs takes more than it may: nothing of it can be forgotten."""
        query = f"SELECT coalesce(sum(bytes), 0) FROM responses WHERE tenant = ? AND {_LIVES}"
        (running,) = self._one(query, tenant, *self._living)
        if running > self._max_bytes // RUNNING_SHARE:
            raise StoreFull

    def _trim(self) -> None:
        """Forgets what is too old, and of the tenants with the most bytes what they used least recently."""
        lives = self._living
        query = f"SELECT number FROM responses WHERE used_s < ? AND NOT {_LIVES} ORDER BY used_s LIMIT ?"
        old = self._database.execute(query, (self._clock() - self._age_s, *lives, MAX_EXPIRED_RESPONSES)).fetchall()
        self._forget([number for (number,) in old])
        (total,) = self._one("SELECT coalesce(sum(bytes), 0) FROM tenants")
        if total <= self._max_bytes:
            return
        held = [(-size, tenant) for tenant, size in self._database.execute("SELECT tenant, bytes FROM tenants")]
        share = self._max_bytes // len(held)
        heapify(held)
        query = f"SELECT number, bytes FROM responses WHERE tenant = ? AND NOT {_LIVES} ORDER BY used_s LIMIT 1"
        # Below its share, a tenant does not pay for what others run.
        while total > self._max_bytes and held and -held[0][0] > share:
            size, tenant = heappop(held)
            oldest = self._one(query, tenant, *lives)
            if oldest is not None:
                self._forget(oldest[:1])
                total -= oldest[1]
                heappush(held, (size + oldest[1], tenant))

    def _forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._forget_body(number)
            places = (_place(number, 0), _place(number + 1, 0))
            self._database.execute("DELETE FROM events WHERE place >= ? AND place < ?", places)
            self._database.execute("DELETE FROM responses WHERE number = ?", (number,))

    def _forget_body(self, number: int) -> None:
        self._database.execute("DELETE FROM items WHERE response = ?", (number,))
        self._database.execute("DELETE FROM bodies WHERE response = ?", (number,))

    def _one(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()

    # ------------------------------------------------ the file

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

    def _take_over(self, before: Path) -> None:
        """Moves responses that have ended here from the file of the layout before. Other routers may do it too. The
        file stays where it cannot be read or copied now, and while a router of the version before may write to it."""
        if not before.exists() or self._clock() - _written_s(before) < HANDOVER_S:
            return
        try:
            with contextlib.closing(sqlite3.connect(before)) as file:
                query = "SELECT tenant, status, response, input, used_s FROM responses ORDER BY used_s"
                for tenant, status, response, asked, used_s in file.execute(query):
                    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                        stored = StoredResponse(_decode(response, type=ResponseObject), _decode(asked, type=list[Item]))
                        stored.response.status = status
                        if stored.has_ended and not self._one(
                            "SELECT 1 FROM responses WHERE id = ?", stored.response.id
                        ):
                            self.put(tenant, stored)
                            self._database.execute(
                                "UPDATE responses SET used_s = ? WHERE id = ?", (used_s, stored.response.id)
                            )
        except sqlite3.Error:
            log.exception("the stored responses of the version before, in %s, cannot be taken over now", before)
            return
        for end in ("", "-wal", "-shm"):
            before.with_name(before.name + end).unlink(missing_ok=True)

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


def _written_s(path: Path) -> float:
    """When a database or its log was written last, by the time of day."""
    files = (path, path.with_name(path.name + "-wal"))
    return max(file.stat().st_mtime for file in files if file.exists())


def _boot_id() -> str:
    """The kernel's name for this start of this machine, the same in all of its containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _items(body: tuple[bytes, bytes]) -> list[Item]:
    """The items of a response that the next one begins with: what was asked, and what was answered."""
    return [item for part in body for item in _decode(part, type=list[Item])]


def _name(tenant: str, item_id: str) -> int:
    """A digest of an item's id. Two that are the same cost a look into one response more."""
    text = f"{len(tenant)}:{tenant}{item_id}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), signed=True)


def _place(number: int, event: int) -> int:
    """Where an event of a response is among all events."""
    return (number << 32) + event


def _on_disk(size: int) -> int:
    """About the bytes that a row of `size` bytes takes in pages that hold only its like."""
    return PAGE_BYTES // (PAGE_BYTES // size) if size <= PAGE_BYTES else -(-size // PAGE_BYTES) * PAGE_BYTES
