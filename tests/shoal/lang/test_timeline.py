"""Views of a state for notebooks, terminals and Perfetto."""

import io
import json

import rich.console

import shoal
from tests.shoal.lang.scripted import ScriptedBackend


def run():
    def program(s):
        s += "a<b" + shoal.gen("x")
        forks = s.fork(2)
        forks += shoal.gen("y")
        forks.join()
        s += shoal.select("z", ["p", "q"])

    return shoal.function(program).run(backend=ScriptedBackend())


def test_calls_are_recorded():
    state = run()
    assert [call.name for call in state.calls()] == ["x", "y", "y", "z"]
    assert sorted(call.branch for call in state.calls()) == [0, 0, 1, 2]
    assert all("test_timeline.py:" in call.place and call.seconds >= 0 for call in state.calls())
    assert len(state.calls_table().splitlines()) == 5


def test_a_time_line_has_a_track_for_each_branch():
    events = json.loads(run().trace_json())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "M"} == {0, 1, 2}
    assert [event["name"] for event in events if event["ph"] == "X"] == ["x", "y", "y", "z"]


def test_generated_text_is_marked():
    state = run()
    assert "a&lt;b<span" in state._repr_html_() and f'title="x">{state["x"]}</span>' in state._repr_html_()
    console = rich.console.Console(record=True, width=80, file=io.StringIO())
    console.print(state)
    assert state["x"] in console.export_text(styles=True)
