"""Programs on a scripted backend: order, waiting, forks, messages, variables, errors, and what a call knows ahead."""

import asyncio
import subprocess
import sys
import threading

import pytest

import shoal
from tests.shoal.lang.scripted import ScriptedBackend, looks_like_hex, texts_of


def run(func, backend=None, **kwargs):
    backend = backend or ScriptedBackend()
    return shoal.function(func).run(backend=backend, **kwargs), backend


def test_text_and_variables():
    def program(s, question):
        s += "Q: " + question + "\nA:" + shoal.gen("answer", stop="\n") + "\n"
        return s["answer"].upper()

    state, backend = run(program, ScriptedBackend(lambda call: " four\nQ: more"), question="2 + 2?")
    assert state.text() == "Q: 2 + 2?\nA: four\n"
    assert state["answer"] == " four" and "answer" in state and "other" not in state
    assert state.ret_value == " FOUR"
    assert texts_of(backend) == ["Q: 2 + 2?\nA:"]
    assert backend.ended == [backend.calls[0].program]


def test_a_call_sees_what_was_generated_before():
    def program(s):
        s += "a" + shoal.gen("x") + "b" + shoal.gen("y") + "c"

    state, backend = run(program)
    assert texts_of(backend) == ["a", f"a{state['x']}b"]
    assert state.text() == f"a{state['x']}b{state['y']}c"


def test_defaults_of_run_and_arguments_of_gen():
    def program(s):
        s += shoal.gen("x") + shoal.gen("y", max_tokens=3, temperature=0, stop=["a", "b"])

    _, backend = run(program, max_new_tokens=7, temperature=0.5, stop=".")
    first, second = (call.params for call in backend.calls)
    assert (first.max_new_tokens, first.temperature, first.stop) == (7, 0.5, (".",))
    assert (second.max_new_tokens, second.temperature, second.stop) == (3, 0, ("a", "b"))


def test_forks_run_at_once_and_are_joined():
    gate = asyncio.Event()
    backend = ScriptedBackend(gate=gate)

    def program(s):
        s += "shared "
        forks = s.fork(3)
        forks += lambda i: f"{i}:" + shoal.gen("tip")
        forks.join()
        s += ",".join(s["tip"])

    async def main():
        running = asyncio.ensure_future(shoal.function(program).run_async(backend=backend))
        while backend.at_once < 3:
            await asyncio.sleep(0)
        gate.set()
        return await running

    state = asyncio.run(main())
    assert sorted(texts_of(backend)) == ["shared 0:", "shared 1:", "shared 2:"]
    assert state.text() == "shared " + ",".join(state["tip"]) and len(state["tip"]) == 3
    assert {call.parent for call in backend.calls} == {None}  # nothing was held when they began


def test_a_fork_does_not_wait_and_its_parent_goes_on():
    def program(s):
        s += "a" + shoal.gen("x")
        forks = s.fork(2)
        s += "parent" + shoal.gen("y")
        for fork in forks:
            fork += "child" + shoal.gen("z")
        return [fork["x"] for fork in forks] + [fork["z"] for fork in forks]

    state, backend = run(program)
    x = state["x"]
    assert state.ret_value[:2] == [x, x] and all(map(looks_like_hex, state.ret_value))
    assert sorted(texts_of(backend)) == sorted(["a", f"a{x}parent", f"a{x}child", f"a{x}child"])


def test_forks_of_forks():
    def program(s):
        s += "root"
        outer = s.fork(2)
        for i, branch in enumerate(outer):
            branch += f"/{i}"
            inner = branch.fork(2)
            inner += lambda j: f"/{j}" + shoal.gen("leaf")
            inner.join()
        outer.join()

    state, backend = run(program)
    assert sorted(texts_of(backend)) == ["root/0/0", "root/0/1", "root/1/0", "root/1/1"]
    assert [len(leaves) for leaves in state["leaf"]] == [2, 2]


def test_texts_of_a_fork_are_appended():
    def program(s):
        s += "statements:"
        forks = s.fork(3)
        forks += [" a", " b", " c"]
        forks.join(mode="concate_and_append")
        s += " end"

    state, _ = run(program)
    assert state.text() == "statements: a b c end"


def test_copy_and_empty_fork():
    def program(s):
        s += "x"
        with s.copy() as other:
            other += "y" + shoal.gen("in_copy")
        forks = s.fork(0)
        forks.join()
        s += str(s["in_copy"])

    state, _ = run(program)
    assert state.text() == "x" + str(state["in_copy"]) and len(state["in_copy"]) == 1


