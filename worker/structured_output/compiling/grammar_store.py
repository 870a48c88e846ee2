"""Compiled grammars on disk, shared by all replicas of a machine and kept beyond their ends.

Loading spares the conversion and the compilation. On one core, for the tokens of SmolLM2 and 142 published schemas:

| engine | median to compile | median to load | text of a grammar |
| --- | --- | --- | --- |
| xgrammar | 28 ms | 0.3 ms | 240 kB |
| llguidance | 136 ms, nearly all of it conversion | 0.1 ms | 10 kB |

What comes after both is the same: the engine reads the text, in 3 and 8 ms.

A file is named by all that its content depends on, so that none is ever out of date. It begins with the digest of the
rest. Refusals are not kept on disk.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from worker.folders import replaced
from worker.messages import Grammar
from worker.structured_output.matching.engines import CompiledText

log = logging.getLogger(__name__)

MAX_BYTES, MAX_FILES = 512 << 20, 4096
_KEPT_SHARE = 0.9  # share of both that eviction leaves, so that it is rare
# Part of the room that is left which a process fills before it looks at the folder again. As many processes may
# write at once without exceeding the limits. A look at 7,600 files takes 0.1 s of the interpreter: tokens wait for it.
_PARTS_OF_ROOM = 8
_DIGEST_BYTES = hashlib.sha256().digest_size
_ASK_EVERY_S = 0.01
_RETRY_S = 60.0  # after the folder could not be written: a disk may be full for a while
_LEFT_S = 3600.0  # after which a file that is half written is one of a process that was killed
_PACKAGES = ("xgrammar", "llguidance", "jsonschema")

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(CompiledText).decode


def identity(
    model_dir: Path, vocab_size: int, end_ids: Sequence[int], cpu_s: float, memory_bytes: int
) -> tuple[str, ...]:
    """All that a compiled grammar depends on but for the grammar: the tokenizer, the versions of the engines, the code
    that makes it, and what a compilation may take. Raises OSError if there is no tokenizer.json."""
    code = hashlib.sha256()
    worker = Path(__file__).parents[2]
    for file in sorted([*(worker / "structured_output").rglob("*.py"), *(worker / "formats").glob("*.py")]):
        code.update(file.read_bytes())
    return (
        hashlib.sha256((model_dir / "tokenizer.json").read_bytes()).hexdigest(),
        str(vocab_size),
        ",".join(map(str, end_ids)),
        *(f"{name} {version(name)}" for name in _PACKAGES),
        f"python {platform.python_version()}",
        code.hexdigest(),
        f"{cpu_s:g} s",
        f"{memory_bytes} bytes",
    )


class GrammarStore:
    """The compiled grammars of a folder. May be used by any threads and processes at once."""

    def __init__(
        self, folder: Path, made_of: Sequence[str], most_bytes: int = MAX_BYTES, most_files: int = MAX_FILES
    ) -> None:
        """`made_of`: as `identity` returns it. The folder, of all identities, may have `most_files` with `most_bytes`
        together; those used last stay."""
        self._folder, self._made_of = folder, tuple(made_of)
        self._most_bytes, self._most_files = most_bytes, most_files
        self._left_bytes = self._left_files = 0  # that may be written before the folder is looked at
        self._again_s = 0.0  # when the folder may be written again

    def read(self, grammar: Grammar) -> CompiledText | None:
        """The compiled grammar, if it is there and whole."""
        file = self._file(grammar)
        try:
            data = file.read_bytes()
            os.utime(file)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s is not used, and the grammar is compiled: %s", file, error)
            return None
        digest, rest = data[:_DIGEST_BYTES], memoryview(data)[_DIGEST_BYTES:]
        if hashlib.sha256(rest).digest() != digest:
            log.warning("%s is damaged, and the grammar is compiled again", file)
            return None
        return _decode(rest)

    def write(self, grammar: Grammar, compiled: CompiledText) -> None:
        """Keeps a compiled grammar, and drops those that were not used for longest if there are too many. Gives up
        for a minute, with a warning, if the folder cannot be written."""
        if time.monotonic() < self._again_s:
            return
        data = _encode(compiled)
        try:
            with replaced(self._file(grammar)) as half:
                half.write_bytes(hashlib.sha256(data).digest() + data)
            self._left_bytes -= _DIGEST_BYTES + len(data)
            self._left_files -= 1
            if min(self._left_bytes, self._left_files) < 0:
                self._evict()
        except OSError as error:
            log.warning("compiled grammars are not kept for %g s: %s", _RETRY_S, error)
            self._again_s = time.monotonic() + _RETRY_S

    @contextlib.contextmanager
    def alone(self, grammar: Grammar, closed: threading.Event) -> Iterator[None]:
        """Keeps other threads and processes from compiling this grammar meanwhile. Waits until they have done so, but
        not after `closed` is set. Without a lock if the folder cannot be written."""
        with contextlib.ExitStack() as held:
            try:
                locks = self._folder / "locks"
                locks.mkdir(parents=True, exist_ok=True)
                # One lock for several grammars, so that there are 256 files at most.
                lock = held.enter_context((locks / self._file(grammar).name[:2]).open("wb"))
                while not _locked(lock.fileno()) and not closed.wait(_ASK_EVERY_S):
                    pass
            except OSError as error:
                log.warning("a grammar is compiled without regard to other replicas: %s", error)
            yield

    def _file(self, grammar: Grammar) -> Path:
        return self._folder / hashlib.sha256(_encode((self._made_of, grammar))).hexdigest()

    def _evict(self) -> None:
        found = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # evicted by another process
                    if not entry.is_file():
                        continue
                    status = entry.stat()
                    if "." in entry.name and status.st_mtime < time.time() - _LEFT_S:
                        Path(entry.path).unlink(missing_ok=True)
                    else:
                        found.append((status.st_mtime_ns, status.st_size, entry.path))
        total, files = sum(size for _, size, _ in found), len(found)
        if total > self._most_bytes or files > self._most_files:
            for _, size, path in sorted(found):
                if total <= self._most_bytes * _KEPT_SHARE and files <= self._most_files * _KEPT_SHARE:
                    break
                Path(path).unlink(missing_ok=True)
                total, files = total - size, files - 1
        self._left_bytes = (self._most_bytes - total) // _PARTS_OF_ROOM
        self._left_files = (self._most_files - files) // _PARTS_OF_ROOM


def _locked(descriptor: int) -> bool:
    """Takes the lock of a file unless another one has it. It is let go when the file is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
