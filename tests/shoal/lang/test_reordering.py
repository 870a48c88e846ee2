"""A model's proposal for the order of a program's first texts: shown, and used only if it is accepted."""

import pytest

import shoal
from tests.shoal.lang.scripted import ScriptedBackend, texts_of

RULES = "These rules are the same for all requests, and they are long enough to be worth a prefix of their own.\n"


@shoal.function
def judge(s, essay):
    s += f"The essay: {essay}\n"
    s += RULES
    s += "Grade:" + shoal.gen("grade")
    return s["grade"]


def test_a_proposal_is_shown_and_accepted():
    program = judge.compile()
    backend = ScriptedBackend(lambda call: "The order: 2, 1.")
    proposed = program.propose_order(backend)
    assert str(proposed) == (
        "as written:\n"
        "  1  'The essay: {essay}\\n'\n"
        f"  2  {RULES!r}\n"
        "proposed:\n"
        f"  2  {RULES!r}\n"
        "  1  'The essay: {essay}\\n'"
    )
    (asked,) = backend.calls
    assert "Part 1:\nThe essay: {essay}\n" in asked.text and f"Part 2:\n{RULES}" in asked.text
    backend = ScriptedBackend(lambda call: "B")
    accepted = proposed.accept()
    for run in (accepted, accepted.bind(essay="x")):
        state = run.run(**({} if run.bound else {"essay": "x"}), backend=backend)
        assert state.ret_value == "B" and state.text() == f"{RULES}The essay: x\nGrade:B"
    program.run("x", backend=backend)  # the program itself is as it was
    assert texts_of(backend)[-1] == f"The essay: x\n{RULES}Grade:"


def test_the_written_order_may_be_best():
    proposed = judge.compile().propose_order(ScriptedBackend(lambda call: "1,2"))
    assert str(proposed).endswith("proposed: as written") and proposed.accept().graph.prefix() == "The essay: "


@pytest.mark.parametrize("answer", ["", "I would rather not", "1", "1, 2, 3", "2, 2"])
def test_an_answer_that_is_no_order_is_refused(answer):
    with pytest.raises(shoal.ProgramError, match="2 parts"):
        judge.compile().propose_order(ScriptedBackend(lambda call: answer))


def test_one_text_has_no_order():
    @shoal.function
    def short(s, question):
        s += "Question: " + question + shoal.gen("answer")

    backend = ScriptedBackend()
    with pytest.raises(ValueError, match="another order"):
        short.compile().propose_order(backend)
    assert backend.calls == []


def test_an_order_is_that_of_the_program_with_its_arguments():
    @shoal.function
    def many(s, n, topic):
        for i in range(n):
            s += f"Text {i} on {topic}.\n"
        s += shoal.gen("answer")

    three = many.bind(n=3).compile()
    accepted = three.propose_order(ScriptedBackend(lambda call: "3 1 2")).accept()
    assert accepted.run(topic="x", backend=ScriptedBackend(lambda call: "")).text() == (
        "Text 2 on x.\nText 0 on x.\nText 1 on x.\n"
    )
    with pytest.raises(ValueError, match="2 texts"):
        accepted.bind(n=2)
