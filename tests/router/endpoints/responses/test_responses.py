"""`/v1/responses` as OpenAI's client sees it, from a replica that follows a script."""

import json
import random
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from router.config import RouterConfig
from router.endpoints.responses.runs import READER_THREADS
from router.endpoints.responses.store import FILE, ResponseStore
from router.text.tokenizer import Tokenizer
from tests.router.endpoints.thinking import CALL, THOUGHT
from tests.server.bodies import damaged_anywhere
from worker.client_turns import ClientTurns
from worker.messages import Generate

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture
def says(make_stack: Any, make_replica: Any, thinker: Tokenizer, tmp_path: Path) -> Callable[..., Any]:
    """A server whose model writes texts, one for each request, the last again and again."""

    def make(*texts: str, replica: dict[str, Any] | None = None, **settings: Any) -> Any:
        asked: list[str] = []

        def script(request: Generate) -> list[int]:
            if request.request_id not in asked:
                asked.append(request.request_id)
            text = texts[min(asked.index(request.request_id), len(texts) - 1)]
            return [*thinker.encode(text), thinker.token_id("<|im_end|>")]

        config = RouterConfig(**{"response_store_dir": tmp_path / "store"} | settings)
        return make_stack(make_replica(script=script, **(replica or {})), tokens=thinker, config=config)

    return make


def ask(stack: Any, input: Any = "How is it in Oslo?", **fields: Any) -> Any:
    return stack.client.responses.create(model="tiny", input=input, **fields)


def prompts(stack: Any, tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.decode(request.prompt_ids, skip_special_tokens=False) for request in stack.fakes["r0"].requests()]


def without_ids(item: Any) -> dict[str, Any]:
    """The item as JSON, without what differs from answer to answer, and what the client adds."""
    told = {name: value for name, value in item.to_dict().items() if name not in ("id", "call_id", "parsed_arguments")}
    for part in told.get("content", ()):
        part.pop("parsed", None)
    return told


# ---------------------------------------------------------------- whole