def test_scopes_and_set_variables():
    def program(s):
        with s.var_scope("outer"):
            s += "a"
            with s.var_scope("inner"):
                s += shoal.gen("x")
            s += "b"
        s["mine"] = 5
        return s["mine"]

    state, _ = run(program)
    assert state["outer"] == "a" + state["x"] + "b" and state["inner"] == state["x"] and state.ret_value == 5


def test_messages():
    def program(s):
        s += shoal.system("S")
        s += shoal.user("U" + shoal.image("http://x/i.png") + "V")
        with s.assistant():
            s += shoal.gen("a")
        s.user("W")

    state, backend = run(program)
    assert state.text() == f"<system>S</system><user>UV</user><assistant>{state['a']}</assistant><user>W</user>"
    assert [m["role"] for m in state.messages()] == ["system", "user", "assistant", "user"]
    assert [part["type"] for part in state.messages()[1]["content"]] == ["text", "image_url", "text"]
    (call,) = backend.calls
    assert call.role == "assistant" and call.partial == "" and call.has_media and len(call.messages) == 2
    assert call.then == "</assistant><user>W</user>"


def test_a_conversation_without_a_system_message_gets_the_models_own():
    state, _ = run(lambda s: s.user("U"))
    assert state.text() == "<system>Be kind.</system><user>U</user>"
    assert state.messages() == [{"role": "user", "content": "U"}]


def test_begin_and_end_are_expressions():
    def program(s):
        s += shoal.user_begin() + "U" + shoal.user_end() + shoal.assistant_begin() + shoal.gen("a")
        s += shoal.assistant_end()

    state, _ = run(program)
    assert state.messages()[-1] == {"role": "assistant", "content": state["a"]}


def test_a_call_knows_the_constant_text_that_follows_and_how_many_calls():
    def program(s):
        s += "a" + shoal.gen("x") + "b"
        s += "c"
        s += shoal.gen("y") + "d" + shoal.select("z", ["p", "qq"]) + "e"

    _, backend = run(program)
    assert [(call.then, call.remaining) for call in backend.calls] == [("bc", 2), ("d", 1), ("e", 0)]


def test_select_and_choices():
    def program(s):
        s += "x" + shoal.select("a", ["long one", "b"]) + shoal.gen("c", choices=["no", "n"])

    state, _ = run(program)
    assert (state["a"], state["c"]) == ("b", "n")
    assert state.get_meta_info("a")["values"] == [-8.0, -1.0]


def test_several_outputs():
    state, _ = run(lambda s: s.append("a" + shoal.gen("x", n=3) + "b"))
    assert len(state["x"]) == 3 and state.text() == "a" + state["x"][0] + "b" and len(state.get_meta_info("x")) == 3


def test_numbers_end_at_white_space():
    state, backend = run(lambda s: s.append(shoal.gen_int("i")), ScriptedBackend(lambda call: "42 \nand"))
    assert state["i"] == "42" and backend.calls[0].params.pattern() == r"[-+]?[0-9]+[ \n]*"


@pytest.mark.parametrize("name", [None, "x"])
def test_stream(name):
    def program(s):
        s += "a" + shoal.gen("x") + "b"

    async def pieces():
        state = await shoal.function(program).run_async(backend=ScriptedBackend(), stream=True)
        return [piece async for piece in state.text_async_iter(name)]

    assert len(asyncio.run(pieces())) > 5
    state = shoal.function(program).run(backend=ScriptedBackend(), stream=True)
    assert "".join(state.text_iter(name)) == (state["x"] if name else state.text())
    meta = state.get_meta_info("x")
    assert meta["finish_reason"] == "stop" and len(meta["output_token_logprobs"]) == 8


@pytest.mark.parametrize("name", ["x", None])
def test_a_reader_who_is_slower_than_the_program_gets_all(name):
    @shoal.function
    def program(s):
        s += shoal.gen("x")

    async def slow():
        state = await program.run_async(backend=ScriptedBackend(lambda call: "abcdef"), stream=True)
        pieces = []
        async for piece in state.text_async_iter(name):
            pieces.append(piece)
            await asyncio.wait([state.run.task])
        return pieces

    assert asyncio.run(slow()) == ["a", "bcdef"]


def test_stream_from_a_coroutine():
    async def main():
        state = await shoal.function(lambda s: s.append("a" + shoal.gen("x"))).run_async(
            backend=ScriptedBackend(), stream=True
        )
        texts = [text async for text, _ in state.text_async_iter("x", return_meta_data=True)]
        return "".join(texts) == await state.get("x")

    assert asyncio.run(main())


def test_a_reader_waits_for_what_the_program_has_yet_to_do():
    @shoal.function
    async def program(s):
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        s += shoal.gen("x")

    async def main():
        state = await program.run_async(backend=ScriptedBackend(), stream=True)
        assert looks_like_hex(await state.get("x"))
        with pytest.raises(KeyError, match="other"):
            await state.get("other")

    asyncio.run(main())


