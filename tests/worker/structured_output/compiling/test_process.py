"""What the process that compiles grammars says of those that are none, and of its own end."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from worker.niceness import YIELDING_NICE
from worker.structured_output import CompilerUnavailable, GrammarError
from worker.structured_output.compiling import process as module
from worker.structured_output.compiling.answer_verdict import AnswerToCheck, AnswerVerdict
from worker.structured_output.compiling.process import CompilerProcess

VOCAB_SIZE = 257
# In place of `python -m worker.structured_output.compiling`: also compiles Python, to whatever that gives.
COMPILES_PYTHON = """
import os, time
from worker.structured_output.compiling import __main__ as main

class Compilation(main.Compilation):
    def run(self, kind, text, *after, **strict):
        if kind == "python":
            return "xgrammar", str(eval(text)).encode(), [], [], []
        return super().run(kind, text, *after, **strict)

main.Compilation = Compilation
main._main()
"""


@pytest.fixture(scope="module")
def process(folder: Path) -> Iterator[CompilerProcess]:
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        ours = command[1:3] == ["-m", "worker.structured_output.compiling"]
        return popen([sys.executable, "-c", COMPILES_PYTHON, *command[3:]] if ours else command, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.subprocess, "Popen", start)
        made = CompilerProcess(folder, VOCAB_SIZE, [VOCAB_SIZE - 1], memory_bytes=1 << 30)
        yield made
        made.close()


@pytest.mark.parametrize("text", ["root ::=", "x", "é", 'root ::= "a" é', "🦊 ::= é"])
def test_a_grammar_that_is_none_is_the_requests_fault(process: CompilerProcess, text: str) -> None:
    with pytest.raises(GrammarError, match=r"^the grammar does not compile: [^\[]"):
        process.compile("ebnf", text, 20)
    assert process.compile("ebnf", 'root ::= "é🦊"', 20)


def test_a_grammar_of_who_compiles_much_has_a_low_priority_from_the_beginning(process: CompilerProcess) -> None:
    nice = "os.getpriority(os.PRIO_PROCESS, 0)"
    assert process.compile("python", nice, 20).text == str(os.getpriority(os.PRIO_PROCESS, 0))  # of who runs the tests
    assert process.compile("python", nice, 20, yields=True).text == str(YIELDING_NICE)


def test_a_grammar_that_takes_too_much_cpu_time_is_the_requests_fault(process: CompilerProcess) -> None:
    with pytest.raises(GrammarError, match=r"\b0\.01 s\b"):
        process.compile("ebnf", 'root ::= ("a" | "b"){1,100} ("c" | "d"){1,100} [e-z]{1,100}', 0.01)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[0 for _ in iter(int, 1)]", r"\b0\.2 s\b"),
        ("bytearray(8 << 30)", "too much memory"),
        ("os.abort()", "too much memory"),
    ],
)
def test_who_uses_up_its_own_limits_is_at_fault(process: CompilerProcess, text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        process.compile("python", text, 0.2)
    assert process.compile("python", "'it goes on'", 20).text == "it goes on"


def test_what_no_grammar_enforces_is_left_out_and_judged_later(process: CompilerProcess, folder: Path) -> None:
    schema = json.dumps({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 9, "contains": {"const": 2}})
    with pytest.raises(GrammarError, match="contains at #"):
        process.compile("json_schema", schema, 20)
    compiled = process.compile("json_schema", schema, 20, strict=False)
    assert compiled.not_enforced == ["contains at #"] and compiled.text
    with_thinking = process.compile("json_schema", schema, 20, "</think>", strict=False)
    assert with_thinking.not_enforced == ["contains at #"]

    def verdict(judged: str, text: str, after: str | None = None, cpu_s: float = 20) -> AnswerVerdict:
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        return process.check(AnswerToCheck(judged, ids, after, None, False), cpu_s)

    assert verdict(schema, "[1, 2]") == AnswerVerdict(None)
    violation, kept = verdict(schema, "so</think>[1, 1]", "</think>")
    assert "does not contain" in (violation or "") and kept == len("so</think>")
    with pytest.raises(GrammarError, match=r"\b0\.2 s\b"):  # a pattern that has no end
        verdict(json.dumps({"pattern": "^(a+)+$"}), json.dumps("a" * 40 + "b"), cpu_s=0.2)


def test_who_waits_for_the_machine_uses_up_nothing(process: CompilerProcess) -> None:
    """Time passes, as on a machine that is busy with other things."""
    assert process.compile("python", "time.sleep(0.6) or 1", 0.2).text == "1"


def test_who_does_not_get_its_memory_is_not_at_fault(process: CompilerProcess) -> None:
    """As in a container whose limit is below the grammar's."""
    limited = "__import__('resource').setrlimit(2, (400 << 20,) * 2) or bytearray(900 << 20)"  # RLIMIT_DATA
    with pytest.raises(CompilerUnavailable, match="too little memory"):
        process.compile("python", limited, 20)


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_who_is_killed_is_not_at_fault(process: CompilerProcess, signal_: signal.Signals) -> None:
    """As the kernel does when memory runs out."""
    with pytest.raises(CompilerUnavailable, match="was killed"):
        process.compile("python", f"os.kill(os.getpid(), {int(signal_)})", 20)
    assert process.compile("python", "'it goes on'", 20).text == "it goes on"


@pytest.mark.parametrize("whose", ["os.getppid()", "{process}"])
def test_who_loses_the_processes_around_it_is_not_at_fault(process: CompilerProcess, whose: str) -> None:
    process.start()
    with pytest.raises(CompilerUnavailable, match="was killed"):
        process.compile("python", f"os.kill({whose.format(process=process.pid)}, 9) or time.sleep(60)", 20)
    assert process.compile("python", "'it goes on'", 20).text == "it goes on"


def test_who_starves_is_not_at_fault(process: CompilerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_WALL_S", 0.0)
    with pytest.raises(CompilerUnavailable, match="too little time"):
        process.compile("python", "time.sleep(60)", 0.05)
    assert process.compile("python", "'it goes on'", 20).text == "it goes on"


def test_a_process_that_hangs_is_replaced(process: CompilerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MIN_WALL_S", 0.0)
    monkeypatch.setattr(module, "_GRACE_S", 0.2)
    process.start()
    hung = process.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    with pytest.raises(CompilerUnavailable, match="too little time"):
        process.compile("python", "1", 0.01)
    assert process.pid is None  # until the next one


def test_a_process_that_cannot_be_started_is_the_machines_fault(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(module.subprocess, "Popen", fail)
    process = CompilerProcess(folder, VOCAB_SIZE, [VOCAB_SIZE - 1], memory_bytes=1 << 30)
    with pytest.raises(CompilerUnavailable, match="temporarily unavailable"):
        process.compile("ebnf", 'root ::= "a"', 20)