def test_a_text(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("Cold.")
    response = ask(stack, instructions="Be brief.", metadata={"a": "b"}, temperature=0.5, user="me")
    assert response.output_text == "Cold." and response.status == "completed" and response.error is None
    assert (response.object, response.model, response.metadata, response.user) == ("response", "tiny", {"a": "b"}, "me")
    assert (response.temperature, response.top_p, response.truncation) == (0.5, 1.0, "disabled")
    assert (response.instructions, response.tools, response.tool_choice) == ("Be brief.", [], "auto")
    (message,) = response.output
    assert message.id.startswith("msg_") and message.status == "completed" and message.content[0].annotations == []
    usage = response.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens > 0
    assert usage.input_tokens_details.cached_tokens == 3 and usage.output_tokens_details.reasoning_tokens == 0
    (prompt,) = prompts(stack, thinker)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow is it in Oslo?<|im_end|>")


@pytest.mark.parametrize(
    ("text", "kinds", "status"),
    [
        ("<think>\nLook.\n</think>\n\nLet me see. Look.", ["reasoning", "message"], "completed"),
        ("<think>\nLook.\n</think>\n\n" + CALL, ["reasoning", "function_call"], "completed"),
        (CALL[:45], ["function_call"], "incomplete"),
    ],
)
def test_stop_strings_leave_thinking_and_calls_alone(
    says: Callable[..., Any], text: str, kinds: list[str], status: str
) -> None:
    stack = says(text)
    fields: dict[str, Any] = {"tools": [WEATHER], "extra_body": {"stop": ["Look", "Oslo", "}", "\n"]}}
    whole = ask(stack, **fields)
    with stack.client.responses.stream(model="tiny", input="How?", **fields) as stream:
        events = list(stream)
    for response in (whole, events[-1].response):
        assert ([item.type for item in response.output], response.status) == (kinds, status)
        if kinds[0] == "reasoning":
            assert response.output[0].content[0].text == "Look."
        if kinds[-1] == "message":
            assert response.output[-1].content[0].text == "Let me see. "
        elif status == "completed":
            assert json.loads(response.output[-1].arguments) == {"city": "Oslo"}
        assert response.output[-1].status == status


@pytest.mark.parametrize("per_step", [1, 3, 100])
def test_a_stream_is_the_whole_in_pieces(says: Callable[..., Any], per_step: int) -> None:
    text = "<think>\nLook.\n</think>\n\nLet me see. " + CALL + "\n" + CALL.replace("Oslo", "Rome")
    stack = says(text, replica={"per_step": per_step})
    whole = ask(stack, tools=[WEATHER])
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output[0].content[0].text == "Look." and whole.output_text.strip() == "Let me see."
    assert [json.loads(call.arguments)["city"] for call in whole.output[2:]] == ["Oslo", "Rome"]
    with stack.client.responses.stream(model="tiny", input="How?", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    assert [without_ids(item) for item in final.output] == [without_ids(item) for item in whole.output]
    kinds = [event.type for event in events]
    assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 4
    assert kinds.count("response.content_part.added") == kinds.count("response.content_part.done") == 2
    assert kinds.count("response.function_call_arguments.done") == 2
    assert "response.reasoning_text.delta" in kinds and kinds.count("response.reasoning_text.done") == 1


def test_events_have_names_and_no_end_mark(says: Callable[..., Any]) -> None:
    stack = says("Cold.")
    body = {"model": "tiny", "input": "x", "stream": True}
    text = httpx.post(f"{stack.url}/v1/responses", json=body).text
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    assert "[DONE]" not in text


def test_an_answer_that_is_cut_off(says: Callable[..., Any]) -> None:
    stack = says("a b c d e f g h")
    response = ask(stack, max_output_tokens=3)
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete" and response.max_output_tokens == 3
    assert next(reversed(list(ask(stack, max_output_tokens=3, stream=True)))).type == "response.incomplete"


def test_a_schema(says: Callable[..., Any]) -> None:
    class Weather(BaseModel):
        city: str

    stack = says('{"city": "Oslo"}')
    response = stack.client.responses.parse(model="tiny", input="x", text_format=Weather)
    assert response.output_parsed == Weather(city="Oslo")
    assert response.text.format.type == "json_schema" and response.text.format.name == "Weather"
    ask(stack, text={"format": {"type": "json_object"}})
    first, second = (request.sampling.grammar for request in stack.fakes["r0"].requests())
    assert (first.kind, second.kind) == ("json_schema", "json_object")
    assert json.loads(first.text)["properties"]["city"]["type"] == "string"


def test_log_probabilities(says: Callable[..., Any]) -> None:
    stack = says("Cold.", replica={"per_step": 3})
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    told = ask(stack, **fields).output[0].content[0].logprobs
    assert told[0].logprob == -0.5 and len(told[0].top_logprobs) == 2
    assert "".join(token.token for token in told).startswith("Cold.")
    events = list(ask(stack, stream=True, **fields))
    streamed = [token for event in events if event.type == "response.output_text.delta" for token in event.logprobs]
    assert [token.token for token in streamed] == [token.token for token in told][: len(streamed)]
    assert events[-1].response.output[0].content[0].logprobs == told


# ---------------------------------------------------------------- tools, and turns


def test_a_round_trip_with_previous_response_id(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("<think>\nLook.\n</think>\n\n" + CALL, THOUGHT, "Yes.")
    first = ask(stack, tools=[WEATHER], instructions="Be brief.")
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
    second = ask(stack, [result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "Cold." and second.previous_response_id == first.id and second.instructions is None
    third = ask(stack, "Sure?", previous_response_id=second.id)
    assert third.output_text == "Yes."
    by_hand = [{"role": "user", "content": "How is it in Oslo?"}, *first.output, result, *second.output]
    ask(stack, [*by_hand, {"role": "user", "content": "Sure?"}], store=False)
    _, told, last, same = prompts(stack, thinker)
    assert '<think>\nLook.\n</think>\n\n<tool_call>\nweather {"city": "Oslo"}\n</tool_call><|im_end|>' in told
    assert "<|im_start|>tool\n-3<|im_end|>" in told and "Be brief." not in told
    assert "<think>\nIt is cold.\n</think>\n\nCold.<|im_end|>\n<|im_start|>user\nSure?" in last
    assert same == last
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_items_by_reference(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("Cold.")
    first = ask(stack)
    ask(stack, [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "Sure?"}])
    assert "assistant\nCold.<|im_end|>" in prompts(stack, thinker)[-1]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, [{"id": "msg_none"}])
    assert caught.value.param == "input[0].id"


def test_choices_of_tools(says: Callable[..., Any]) -> None:
    stack = says(CALL)
    named = {"type": "function", "name": "weather"}
    for choice in ("required", named, {"type": "allowed_tools", "mode": "required", "tools": [named]}):
        response = ask(stack, tools=[WEATHER], tool_choice=choice)
        told = response.tool_choice
        assert (told if isinstance(told, str) else told.to_dict()) == choice
    assert response.tools[0].to_dict() == WEATHER
    ask(stack, tools=[{name: value for name, value in WEATHER.items() if name != "strict"}])
    ask(stack, tools=[WEATHER])
    *grammars, last = [request.sampling.grammar for request in stack.fakes["r0"].requests()]
    assert last is None
    assert [json.loads(grammar.text)["mode"] for grammar in grammars] == ["required"] * 3 + ["auto"]


def test_truncation(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("Cold.")
    turns = [{"role": role, "content": f"{number} " * 40} for number in range(9) for role in ("user", "assistant")]
    turns = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "Sure?"}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, turns)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    assert ask(stack, turns, truncation="auto").truncation == "auto"
    (prompt,) = prompts(stack, thinker)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n") and "Sure?" in prompt
    assert "8 8" in prompt and "0 0" not in prompt
    with pytest.raises(openai.BadRequestError):
        ask(stack, "x " * 4000, truncation="auto")


# ---------------------------------------------------------------- kept


def test_what_is_kept(says: Callable[..., Any]) -> None:
    stack = says(THOUGHT)
    api = stack.client.responses
    for stream in (False, True):
        made = ask(stack, stream=stream, metadata={"a": "b"})
        made = list(made)[-1].response if stream else made
        assert api.retrieve(made.id) == made
        assert made.store is True
        api.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            api.retrieve(made.id)
    made = ask(stack, store=False)
    assert made.store is False
    for call in (api.retrieve, api.delete, api.cancel, api.input_items.list):
        with pytest.raises(openai.NotFoundError):
            call(made.id)


def test_input_items(says: Callable[..., Any]) -> None:
    stack = says("Cold.")
    made = ask(stack, [{"role": "user", "content": str(number)} for number in range(25)])
    items = stack.client.responses.input_items
    texts = [item.content[0].text for item in items.list(made.id)]  # all pages
    assert texts == [str(number) for number in range(24, -1, -1)]
    page = items.list(made.id, order="asc", limit=2, extra_query={"after": items.list(made.id, order="asc").data[4].id})
    assert [item.content[0].text for item in page.data] == ["5", "6"] and page.has_more
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "none"}, {"include": "x"}):
        answer = httpx.get(f"{stack.url}/v1/responses/{made.id}/input_items", params=query)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == next(iter(query))


def test_without_a_store(says: Callable[..., Any]) -> None:
    stack = says("Cold.", response_store_bytes=0)
    made = ask(stack, store=True)
    assert made.store is False and made.output_text == "Cold."
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, background=True)
    assert caught.value.param == "background" and "'store'" not in str(caught.value)  # which would not help
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    assert "'input'" in str(caught.value)  # what helps
    with pytest.raises(openai.NotFoundError):
        stack.client.responses.retrieve(made.id)


