"""Anthropic's protocol, by its own client, on a scripted endpoint."""

import asyncio

import pytest

import shoal
from tests.shoal.lang.scripted_endpoint import ScriptedEndpoint, script, tokenize

CHAT = "<system>Be brief.<user>Say it.<assistant>"


@pytest.fixture
def endpoint():
    with ScriptedEndpoint(script({CHAT: "Paris, of course.\nOr so it is said."})) as server:
        yield server


def backend_of(endpoint, **arguments):
    return shoal.Anthropic("scripted", base_url=endpoint.url, api_key="key", **arguments)


def talk(*parts):
    def run(s):
        s += shoal.system("Be brief.") + shoal.user("Say it.")
        for part in parts:
            s += part

    return shoal.function(run)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation(endpoint, stream):
    backend = backend_of(endpoint)
    state = talk(shoal.assistant(shoal.gen("answer", stop=["."]))).run(backend=backend, stream=stream)
    assert state["answer"] == "Paris, of course"
    assert state.get_meta_info("answer")["finish_reason"] == "stop"
    (body,) = endpoint.bodies
    assert body.pop("stream", False) is stream
    assert body == {
        "model": "scripted",
        "system": "Be brief.",
        "messages": [{"role": "user", "content": "Say it."}],
        "max_tokens": 128,
        "stop_sequences": ["."],
    }
    usage = backend.token_usage
    assert (usage.calls, usage.prompt_tokens, usage.completion_tokens) == (1, len(tokenize(CHAT)), 5)


def test_a_stream_is_the_whole_text(endpoint):
    state = talk(shoal.assistant(shoal.gen("answer"))).run(backend=backend_of(endpoint), stream=True)
    assert "".join(state.text_iter("answer")) == "Paris, of course.\nOr so it is said."


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_of_white_space_are_looked_for_here(endpoint, stream):
    """The endpoint refuses them."""
    state = talk(shoal.assistant(shoal.gen("answer", stop=["\n", "said"]))).run(
        backend=backend_of(endpoint), stream=stream
    )
    assert state["answer"] == "Paris, of course."
    assert state.get_meta_info("answer")["finish_reason"] == "stop"
    assert "stop_sequences" not in endpoint.bodies[0]


def test_the_last_tokens_are_told(endpoint):
    state = talk(shoal.assistant(shoal.gen("answer", max_tokens=2, stop="\n\n"))).run(backend=backend_of(endpoint))
    assert state["answer"] == "Paris,"
    assert state.get_meta_info("answer")["finish_reason"] == "length"


def test_a_message_that_has_begun_goes_on_where_the_model_can(endpoint):
    function = talk(shoal.assistant("Paris, " + shoal.gen("how", stop=".")))
    state = function.run(backend=backend_of(endpoint, prefill=True))
    assert state["how"] == "of course"
    assert endpoint.bodies[0]["messages"][-1] == {"role": "assistant", "content": "Paris, "}
    with pytest.raises(shoal.ProgramError, match="text before gen"):
        function.run(backend=backend_of(endpoint))


def test_pictures_go_as_blocks(endpoint):
    picture = b"\x89PNG...."
    talk(
        shoal.user(shoal.image(picture) + shoal.image("https://host/a.png") + "Which?"), shoal.assistant(shoal.gen("a"))
    ).run(backend=backend_of(endpoint))
    assert endpoint.bodies[0]["messages"][1]["content"] == [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORy4uLi4="}},
        {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}},
        {"type": "text", "text": "Which?"},
    ]


def test_sampling_is_sent_where_it_asks_for_something(endpoint):
    talk(shoal.assistant(shoal.gen("a", temperature=0.5, top_k=4))).run(backend=backend_of(endpoint))
    (body,) = endpoint.bodies
    assert (body["temperature"], body["top_k"]) == (0.5, 4) and "top_p" not in body


def test_a_schema_goes_as_output_config(endpoint):
    talk(shoal.assistant(shoal.gen("a", json_schema='{"type": "object"}'))).run(backend=backend_of(endpoint))
    assert endpoint.bodies[0]["output_config"] == {"format": {"type": "json_schema", "schema": {"type": "object"}}}


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (shoal.gen("a", regex="a+"), "support regex"),
        (shoal.gen("a", n=2), "support n"),
        (shoal.gen("a", frequency_penalty=0.5), "support frequency_penalty"),
        (shoal.gen("a", return_logprob=True), "support return_logprob"),
        (shoal.select("a", ["yes", "no"]), "support select"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(endpoint, part, message):
    with pytest.raises(shoal.ProgramError, match=message):
        talk(shoal.assistant(part)).run(backend=backend_of(endpoint))
    assert endpoint.requests == []


def test_a_busy_endpoint_is_asked_again_and_an_error_is_told(endpoint):
    endpoint.failures += [(529, {"retry-after-ms": "1"}), (400, {})]
    with pytest.raises(shoal.ProgramError, match=r"400.*not now"):
        talk(shoal.assistant(shoal.gen("a"))).run(backend=backend_of(endpoint))
    assert endpoint.failures == []


def test_each_event_loop_has_its_own_client(endpoint):
    backend = backend_of(endpoint)

    async def one():
        state = await talk(shoal.assistant(shoal.gen("a", stop="."))).run_async(backend=backend)
        await backend.close()
        return state["a"]

    assert asyncio.run(one()) == asyncio.run(one()) == "Paris, of course"