@pytest.mark.parametrize("fails", [False, True])
def test_the_whole_text_is_there_when_the_program_has_ended(fails):
    """Not when it has run all that it has appended so far."""
    may_go_on = asyncio.Event()

    @shoal.function
    async def program(s):
        s += "a"
        await may_go_on.wait()
        if fails:
            raise ValueError("no more")
        s += "b"

    async def main():
        state = await program.run_async(backend=ScriptedBackend(), stream=True)
        while state._branch.text != "a":
            await asyncio.sleep(0)
        reading = asyncio.create_task(asyncio.to_thread(state.text))
        while not (state._branch._waiters or reading.done()):
            await asyncio.sleep(0)
        assert not reading.done()
        may_go_on.set()
        return await reading

    if fails:
        with pytest.raises(shoal.ProgramError, match="no more"):
            asyncio.run(main())
    else:
        assert asyncio.run(main()) == "ab"


def test_stop_regex():
    state, _ = run(
        lambda s: s.append("a" + shoal.gen("x", stop_regex=r"\d{2}") + "b"), ScriptedBackend(lambda call: "q1w23e45")
    )
    assert state["x"] == "q1w" and state.text() == "aq1wb"
    assert state.get_meta_info("x")["finish_reason"] == "stop"


def test_reasoning_is_separated():
    def program(s):
        s += shoal.assistant(shoal.separate_reasoning(shoal.gen("a"), model_type="qwen3"))
        s += "end"

    state, _ = run(program, ScriptedBackend(lambda call: "<think>\nhm\n</think>\n\n42"))
    assert state["a"] == "42" and state["a_reasoning_content"] == "hm"
    assert "hm" not in state.text() and state.text().endswith("42</assistant>end")


# ---------------------------------------------------------------- errors


def test_an_error_names_the_programs_line():
    def program(s):
        s += "a"
        s += shoal.gen("x")  # this line
        s += "b"

    def answer(call):
        raise shoal.BackendError("no route")

    with pytest.raises(shoal.ProgramError, match=r"test_interpreter\.py:\d+, in program: BackendError"):
        run(program, ScriptedBackend(answer))