def test_keys_do_not_see_each_others(says: Callable[..., Any], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\nother\n")
    stack = says("Cold.", api_key_file=keys)
    one, other = (stack.client.with_options(api_key=key).responses for key in ("one", "other"))
    made = one.create(model="tiny", input="x")
    assert one.retrieve(made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        other.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        other.delete(made.id)
    for fields in ({"previous_response_id": made.id}, {"input": [{"id": made.output[0].id}]}):
        with pytest.raises(openai.BadRequestError):
            other.create(**{"model": "tiny", "input": "x"} | fields)


# ---------------------------------------------------------------- in the background


def until(stack: Any, response_id: str, *statuses: str) -> Any:
    for _ in range(400):
        found = stack.client.responses.retrieve(response_id)
        if found.status in statuses:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{found.status}, not {statuses}")


def test_background(says: Callable[..., Any]) -> None:
    stack = says(THOUGHT)
    made = ask(stack, background=True)
    assert made.status == "queued" and made.background and made.output == []
    done = until(stack, made.id, "completed")
    assert done.output_text == "Cold." and done.usage.output_tokens > 0
    assert stack.client.responses.cancel(made.id) == done  # it has ended
    assert ask(stack, "Sure?", previous_response_id=made.id).output_text == "Cold."


def test_cancel(says: Callable[..., Any]) -> None:
    stack = says("a b c d e f g h")
    replica = stack.fakes["r0"]
    replica.allow(2)
    made = ask(stack, background=True)
    until(stack, made.id, "in_progress")
    with pytest.raises(openai.BadRequestError):
        ask(stack, previous_response_id=made.id)
    assert stack.client.responses.cancel(made.id).status == "cancelled"
    replica.wait_for(replica.aborted)
    assert until(stack, made.id, "cancelled") == stack.client.responses.cancel(made.id)
    replica.allow(None)
    whole = ask(stack)
    with pytest.raises(openai.BadRequestError):
        stack.client.responses.cancel(whole.id)


def test_a_router_that_ends(says: Callable[..., Any], tmp_path: Path) -> None:
    """What it makes in the background fails, and other routers see it."""
    stack = says("a b c d e f g h")
    stack.fakes["r0"].allow(2)
    made = ask(stack, background=True)
    until(stack, made.id, "in_progress")
    stack.server.should_exit = True
    stack.server.thread.join(20)
    found = ResponseStore(tmp_path / "store", 1 << 20, 3600.0).get("", made.id)
    assert found is not None and found.response.status == "failed" and found.response.error is not None


def test_too_many_in_the_background(says: Callable[..., Any]) -> None:
    stack = says("a b c d e f g h", max_background_responses=1)
    stack.fakes["r0"].allow(2)
    made = ask(stack, background=True)
    with pytest.raises(openai.RateLimitError):
        ask(stack, background=True)
    stack.client.responses.delete(made.id)  # ends it
    stack.fakes["r0"].wait_for(stack.fakes["r0"].aborted)
    stack.fakes["r0"].allow(None)
    assert until(stack, ask(stack, background=True).id, "completed")


def test_following_a_stream_in_the_background(says: Callable[..., Any]) -> None:
    stack = says(THOUGHT)
    stack.fakes["r0"].allow(5)
    stream = ask(stack, background=True, stream=True)
    first = next(iter(stream))
    assert first.type == "response.created"
    stream.close()  # it runs on
    stack.fakes["r0"].allow(None)
    events = list(stack.client.responses.retrieve(first.response.id, stream=True, starting_after=1))
    assert [event.sequence_number for event in events] == list(range(2, len(events) + 2))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "Cold."
    whole = ask(stack)
    with pytest.raises(openai.BadRequestError):
        stack.client.responses.retrieve(whole.id, stream=True)


def test_a_background_response_fails(make_stack: Any, tmp_path: Path) -> None:
    stack = make_stack(config=RouterConfig(response_store_dir=tmp_path, replica_wait_s=0))  # no replica
    made = ask(stack, background=True, stream=True)
    *_, error, failed = made
    assert (error.type, error.code, failed.type) == ("error", "no_replica", "response.failed")
    assert failed.response.error.code == "server_error"
    assert stack.client.responses.retrieve(failed.response.id).status == "failed"


def test_a_stream_breaks_off(says: Callable[..., Any]) -> None:
    stack = says("a b c d e f g h", replica_wait_s=0)
    replica = stack.fakes["r0"]
    replica.allow(3)
    stream = iter(ask(stack, stream=True))
    events = [next(stream) for _ in range(5)]
    replica.die()
    events += stream
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert stack.client.responses.retrieve(events[-1].response.id).status == "failed"


# ---------------------------------------------------------------- nobody makes others wait


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """Holds a method of all stores until the event is set."""
    events: list[threading.Event] = []

    def hold(name: str) -> threading.Event:
        go_on = threading.Event()
        events.append(go_on)
        method = getattr(ResponseStore, name)

        def waits(*arguments: Any) -> Any:
            go_on.wait(20)
            return method(*arguments)

        monkeypatch.setattr(ResponseStore, name, waits)
        return go_on

    yield hold  # type: ignore[misc]
    for event in events:
        event.set()


def test_reads_that_take_long_keep_nothing_from_its_beats(
    says: Callable[..., Any], tmp_path: Path, held: Callable[[str], threading.Event]
) -> None:
    stack = says("Cold.")
    old = ask(stack)
    go_on = held("_find")
    with ThreadPoolExecutor(6) as threads:
        slow = [threads.submit(stack.client.responses.retrieve, old.id) for _ in range(6)]
        made = ask(stack, background=True)
        file = sqlite3.connect(tmp_path / "store" / FILE)
        statuses = until_true(
            lambda: file.execute("SELECT status FROM responses WHERE id = ?", (made.id,)).fetchone(),
            lambda found: found == ("completed",),
        )
        assert statuses and not any(each.done() for each in slow)
        go_on.set()
        assert all(each.result() == old for each in slow)


def until_true(look: Callable[[], Any], is_right: Callable[[Any], bool]) -> Any:
    """Polls: a thread of the server's does it."""
    for _ in range(2000):
        if is_right(found := look()):
            return found
        time.sleep(0.01)
    raise AssertionError(found)


def test_a_client_that_reads_much_keeps_no_other_waiting(
    says: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other's turn is after at most one piece of work in each thread."""
    keys = tmp_path / "keys"
    keys.write_text("one\nother\n")
    stack = says("Cold.", api_key_file=keys)
    one, other = (stack.client.with_options(api_key=key).responses for key in ("one", "other"))
    made = {each: each.create(model="tiny", input="x").id for each in (one, other)}
    order: list[str] = []
    may_read = threading.Semaphore(0)
    response = ResponseStore.response

    def counts(store: ResponseStore, tenant: str, response_id: str) -> Any:
        may_read.acquire(timeout=20)
        order.append(response_id)
        return response(store, tenant, response_id)

    monkeypatch.setattr(ResponseStore, "response", counts)
    waiting: list[int] = []
    run = ClientTurns.run

    async def counted(self: ClientTurns, client: Any, work: Any) -> Any:
        waiting.append(1)
        return await run(self, client, work)

    monkeypatch.setattr(ClientTurns, "run", counted)
    with ThreadPoolExecutor(21) as threads:
        many = [threads.submit(one.retrieve, made[one]) for _ in range(20)]
        until_true(lambda: len(waiting), lambda count: count == 20)
        last = threads.submit(other.retrieve, made[other])
        until_true(lambda: len(waiting), lambda count: count == 21)
        may_read.release(21)
        for each in (*many, last):
            each.result()
    assert order.index(made[other]) <= 2 * READER_THREADS


@pytest.mark.parametrize("here", [True, False])
def test_followers_decode_nothing_and_look_only_where_there_is_something(
    says: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    """Of a response of this router, and of one that another makes."""
    makes = says(THOUGHT)
    asked = makes if here else says("x")
    makes.fakes["r0"].allow(5)
    stream = ask(makes, background=True, stream=True)
    first = next(iter(stream))
    stream.close()
    asked.client.responses.retrieve(first.response.id)
    looks: list[str] = []
    for name in ("response", "input", "position", "events"):
        method = getattr(ResponseStore, name)
        monkeypatch.setattr(
            ResponseStore, name, lambda *given, name=name, method=method: (looks.append(name), method(*given))[1]
        )
    with ThreadPoolExecutor(20) as threads:
        read = asked.client.responses.retrieve
        followers = [
            threads.submit(lambda: list(read(first.response.id, stream=True, starting_after=1))) for _ in range(20)
        ]
        until_true(lambda: looks.count("response"), lambda count: count == 20)  # each asks once whether it is there
        until_true(lambda: looks.count("position"), lambda count: count >= 20)
        makes.fakes["r0"].allow(None)
        events = [each.result() for each in followers]
    assert all(each == events[0] for each in events) and events[0][-1].type == "response.completed"
    assert looks.count("response") == 20 and looks.count("input") == 0
    batches = looks.count("events") / 20
    assert batches <= 6, looks  # of its beats, whatever the number of polls


def test_a_disk_that_fails_for_a_moment_loses_neither_event_nor_end(
    says: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = says(THOUGHT)
    failures = {"beat": 3, "end": 2}

    def failing(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def fails(*arguments: Any, **named: Any) -> Any:
            if (name == "beat" or named.get("new") is False) and failures[name]:
                failures[name] -= 1
                raise sqlite3.OperationalError("disk full")
            return work(*arguments, **named)

        return fails

    monkeypatch.setattr(ResponseStore, "beat", failing("beat", ResponseStore.beat))
    monkeypatch.setattr(ResponseStore, "put", failing("end", ResponseStore.put))
    events = list(ask(stack, background=True, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and failures["beat"] == 0
    made = events[-1].response.id
    until_true(lambda: stack.client.responses.retrieve(made).status, lambda status: status == "completed")
    assert failures["end"] == 0


# ---------------------------------------------------------------- what requests refer to has bounds


def unseen(size: int) -> list[dict[str, Any]]:
    """Items of which most bytes are not in the prompt, where the template leaves thinking out."""
    thought = {"type": "reasoning_text", "text": "x" * size}
    thinking = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]}
    return [{"role": "user", "content": "Hi"}, thinking, {"role": "user", "content": "Sure?"}]


def test_a_chain_has_as_many_bytes_as_a_request_may(make_stack: Any, make_replica: Any, tmp_path: Path) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(response_store_dir=tmp_path, max_body_bytes=4096))
    first = ask(stack, unseen(1500))
    second = ask(stack, unseen(1500), previous_response_id=first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, "Sure?", previous_response_id=second.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "stored_items_too_large")
    assert ask(stack, "Sure?", previous_response_id=first.id)


def test_items_that_are_referred_to_count_each_time(says: Callable[..., Any]) -> None:
    stack = says("Cold.", max_body_bytes=4096)
    made = ask(stack, [{"role": "user", "content": "x" * 400}])
    (item,) = stack.client.responses.input_items.list(made.id).data
    reference = {"type": "item_reference", "id": item.id}
    ask(stack, [reference])
    with pytest.raises(openai.BadRequestError) as caught:
        ask(stack, [reference] * 10)
    assert (caught.value.param, caught.value.code) == ("input", "stored_items_too_large")


def test_what_runs_takes_half_of_the_store_at_most(make_stack: Any, make_replica: Any, tmp_path: Path) -> None:
    stack = make_stack(make_replica(), config=RouterConfig(response_store_dir=tmp_path, response_store_bytes=20_000))
    ask(stack, unseen(4000), background=True)
    with pytest.raises(openai.RateLimitError) as caught:
        ask(stack, unseen(12_000), background=True)
    assert caught.value.code == "overloaded"


# ---------------------------------------------------------------- namespaces

PLAIN = {"type": "function", "name": "weather"}
AGENTS = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [PLAIN]}
MCP = {"type": "namespace", "name": "mcp__maps__", "tools": [PLAIN | {"defer_loading": True}]}
SEARCH = {"type": "web_search", "external_web_access": False}
HELPED = CALL.replace("weather", "agents__weather")


@pytest.mark.parametrize("per_step", [1, 100])
def test_functions_of_namespaces(says: Callable[..., Any], thinker: Tokenizer, per_step: int) -> None:
    names = ("agents__weather", "mcp__maps__weather")
    text = "".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in names)
    stack = says(text, replica={"per_step": per_step})
    tools: list[Any] = [AGENTS, MCP]
    whole = ask(stack, tools=tools)
    expected = [("agents", "weather"), ("mcp__maps__", "weather")]
    assert [(call.namespace, call.name) for call in whole.output] == expected
    assert [tool.type for tool in whole.tools] == ["namespace", "namespace"]
    with stack.client.responses.stream(model="tiny", input="How?", tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [without_ids(item) for item in final.output] == [without_ids(item) for item in whole.output]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(call.namespace, call.name) for call in added] == expected
    done = [event.name for event in events if event.type == "response.function_call_arguments.done"]
    assert done == ["weather"] * 2
    prompt = prompts(stack, thinker)[0]
    assert prompt.count("agents__weather") == prompt.count("mcp__maps__weather") == prompt.count("Helpers.") == 1


def test_calls_of_namespaces_come_back(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says(HELPED, "Cold.")
    first = ask(stack, tools=[AGENTS])
    (call,) = first.output
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "-3"}
    ask(stack, input=[output], previous_response_id=first.id, tools=[AGENTS])
    asked = {"role": "user", "content": "How is it in Oslo?"}
    ask(stack, input=[asked, call.to_dict(), output | {"name": "weather", "namespace": "agents"}], tools=[AGENTS])
    _, stored, sent = prompts(stack, thinker)
    assert stored == sent and '<tool_call>\nagents__weather {"city": "Oslo"}' in sent


@pytest.mark.parametrize(
    "named", [{"name": "weather", "namespace": "agents"}, {"name": "agents__weather"}, {"name": "weather"}]
)
def test_a_function_of_a_namespace_may_be_asked_for(says: Callable[..., Any], named: dict[str, Any]) -> None:
    stack = says(HELPED)
    choice = {"type": "function"} | named
    response = ask(stack, tools=[AGENTS], tool_choice=choice)
    assert response.output[0].namespace == "agents" and response.tool_choice.to_dict() == choice
    ask(stack, tools=[AGENTS], tool_choice={"type": "allowed_tools", "mode": "required", "tools": [choice]})
    both = {
        "model": "tiny",
        "input": "x",
        "tools": [AGENTS, MCP],
        "tool_choice": {"type": "function", "name": "weather"},
    }
    assert httpx.post(f"{stack.url}/v1/responses", json=both).json()["error"]["param"] == "tool_choice"


def test_hosted_tools_are_named_and_left_out(says: Callable[..., Any], thinker: Tokenizer) -> None:
    stack = says("Cold.")
    searched = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "q"},
    }
    body = {"model": "tiny", "input": [searched, {"role": "user", "content": "x"}], "tools": [WEATHER, SEARCH]}
    answer = httpx.post(f"{stack.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Shoal-Ignored"] == "input[type=web_search_call], tools[type=web_search]"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    (prompt,) = prompts(stack, thinker)
    assert "web_search" not in prompt
    listed = stack.client.responses.input_items.list(answer.json()["id"])
    assert [item.type for item in listed] == ["message"]


def test_conversations_are_not_kept_and_the_error_says_what_to_use(says: Callable[..., Any]) -> None:
    with pytest.raises(openai.NotFoundError, match="previous_response_id"):
        says("x").client.conversations.create()


# ---------------------------------------------------------------- custom tools

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": GRAMMAR}
EDIT = '*** Begin Patch\n-"é"\n+C:\\new 😀'
PATCHED = f"<tool_call>{json.dumps({'name': 'apply_patch', 'arguments': {'input': EDIT}})}</tool_call>"


@pytest.mark.parametrize("per_step", [1, 100])
def test_a_custom_tool_gets_one_text(says: Callable[..., Any], thinker: Tokenizer, per_step: int) -> None:
    stack = says(PATCHED, replica={"per_step": per_step})
    tools: list[Any] = [PATCH]
    asked = stack.client.responses.with_raw_response.create(
        model="tiny", input="How?", tools=tools, tool_choice={"type": "custom", "name": "apply_patch"}
    )
    assert asked.headers["x-shoal-ignored"] == "tools[].format"  # a grammar that does not hold
    (call,) = asked.parse().output
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "apply_patch", EDIT, "completed")
    assert asked.parse().tools[0].to_dict() == PATCH
    with stack.client.responses.stream(model="tiny", input="How?", tools=tools) as stream:
        events = list(stream)
    assert [without_ids(item) for item in events[-1].response.output] == [without_ids(call)]
    assert "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta") == EDIT
    assert [e.input for e in events if e.type == "response.custom_tool_call_input.done"] == [EDIT]
    assert "Begin Patch" in prompts(stack, thinker)[0]  # the model knows the grammar


