"""Compiled programs: graphs, what they give, and where the function itself goes on."""

import asyncio
import xml.etree.ElementTree as ElementTree

import pytest

import shoal
from tests.shoal.lang.scripted import ScriptedBackend, texts_of

PREFIX = "A long introduction that all runs of the program have in common, word for word.\n"


@shoal.function
def tips(s, topic, n=2):
    s += PREFIX
    s += f"Topic: {topic}\n"
    forks = s.fork(n)
    forks += lambda i: f"{i} on {topic}:" + shoal.gen("tip")
    for fork in forks:
        s += "tip: " + fork["tip"] + "\n"
    with s.user():
        s += "so?"
    s += shoal.assistant(shoal.gen("end"))


@shoal.function
def agent(s, task):
    s += PREFIX + task
    for _ in range(3):
        s += shoal.gen("thought") + shoal.select("action", ["go on", "stop"])
        if s["action"] == "stop":
            break
    return s["thought"]


class Prefetching(ScriptedBackend):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prefetched = []

    async def prefetch(self, program, text):
        self.prefetched.append(text)


@pytest.mark.parametrize("program", [tips, agent])
def test_it_does_what_the_interpreter_does(program):
    argument = {program.arg_names[0]: "x"}
    plain = program.run(**argument, backend=ScriptedBackend())
    compiled = program.compile().run(**argument, backend=ScriptedBackend())
    assert compiled.text() == plain.text() and compiled.messages() == plain.messages()
    assert compiled.ret_value == plain.ret_value


def test_a_whole_graph():
    graph = tips.compile().graph
    assert graph.stop == "" and graph.parents == [None, 0, 0] and graph.prefix() == PREFIX + "Topic: "
    assert [(read.branch, read.name) for node in graph.nodes for read in node.reads if read.branch is not None] == [
        (1, "tip"),
        (2, "tip"),
    ]


def test_where_the_interpreter_goes_on_is_said():
    compiled = agent.compile()
    assert "test_compiler.py:" in compiled.graph.stop and "s0['action'] is compared" in compiled.graph.stop
    assert compiled.graph.stop in str(compiled.explain())


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda s, x: s.append("a" * len(x)), "is measured"),
        (lambda s, x: [s.append(part) for part in x], "is iterated over"),
        (lambda s, x: s.append(x.upper()), "is asked for .upper"),
        (lambda s, x: s.append(shoal.gen("a", regex=f"{x}")), "depends on a value"),
        (lambda s, x: s.append(x[0]), "is indexed"),
        (lambda s, x: s.text(), "text is read"),
        (lambda s, x: s.get_meta_info("a"), "details of 'a'"),
        (lambda s, x: s.append(str(int(x))), "is made a number"),
        (lambda s, x: s.append(f"{x:>5}"), "is formatted as '>5'"),
        (lambda s, x: ",".join([x]), "TypeError"),
    ],
)
def test_a_value_that_is_needed_ends_the_graph(body, reason):
    assert reason in shoal.function(body).compile().graph.stop


def test_reads_do_not_hold_up_independent_calls():
    @shoal.function
    def program(s):
        first, second = s.fork(2)
        first += "1" + shoal.gen("x")
        s += first["x"]
        second += "2" + shoal.gen("y")
        s += second["y"]

    def most_at_once(runnable):
        gate = asyncio.Event()
        backend = ScriptedBackend(gate=gate)

        async def main():
            running = asyncio.ensure_future(runnable.run_async(backend=backend))
            for _ in range(100):
                await asyncio.sleep(0)
            gate.set()
            await running

        asyncio.run(main())
        return backend.most_at_once

    assert most_at_once(program) == 1
    assert most_at_once(program.compile()) == 2


def test_a_batch_computes_its_prefix_once_and_starts_what_shares_together():
    backend = Prefetching()
    states = agent.compile().run_batch([[task] for task in ["b", "a", "b", "a"]], backend=backend, num_threads=1)
    assert backend.prefetched == [PREFIX]
    firsts = [text for text in texts_of(backend) if len(text) == len(PREFIX) + 1]
    assert [text[-1] for text in dict.fromkeys(firsts)] == ["a", "b"]
    assert [state.text()[len(PREFIX)] for state in states] == ["b", "a", "b", "a"]


def test_unordered_parts_that_are_shared_go_first():
    @shoal.function
    def program(s, question, document):
        s += shoal.unordered("Q: " + question + "\n", "D: " + document + "\n", "Be short.\n")
        s += shoal.gen("answer")

    compiled = program.compile()
    states = compiled.run_batch([[q, "doc"] for q in "abc"], backend=ScriptedBackend())
    assert states[0].text().startswith("D: doc\nBe short.\nQ: a\n")
    assert compiled.run("a", "doc", backend=ScriptedBackend()).text().startswith("Be short.\nQ: a\nD: doc\n")
    assert program.run("a", "doc", backend=ScriptedBackend()).text().startswith("Q: a\nD: doc\nBe short.\n")


def test_arguments_that_decide_the_way_are_bound():
    backend = ScriptedBackend()
    assert tips.bind(n=3).compile().graph.parents == [None, 0, 0, 0]
    state = tips.compile().run("x", n=3, backend=backend)  # not what was traced: the interpreter runs it
    assert state.text() == tips.run("x", n=3, backend=backend).text()


def test_a_program_that_takes_another_way_is_refused():
    ways = iter([1, 2])

    @shoal.function
    def program(s):
        s += "a" + shoal.gen("x")
        s.fork(next(ways))
        return 1

    compiled = program.compile()
    with pytest.raises(shoal.ProgramError, match="took another way"):
        compiled.run(backend=ScriptedBackend())


def test_errors_name_the_line():
    def answer(call):
        raise shoal.BackendError("no route")

    with pytest.raises(shoal.ProgramError, match=r"test_compiler\.py:\d+, in "):
        tips.compile().run("x", backend=ScriptedBackend(answer))


def test_drawings():
    explanation = tips.compile().explain()
    assert "branch 1 (fork of 0)" in str(explanation) and "the graph is whole" in str(explanation)
    picture = ElementTree.fromstring(explanation.svg())
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "gen(tip)" in texts and "fork(2)" in texts


def test_the_prefix_can_be_cached_by_hand():
    backend = Prefetching()
    tips.cache(backend)
    assert backend.prefetched == [PREFIX + "Topic: "]


def test_tracing_ends_where_a_tool_is_called():
    called = []

    @shoal.function
    def asks(s):
        s += "Look up " + shoal.gen("what")
        s += shoal.in_thread(lambda what: called.append(what) or "found", s["what"])

    compiled = asks.compile()
    assert called == []
    assert "a function is called in a thread" in compiled.graph.stop
    state = compiled.run(backend=ScriptedBackend(lambda call: "this"))
    assert called == ["this"]
    assert state.text() == "Look up thisfound"
