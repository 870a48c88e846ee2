"""Answers that are held at their end until they have been judged."""

from typing import Any

import pytest

from tests.worker.fakes import FakeGrammars
from worker.messages import Generate, Grammar, Output, SamplingParams, SchemaCheck
from worker.structured_output import AnswerChecks, GrammarError
from worker.structured_output.compiling.answer_verdict import AnswerVerdict
from worker.structured_output.matching.state import CompiledGrammar

LOOSE = Grammar("json_schema", "{}", strict=False)
NAMED = ["contains at #", "format at #/a"]


def made(*, grammar: Grammar | None = LOOSE, **fields: Any) -> tuple[AnswerChecks, FakeGrammars, list[int]]:
    grammars, woken = FakeGrammars(), list[int]()
    checks = AnswerChecks(grammars, lambda: woken.append(1))  # type: ignore[arg-type]
    checks.add(
        Generate(request_id="a", prompt_ids=[1], sampling=SamplingParams(max_tokens=9, grammar=grammar), **fields)
    )
    return checks, grammars, woken


def passed(checks: AnswerChecks, *outputs: Output, not_enforced: list[str] = NAMED) -> list[Output]:
    compiled = CompiledGrammar(None, "json_schema", not_enforced=not_enforced)  # type: ignore[arg-type]
    return list(checks.pass_on(outputs, lambda request_id: compiled))


def out(*token_ids: int, finish: Any = None, stop: int | None = None, name: str = "a") -> Output:
    return Output(request_id=name, token_ids=list(token_ids), finish_reason=finish, stop_token_id=stop)


@pytest.mark.parametrize(
    ("verdict", "check"),
    [
        (AnswerVerdict(None), SchemaCheck(NAMED, True)),
        (AnswerVerdict("at #: no", 3), SchemaCheck(NAMED, False, "at #: no", 3)),
        (GrammarError("too much"), SchemaCheck(NAMED, None, "not judged: GrammarError: too much")),
    ],
)
def test_the_last_output_waits_for_the_verdict(verdict: Any, check: SchemaCheck) -> None:
    checks, grammars, woken = made(output_ids=[5], client="c")
    other = out(8, finish="stop", name="other")
    first, second = passed(checks, out(6), other)
    assert first.check == SchemaCheck(NAMED) and second is other
    assert passed(checks, out(7, 2, finish="stop", stop=2), out(9, name="other")) == [out(9, name="other")]
    ((answer, future),) = grammars.answers
    assert grammars.clients == ["c"]
    assert (answer.token_ids, answer.with_formats) == ([5, 6, 7], True)
    assert not checks.has_ready and not woken and len(checks) == 1
    if isinstance(verdict, AnswerVerdict):
        future.set_result(verdict)
    else:
        future.set_exception(verdict)
    assert checks.has_ready and woken
    (last,) = passed(checks)
    assert (last.token_ids, last.finish_reason, last.check) == ([7, 2], "stop", check)
    assert not len(checks)


def test_an_answer_that_is_cut_off_is_not_judged() -> None:
    checks, grammars, _ = made()
    (output,) = passed(checks, out(6, finish="length"))
    assert output.check == SchemaCheck(NAMED) and not grammars.answers and not len(checks)


def test_what_is_enforced_as_a_whole_waits_for_nothing() -> None:
    for fields in ({"grammar": Grammar("json_schema", "{}")}, {"grammar": None}, {}):
        checks, grammars, _ = made(**fields)
        (output,) = passed(checks, out(2, finish="stop", stop=2), not_enforced=[])
        assert output.check is None and not grammars.answers and not len(checks)


def test_a_request_that_ends_meanwhile_is_forgotten() -> None:
    checks, grammars, _ = made()
    assert passed(checks, out(2, finish="stop", stop=2)) == []
    checks.forget("a")
    assert grammars.answers[0][1].cancelled() and passed(checks) == [] and not len(checks)
