"""Compiled grammars on disk: found again, shared, bounded, and never trusted when damaged."""

import errno
import fcntl
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from worker.messages import Grammar
from worker.structured_output import GrammarCompiler
from worker.structured_output.compiling import grammar_store
from worker.structured_output.compiling.grammar_store import GrammarStore, identity
from worker.structured_output.json_schema.unique_places import Place
from worker.structured_output.matching.engines import LLGUIDANCE, XGRAMMAR, CompiledText

pytestmark = pytest.mark.slow

EOS = 256
A, B, C = (Grammar("choice", f'["{letter}"]') for letter in "abc")
FOUND = CompiledText(XGRAMMAR, "é" * 500, 0.5, [], [], [])


@pytest.fixture
def made(made: Callable[..., GrammarCompiler], tmp_path: Path) -> Callable[[], GrammarCompiler]:
    """Compilers of replicas that share a folder."""
    return partial(made, folder=tmp_path / "kept")


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def test_what_is_kept_is_found_as_it_was(tmp_path: Path) -> None:
    store = GrammarStore(tmp_path, ["tokens"])
    places = [Place(True, False, 1, {"é": 0}, -1)]
    full = CompiledText(LLGUIDANCE, 'start: "\\u0000 é"', 1.5, places, ["contains at #"], ["format at #/a"])
    assert store.read(A) is None
    store.write(A, full)
    store.write(B, FOUND)
    assert store.read(A) == full and store.read(B) == FOUND
    assert GrammarStore(tmp_path, ["tokens"]).read(A) == full
    assert GrammarStore(tmp_path, ["other tokens"]).read(A) is None
    assert store.read(Grammar(A.kind, A.text, strict=False)) is None
    assert store.read(Grammar(A.kind, A.text, after="</think>")) is None


def test_all_that_a_grammar_depends_on_is_its_identity(tmp_path: Path) -> None:
    def of(text: str = "{}", *rest: Any) -> tuple[str, ...]:
        (tmp_path / "tokenizer.json").write_text(text)
        return identity(tmp_path, *(rest or (257, [256], 10.0, 1 << 30)))

    assert of() == of()
    others = of("{ }"), of("{}", 258, [256], 10.0, 1 << 30), of("{}", 257, [255], 10.0, 1 << 30)
    assert len({of(), *others, of("{}", 257, [256], 5.0, 1 << 30), of("{}", 257, [256], 10.0, 1 << 29)}) == 6


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:40] + b"x" + data[41:]]
)
def test_a_damaged_file_counts_as_none(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    store = GrammarStore(tmp_path, [])
    store.write(A, FOUND)
    (file,) = kept(tmp_path)
    file.write_bytes(damage(file.read_bytes()))
    assert store.read(A) is None
    store.write(A, FOUND)
    assert store.read(A) == FOUND


def test_those_used_last_stay(tmp_path: Path) -> None:
    store = GrammarStore(tmp_path, [], most_bytes=3_000)  # two files of some 1,050 bytes, and a rest
    for number, grammar in enumerate((A, B)):
        store.write(grammar, FOUND)
        os.utime(store._file(grammar), (number, number))
    assert store.read(A) == FOUND  # and is newer than B now
    store.write(C, FOUND)
    assert [store.read(each) for each in (A, B, C)] == [FOUND, None, FOUND]
    assert sum(path.stat().st_size for path in kept(tmp_path)) <= 3_000


def test_there_are_not_too_many_files(tmp_path: Path) -> None:
    store = GrammarStore(tmp_path, [], most_files=2)
    for grammar in (A, B, C):
        store.write(grammar, FOUND)
    assert len(kept(tmp_path)) == 1 and store.read(C) == FOUND


def test_the_folder_is_not_looked_at_for_each_grammar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of thousands of files takes a tenth of a second, which tokens wait for."""
    looks: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looks.append(path) or scandir(path))
    store = GrammarStore(tmp_path, [], most_files=800)
    for number in range(90):
        store.write(Grammar("regex", f"a{{{number}}}"), FOUND)
    assert len(looks) == 1 and len(kept(tmp_path)) == 90
    for number in range(90, 120):
        store.write(Grammar("regex", f"a{{{number}}}"), FOUND)
    assert len(looks) == 2


def test_a_full_disk_is_not_full_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "full")

    store = GrammarStore(tmp_path, [])
    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", half)
        store.write(A, FOUND)
    assert kept(tmp_path) == [] and store.read(A) is None
    store.write(B, FOUND)  # too soon
    assert store.read(B) is None
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + grammar_store._RETRY_S)
    store.write(A, FOUND)
    assert store.read(A) == FOUND


def test_what_a_killed_process_left_half_written_goes(tmp_path: Path) -> None:
    store = GrammarStore(tmp_path, [])
    old, new = tmp_path / "0a.17", tmp_path / "0b.17"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.write(A, FOUND)
    assert not old.exists() and new.exists() and store.read(A) == FOUND


def test_a_folder_that_cannot_be_written_hinders_nothing(
    tmp_path: Path, made: Callable[[], GrammarCompiler], asked: list[str]
) -> None:
    (tmp_path / "kept").write_text("in the way")
    compiler = made()
    assert [compiler.submit(each).result().engine for each in (A, B)] == [XGRAMMAR] * 2
    assert asked == [A.text, B.text]


def test_replicas_compile_a_grammar_once(made: Callable[[], GrammarCompiler], asked: list[str], tmp_path: Path) -> None:
    """Those that want it at once, and those that come later. A damaged one is made again."""
    futures = [made().submit(A) for _ in range(3)]
    assert {future.result().engine for future in futures} == {XGRAMMAR}
    assert asked == [A.text]
    (file,) = kept(tmp_path / "kept")
    file.write_bytes(file.read_bytes()[:100])
    made().submit(A).result()
    assert len(asked) == 2
    made().submit(A).result()
    assert len(asked) == 2


def test_an_end_does_not_wait_for_other_replicas(tmp_path: Path, made: Callable[[], GrammarCompiler]) -> None:
    made().submit(A).result()
    (tmp_path / "kept" / "locks").mkdir(exist_ok=True)
    held = [(tmp_path / "kept" / "locks" / f"{number:02x}").open("wb") for number in range(256)]
    try:
        for each in held:
            fcntl.flock(each, fcntl.LOCK_EX)
        compiler = made()
        assert compiler.submit(A).result().engine == XGRAMMAR  # which needs no lock
        waiting = compiler.submit(B)
        compiler.close()
        assert waiting.exception() is not None
    finally:
        for each in held:
            each.close()