def test_an_error_reaches_who_waits_and_who_was_forked():
    seen = []

    def program(s):
        s += shoal.gen("x")
        (fork,) = s.fork(1)
        for state, name in ((s, "x"), (fork, "y")):
            try:
                state[name]
            except shoal.ProgramError as error:
                seen.append(str(error))

    with pytest.raises(shoal.ProgramError, match="ValueError: broken"):
        run(program, ScriptedBackend(lambda call: exec("raise ValueError('broken')")))
    assert len(seen) == 2 and seen[0] == seen[1]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda s: s["nope"], "no variable 'nope'"),
        (lambda s: s.append(5), "not int"),
        (lambda s: s.append(shoal.user(shoal.user("x"))), "cannot be nested"),
        (lambda s: s.append(shoal.user_end()), "has not begun"),
        (lambda s: s.append(shoal.image("x.png")), "within a message"),
        (lambda s: s.fork(2, [1, 2]), "position_ids_offset"),
        (lambda s: s.fork(2).join("other"), "mode is 'other'"),
        (lambda s: s.fork(2).__iadd__(["one"]), "1 expressions .* 2"),
        (lambda s: s.append(shoal.gen("x", n=2, stop_regex="a")), "n > 1"),
        (lambda s: 1 // 0, "ZeroDivisionError"),
    ],
)
def test_mistakes_are_named(program, message):
    with pytest.raises(shoal.ProgramError, match=message):
        run(program)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "list"}, "dtype is 'list'"),
        ({"dtype": int, "regex": "a"}, "dtype and regex"),
        ({"stop": [1]}, "stop is"),
    ],
)
def test_wrong_arguments_of_gen(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        shoal.gen("x", **arguments)


def test_what_a_backend_cannot_do_is_said_by_name():
    class Plain(ScriptedBackend):
        name = "a plain backend"
        params = frozenset({"max_new_tokens", "stop"})
        features = frozenset()

    for expr, message in (
        (shoal.gen("x", regex="a"), "a plain backend .*regex"),
        (shoal.select("x", ["a"]), "a plain backend .*select"),
        (shoal.gen("x", stop_regex="a"), "a plain backend .*streams"),
        (shoal.user(shoal.image("http://x")), "a plain backend .*images"),
    ):
        with pytest.raises(shoal.ProgramError, match=message):
            run(lambda s, expr=expr: s.append(expr), Plain())
    with pytest.raises(shoal.NotSupported, match="min_p"):
        run(lambda s: None, Plain(), min_p=0.5)
    with pytest.raises(shoal.NotSupported, match="num_api_spec_tokens"):
        shoal.function(num_api_spec_tokens=8)(lambda s: None).run(backend=Plain())


# ---------------------------------------------------------------- functions


def test_arguments_are_checked_before_anything_runs():
    @shoal.function
    def program(s, a, b=2):
        s += f"{a}{b}"

    backend = ScriptedBackend()
    assert program.run(1, backend=backend).text() == "12"
    assert program.bind(b=7).run(a=1, backend=backend).text() == "17"
    for args, kwargs, message in (
        ((), {}, "missing"),
        ((1, 2, 3), {}, "takes 2 arguments"),
        ((1,), {"c": 3}, "'c'"),
    ):
        with pytest.raises(TypeError, match=message):
            program.run(*args, backend=backend, **kwargs)
    with pytest.raises(TypeError, match="'c'"):
        program.bind(c=1)
    with pytest.raises(ValueError, match="first parameter"):
        shoal.function(lambda state: None)
    with pytest.raises(ValueError, match="no backend"):
        program.run(1)


def test_batch():
    @shoal.function
    def program(s, i):
        s += f"{i}:" + shoal.gen("x")
        if i == 3:
            raise ValueError("three")

    backend = ScriptedBackend()
    states = program.run_batch([{"i": i} for i in range(6)], backend=backend, num_threads=2)
    assert backend.most_at_once <= 2
    assert [state.text().partition(":")[0] for state in states if state.error() is None] == ["0", "1", "2", "4", "5"]
    assert "ValueError: three" in str(states[3].error())
    assert program.run_batch([], backend=backend) == []
    assert [s.text()[0] for s in program.run_batch([[1], [2]], backend=backend, generator_style=True)] == ["1", "2"]
    with pytest.raises(TypeError, match="missing"):
        program.run_batch([{"i": 1}, {}], backend=backend)
    with pytest.raises(ValueError, match="num_threads"):
        program.run_batch([{"i": 1}], backend=backend, num_threads=0)


def test_a_batch_of_many_states_has_one_thread():
    @shoal.function
    def program(s, i):
        for _ in range(3):
            s += f"{i}" + shoal.gen("x")
            s["x"]

    before = threading.active_count()
    gate = asyncio.Event()
    backend = ScriptedBackend(gate=gate)

    async def main():
        running = asyncio.ensure_future(
            program.run_batch_async([{"i": i} for i in range(500)], backend=backend, num_threads=500)
        )
        while backend.at_once < 500:
            await asyncio.sleep(0)
        assert threading.active_count() <= before + 1
        gate.set()
        return await running

    assert len({state.text() for state in asyncio.run(main())}) == 500


def test_a_program_calls_another():
    @shoal.function
    def inner(s, x):
        s += x + shoal.gen("y")
        return s["y"]

    @shoal.function
    def outer(s):
        s += inner.run("a", backend=backend).ret_value + shoal.gen("z")

    backend = ScriptedBackend()
    state = outer.run(backend=backend)
    assert state.text().endswith(state["z"]) and texts_of(backend)[0] == "a"


def test_coroutine_functions_are_programs():
    @shoal.function
    async def program(s):
        s += "a" + shoal.gen("x")
        value = await s.get("x")
        s += value
        return value

    state = program.run(backend=ScriptedBackend())
    assert state.text() == "a" + 2 * state.ret_value


def test_a_coroutine_is_not_blocked():
    async def main():
        shoal.function(lambda s: None).run(backend=ScriptedBackend())

    asyncio.run(main())  # the background loop is another one

    async def program(s):
        s += shoal.gen("x")
        s["x"]

    with pytest.raises(shoal.ProgramError, match="event loop"):
        run(program)


def test_what_blocks_runs_in_a_thread():
    def program(s):
        s += shoal.in_thread(lambda: threading.current_thread().name)

    state, _ = run(program)
    assert state.text() != threading.current_thread().name
    assert shoal.in_thread(lambda x: x + 1, 1) == 2


def test_an_interrupt_ends_the_calls():
    gate = asyncio.Event()
    backend = ScriptedBackend(gate=gate)

    async def main():
        running = asyncio.ensure_future(shoal.function(lambda s: s.append(shoal.gen("x"))).run_async(backend=backend))
        while not backend.at_once:
            await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        while not backend.ended:
            await asyncio.sleep(0)

    asyncio.run(main())
    assert backend.at_once == 0


def test_the_package_is_light():
    code = (
        "import sys, shoal; shoal.gen, shoal.function, shoal.ShoalServer; "
        "print([m for m in ('torch', 'ray', 'transformers', 'fastapi', 'numpy', 'zmq') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_every_public_name_is_there():
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    with pytest.raises(AttributeError, match="nothing_such"):
        shoal.nothing_such  # noqa: B018