@pytest.mark.parametrize("namespace", [None, "files"])
def test_calls_of_custom_tools_come_back(says: Callable[..., Any], thinker: Tokenizer, namespace: str | None) -> None:
    name = "apply_patch" if namespace is None else "files__apply_patch"
    stack = says(PATCHED.replace("apply_patch", name), "Done.")
    tools = [PATCH] if namespace is None else [{"type": "namespace", "name": namespace, "tools": [PATCH]}]
    first = ask(stack, tools=tools)
    (call,) = first.output
    assert (call.name, getattr(call, "namespace", None)) == ("apply_patch", namespace)
    output = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "applied"}
    ask(stack, input=[output], previous_response_id=first.id, tools=tools)
    asked = {"role": "user", "content": "How is it in Oslo?"}
    ask(stack, input=[asked, call.to_dict(), output], tools=tools)
    _, stored, sent = prompts(stack, thinker)
    assert stored == sent and json.dumps({"input": EDIT}, ensure_ascii=False) in sent and "applied" in sent


def test_a_call_of_a_custom_tool_that_is_cut_off(says: Callable[..., Any]) -> None:
    stack = says(PATCHED[: PATCHED.index("new")])
    response = ask(stack, tools=[PATCH])
    assert response.status == "incomplete" and EDIT.startswith(response.output[0].input)
    assert response.output[0].status == "incomplete" and response.output[0].input.endswith("C:\\")


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "shell"}]}]}, "tools[0].tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        (
            {"tools": [PATCH | {"format": {"type": "grammar", "syntax": "ebnf", "definition": "x"}}]},
            "tools[0].format.syntax",
        ),
        ({"tools": [PATCH, WEATHER | {"name": "apply_patch"}]}, "tools[1].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "custom", "name": "other"}}, "tool_choice"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [WEATHER, WEATHER]}]}, "tools[0].tools[1].name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "tools[0].tools"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"response_format": {"type": "text"}}, "response_format"),
        ({"include": ["x"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": True}, "stream": True}, "stream_options.include_obfuscation"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "local_shell_call", "call_id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "x"}]}, "input[0].name"),
        ({"input": [{"type": "message", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": 3, "y": 1}]}, "input[0].content"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ({"model": "other"}, "model"),
        ({"priority": 9}, "priority"),
        ({"x": 1}, "x"),
    ],
)
def test_refusals(says: Callable[..., Any], fields: dict[str, Any], param: str) -> None:
    stack = says("x")
    answer = httpx.post(f"{stack.url}/v1/responses", json={"model": "tiny", "input": "x"} | fields)
    assert answer.status_code == (404 if param == "model" else 400), answer.text
    assert answer.json()["error"]["param"] == param, answer.text
    assert not stack.fakes["r0"].requests()


DAMAGED = 300
GOOD: dict[str, Any] = {
    "model": "tiny",
    "instructions": "x",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "x"}], "content": None},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "x"},
        {"role": "user", "content": "x"},
    ],
    "tools": [WEATHER],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "metadata": {"a": "b"},
    "max_output_tokens": 4,
    "stream": False,
    "stream_options": None,
    "store": True,
    "truncation": "auto",
    "temperature": 0.5,
    "previous_response_id": None,
}


def test_damaged_requests(says: Callable[..., Any]) -> None:
    stack = says("Cold.")
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=stack.url, timeout=20) as client:
        assert client.post("/v1/responses", json=GOOD).status_code == 200
        for number in range(DAMAGED):
            answer = client.post("/v1/responses", content=damaged_anywhere(random.Random(number), GOOD))
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code in (200, 400, 404), f"{number}: {answer.text}"
            if answer.status_code == 400:
                error = answer.json()["error"]
                assert error["type"] == "invalid_request_error" and 10 <= len(error["message"]) <= 12_000, error
        for path in ("%00", "%ff", "x" * 5000, "%ED%A0%80", "resp_x"):
            for way in ("", "/cancel", "/input_items", "?stream=true", "?starting_after=-1", "?limit=9"):
                method = "POST" if way == "/cancel" else "GET"
                assert client.request(method, f"/v1/responses/{path}{way}").status_code in (400, 404, 414, 431), path
    assert statuses[400] > DAMAGED / 3 and statuses[200] > DAMAGED / 20, statuses
