"""The offline Python API, with a tiny model and with the real one: a server's answers, and errors by name."""

import asyncio
import gc
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

import shoal
from cluster.config import ConfigError
from cluster.conversion import ModelError
from shoal.engine import Engine, EngineError, GeneratedText, RequestError
from tests.conftest import NEW_TOKENS, NIGHTLY, Reference

pytestmark = pytest.mark.slow  # an engine is a process of its own

WAIT_S = 60.0
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_tokens": 4096, "cpu_threads": 1}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
ENDLESS: dict[str, Any] = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}
PROMPTS = ["Once upon", "a", "The quick brown fox jumps over the lazy dog", "0"]
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[Engine]:
    with shoal.Engine(tiny_model, **SETTINGS) as engine:
        yield engine


def child(engine: Engine) -> psutil.Process:
    """The process of the engine's replica."""
    process = engine._server._replica._process
    assert process is not None
    return psutil.Process(process.pid)


# ---------------------------------------------------------------- import shoal


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import shoal", ["torch", "ray", "transformers", "fastapi", "httpx", "pydantic", "numpy"]),
        ("import shoal; shoal.Engine", ["torch", "ray", "transformers"]),
    ],
)
def test_an_import_takes_no_more_than_it_must(code: str, absent: list[str]) -> None:
    code += f"; import sys; print([name for name in {absent!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_package_names_what_it_has() -> None:
    assert {"Engine", "EngineError", "RequestError", "__version__"} <= set(dir(shoal))
    assert shoal.Engine is Engine
    with pytest.raises(AttributeError, match="'Motor'"):
        shoal.Motor  # noqa: B018


# ---------------------------------------------------------------- answers


def test_a_prompt_has_an_answer_and_a_list_has_a_list(llm: Engine) -> None:
    one = llm.generate("Once upon", **GREEDY)
    assert isinstance(one, GeneratedText)
    assert (one.finish_reason, one.completion_tokens, one.prompt_tokens) == ("length", 12, len("Once upon"))
    assert len(one.token_ids) == 12 and one.logprobs is None
    ids = list(b"Once upon")  # every byte is a token, though not of its own number
    assert isinstance(llm.generate(ids, **GREEDY), GeneratedText)
    assert llm.generate([], **GREEDY) == []
    assert llm.generate(["Once upon"], **GREEDY)[0].text == one.text
    assert [type(answer) for answer in llm.generate([ids, "a", ids], **GREEDY)] == [GeneratedText] * 3


def test_a_batch_is_in_the_order_of_its_prompts(llm: Engine) -> None:
    prompts = [f"{prompt} {number}" for number in range(20) for prompt in PROMPTS]
    together = [answer.token_ids for answer in llm.generate(prompts, **GREEDY)]
    alone = [llm.generate(prompt, **GREEDY).token_ids for prompt in prompts[::9]]
    assert together[::9] == alone and len({tuple(ids) for ids in together}) > 40


def test_a_batch_larger_than_what_may_be_in_flight(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.engine.MAX_IN_FLIGHT", 3)
    whole = [llm.generate(prompt, n=2, seed=1, max_tokens=4) for prompt in PROMPTS]
    batch = llm.generate(PROMPTS, n=2, seed=1, max_tokens=4)
    assert [[a.text for a in answers] for answers in batch] == [[a.text for a in answers] for answers in whole]


def test_what_was_computed_is_found_in_the_cache(llm: Engine) -> None:
    prompt = "A prompt that no other test has, and that is longer than two pages"
    counts = [llm.generate(prompt, **GREEDY).cached_tokens for _ in range(2)]
    assert counts == [0, (len(prompt) - 1) // 16 * 16]


def test_n_answers(llm: Engine) -> None:
    settings: dict[str, Any] = {"temperature": 1, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    three = llm.generate("Once upon", n=3, **settings)
    assert len({tuple(answer.token_ids) for answer in three}) == 3
    assert three[0].token_ids == llm.generate("Once upon", n=1, **settings).token_ids
    assert [answer.completion_tokens for answer in three] == [12] * 3
    assert [len(answers) for answers in llm.chat([HELLO, HELLO], n=2, max_tokens=2)] == [2, 2]


def test_stop_and_structure(llm: Engine) -> None:
    whole = llm.generate("a", regex="abcdef", max_tokens=20)
    assert (whole.text, whole.finish_reason) == ("abcdef", "stop")
    cut = llm.generate("a", regex="abcdef", max_tokens=20, stop=["cd"])
    assert (cut.text, cut.finish_reason) == ("ab", "stop")
    assert cut.token_ids == whole.token_ids[:4]
    assert llm.chat(HELLO, choice=["yes", "no"]).text in ("yes", "no")


def test_log_probabilities(llm: Engine) -> None:
    plain = llm.generate("a", regex="abc", logprobs=2, max_tokens=9)
    chat = llm.chat(HELLO, regex="abc", logprobs=True, top_logprobs=2)
    for answer in (plain, chat):
        assert answer.logprobs is not None
        assert [token.token for token in answer.logprobs[:3]] == ["a", "b", "c"]
        assert all(token.logprob is not None and token.logprob <= 0 for token in answer.logprobs)
    assert all(2 <= len(token.top) <= 3 for token in plain.logprobs)
    assert all(len(token.top) == 2 for token in chat.logprobs)
    assert max(chat.logprobs[0].top.values()) == next(iter(reversed(chat.logprobs[0].top.values())))
    echo = llm.generate("xy", echo=True, logprobs=0, **GREEDY)
    assert echo.text.startswith("xy") and echo.logprobs[0].logprob is None
    streamed = llm.stream("a", regex="abc", logprobs=2, max_tokens=9)
    assert "".join(streamed) == "abc"
    assert [token.token for token in streamed.answer.logprobs or ()] == [token.token for token in plain.logprobs]


@pytest.mark.parametrize("prompt", ["Once upon", list(b"abc"), HELLO], ids=["text", "token ids", "chat"])
def test_a_stream_is_the_whole_answer_in_pieces(llm: Engine, prompt: Any) -> None:
    settings = {"temperature": 0, "max_tokens": 100, "ignore_eos": True}  # what waits to be read becomes one piece
    whole = llm.chat(prompt, **settings) if prompt is HELLO else llm.generate(prompt, **settings)
    stream = llm.stream(prompt, **settings)
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == whole.text and len(pieces) > 1 and all(pieces)
    for name in ("token_ids", "finish_reason", "prompt_tokens"):
        assert getattr(stream.answer, name) == getattr(whole, name)


def test_every_character_may_be_in_a_stream(llm: Engine) -> None:
    text = "a\u2028b\x85c\r\nd\x1ce\n\nf"
    assert "".join(llm.stream("a", choice=[text], max_tokens=40)) == text


def test_the_async_methods_do_the_same(llm: Engine) -> None:
    async def ask() -> tuple[Any, Any, str, Any]:
        stream = llm.stream_async("Once upon", **GREEDY)
        pieces = [piece async for piece in stream]
        assert "".join(pieces) == stream.answer.text
        left = llm.stream_async("Once upon", **ENDLESS)
        async for _ in left:
            break
        await left.aclose()
        answers = await asyncio.gather(
            llm.generate_async(PROMPTS, **GREEDY), llm.chat_async(HELLO, **GREEDY), llm.generate_async("a", **GREEDY)
        )
        return answers[0], answers[1], stream.answer.text, answers[2]

    for _ in range(2):  # each in an event loop of its own
        batch, chat, text, one = asyncio.run(ask())
        assert [answer.text for answer in batch] == [answer.text for answer in llm.generate(PROMPTS, **GREEDY)]
        assert (text, one.text) == (batch[0].text, batch[1].text)
        assert chat.text == llm.chat(HELLO, **GREEDY).text


def test_threads_ask_at_once(llm: Engine) -> None:
    expected = [answer.text for answer in llm.generate(PROMPTS, **GREEDY)]
    with ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda _: llm.generate(PROMPTS, **GREEDY), range(8)))
        streams = list(threads.map(lambda prompt: "".join(llm.stream(prompt, **GREEDY)), PROMPTS))
    assert [[answer.text for answer in batch] for batch in batches] == [expected] * 8
    assert streams == expected


def test_answers_come_as_they_end(llm: Engine) -> None:
    expected = [answer.text for answer in llm.generate(PROMPTS, **GREEDY)]
    assert sorted((i, answer.text) for i, answer in llm.as_completed(PROMPTS, **GREEDY)) == list(enumerate(expected))
    chats = [[{"role": "user", "content": "Hi"}]] * 2
    assert {len(both) for _, both in llm.as_completed(chats, n=2, **GREEDY)} == {2}
    assert list(llm.as_completed([], **GREEDY)) == []
    with pytest.raises(RequestError) as caught:
        list(llm.as_completed(["a", "x" * 5000], **GREEDY))
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.__notes__ == ["at index 1 of the batch"]


def test_a_batch_that_is_dropped_is_cancelled(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    async def answer(prompt: str, parameters: dict[str, Any]) -> str:
        try:
            if prompt == "endless":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return prompt

    monkeypatch.setattr(llm, "_answer", answer)
    batch = llm.as_completed(["short", "endless"])
    assert next(batch) == (0, "short")
    batch.close()
    assert cancelled.wait(WAIT_S)


def test_a_stream_that_is_dropped_ends_the_work(llm: Engine) -> None:
    before = counters(llm)
    for _ in llm.stream("Once upon", **ENDLESS):
        break
    closed = llm.stream("Once upon", **ENDLESS)
    next(closed)
    closed.close()
    with pytest.raises(StopIteration):
        next(closed)
    counters(llm, aborts=before["aborts"] + 2)


def counters(llm: Engine, aborts: float = 0) -> dict[str, float]:
    """The replica's counters by name, once so many requests have been aborted."""

    async def read() -> dict[str, float]:
        async with httpx.AsyncClient(transport=llm.transport, base_url="http://engine", timeout=WAIT_S) as client:
            while True:
                page = (await client.get("/metrics")).text
                found = re.findall(r"^shoal_(\w+)_total\{.*\} (\S+)$", page, re.MULTILINE)
                values = {name: float(value) for name, value in found}
                if values["aborts"] >= aborts:
                    return values
                await asyncio.sleep(0.01)

    return asyncio.run(asyncio.wait_for(read(), WAIT_S))


def test_other_clients_use_its_transport(llm: Engine) -> None:
    async def ask() -> str:
        inside = httpx.AsyncClient(transport=llm.transport)
        async with AsyncOpenAI(base_url=llm.base_url, api_key="none", http_client=inside) as client:
            answer = await client.completions.create(model=llm.model, prompt="a", temperature=0, max_tokens=8)
            return answer.choices[0].text

    assert asyncio.run(ask()) == llm.generate("a", temperature=0, max_tokens=8).text


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("parameters", "param", "code", "says"),
    [
        ({"temperature": 3}, "temperature", "invalid_value", "<= 2"),
        ({"temperatur": 1}, "temperatur", "unknown_parameter", "'temperatur'"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_value", "int"),
        ({"n": 0}, "n", "invalid_value", ">= 1"),
        ({"regex": "("}, "regex", "invalid_value", "("),
        ({"regex": "a", "choice": ["b"]}, "choice", None, "regex"),
        ({"stop_token_ids": [9999]}, "stop_token_ids", None, "9999"),
        ({"max_tokens": 5000}, "max_tokens", "context_length_exceeded", "context"),
        ({"stream": True}, "stream", None, "Engine"),
        ({"model": "other"}, "model", "model_not_found", "'other'"),
    ],
)
def test_a_wrong_parameter_is_refused_by_name(
    llm: Engine, parameters: dict[str, Any], param: str, code: str | None, says: str
) -> None:
    for ask in (llm.generate, lambda prompt, **given: list(llm.stream(prompt, **given))):
        with pytest.raises(RequestError, match=re.escape(says)) as caught:
            ask("Once upon", **parameters)
        assert (caught.value.param, caught.value.code) == (param, code)
    assert llm.generate("Once upon", **GREEDY).finish_reason == "length"


def test_a_stream_has_one_answer(llm: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        list(llm.stream("a", n=2))
    assert caught.value.param == "n"


def test_a_batch_says_which_prompt_is_wrong(llm: Engine) -> None:
    with pytest.raises(RequestError) as caught:
        llm.generate(["a", "b", "x" * 5000, "c"], **GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.__notes__ == ["at index 2 of the batch"]


def test_a_text_is_no_conversation(llm: Engine) -> None:
    with pytest.raises(TypeError, match="list of messages"):
        llm.chat("Hello")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="content"):
        llm.chat([{"role": "user"}])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_runing": 4}, "max_running"),
        ({"page_size": 0}, "page_size: 0"),
        ({"port": 80, "replicas": 2}, "port, replicas: "),
    ],
)
def test_a_wrong_setting_is_refused_by_name(tiny_model: Path, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        shoal.Engine(tiny_model, **settings)


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelError, match="'nowhere'"):
        shoal.Engine("nowhere")


def test_a_replica_that_does_not_load_says_why(tiny_model: Path, tmp_path: Path) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"half a download")
    before = set(psutil.Process().children())
    with pytest.raises(EngineError, match="safetensors"):
        shoal.Engine(tmp_path, device="cpu")
    assert set(psutil.Process().children()) <= before


# ---------------------------------------------------------------- ends


def test_a_replica_that_is_killed_is_an_error_and_no_wait(tiny_model: Path) -> None:
    doomed = shoal.Engine(tiny_model, **SETTINGS)
    replica = child(doomed)
    stream = doomed.stream("Once upon", **ENDLESS)
    next(stream)
    replica.kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        list(stream)
    with pytest.raises(EngineError, match="SIGKILL"):
        doomed.generate(PROMPTS)
    doomed.close()
    doomed.close()
    for ask in (doomed.generate, doomed.stream):
        with pytest.raises(EngineError, match="closed"):
            list(ask("Once upon"))
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(doomed.generate_async("Once upon"))


def test_an_engine_of_two_ranks_keeps_to_schemas_and_leaves_nothing(llm: Engine, tiny_model: Path) -> None:
    engine = shoal.Engine(tiny_model, tp=2, **SETTINGS)
    properties = {"name": {"type": "string", "pattern": "^[a-z]{3,6}$"}, "ok": {"type": "boolean"}}
    schema = {"type": "object", "properties": properties, "required": ["name", "ok"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    formed = [one.generate(PROMPTS, response_format=form, max_tokens=60, seed=5) for one in (engine, llm)]
    assert [answer.token_ids for answer in formed[0]] == [answer.token_ids for answer in formed[1]]
    for answer in formed[0]:
        said = json.loads(answer.text)
        assert re.fullmatch("[a-z]{3,6}", said["name"]) and said["ok"] in (True, False) and len(said) == 2
    replica = child(engine)
    family = [replica, *replica.children()]
    stream = engine.stream("Once upon", **ENDLESS)
    next(stream)
    pending = threading.Thread(target=engine.close)
    pending.start()
    with pytest.raises(EngineError, match="closed"):
        list(stream)
    pending.join()
    assert len(family) > 1 and psutil.wait_procs(family, WAIT_S)[1] == []
    dropped = engine._close
    del engine, stream
    gc.collect()
    assert not dropped.alive


SCRIPT = """
import os, signal, sys, threading
import shoal

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it

def interrupt():
    os.killpg(0, signal.SIGINT)  # as a terminal and a notebook do

llm = shoal.Engine(sys.argv[1], device="cpu", dtype="float32", kv_tokens=4096, cpu_threads=1)
asked = {"temperature": 0, "max_tokens": 4000, "ignore_eos": True}
for ask in (lambda: llm.generate("Once upon", **asked), lambda: list(llm.stream("Once upon", **asked))):
    try:
        threading.Thread(target=interrupt).start()
        ask()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
print(llm.generate("a", regex="abcdef").text, flush=True)
forked = os.fork()
if not forked:
    try:
        llm.generate("a")
    except shoal.EngineError as error:
        print(error, flush=True)
    sys.exit(0)
os.waitpid(forked, 0)
print(llm.generate("a", regex="abcdef").text, flush=True)
print(llm._server._replica._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ctrl_c_leaves_it_usable_and_its_process_takes_the_replica_along(tiny_model: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tiny_model)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, start_new_session=True, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    *said, in_fork, after, pid = done.stdout.splitlines()
    assert said == ["interrupted", "interrupted", "abcdef"] and "fork" in in_fork and after == "abcdef"
    if psutil.pid_exists(int(pid)):
        psutil.Process(int(pid)).wait(WAIT_S)


# ---------------------------------------------------------------- the real model


def test_a_schema_that_is_enforced_in_part_says_whether_it_is_kept(llm: Engine) -> None:
    """No grammar says that an array has a 2 in it. Some answers have none, and are sampled again."""
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "contains": {"const": 2}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": False}}
    answers = llm.generate(list("abcdef"), response_format=form, max_tokens=30, temperature=1, seed=1)
    again = 0
    for answer in answers:
        assert answer.schema_check["not_enforced"] == ["contains at #"] and answer.finish_reason == "stop"
        assert answer.schema_check["valid"] == (2 in json.loads(answer.text))
        again += answer.schema_check["sampled_again"]
    assert again
    with pytest.raises(RequestError, match="contains at #"):
        llm.generate("a", response_format={**form, "json_schema": {**form["json_schema"], "strict": True}})


def test_every_token_is_what_transformers_generates(real_engine: Engine, reference: Reference) -> None:
    greedy = {"temperature": 0, "max_tokens": NEW_TOKENS}
    some = slice(None, None, 1 if NIGHTLY else 8)
    answers = real_engine.generate(reference.prompts[some], **greedy)
    assert [answer.token_ids for answer in answers] == reference.said[some]
    chats = real_engine.chat(reference.chats, **greedy)
    first = reference.first_chat
    assert [answer.token_ids for answer in chats] == reference.said[first : first + len(chats)]
    streamed = [real_engine.stream(messages, **greedy) for messages in reference.chats]
    assert ["".join(stream) for stream in streamed] == [answer.text for answer in chats]


def test_the_readme_runs_as_written(
    real_engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an engine that is loaded already."""
    page = (Path(__file__).parents[2] / "README.md").read_text()
    section = page.split("## Python, without a server\n", 1)[1].split("\n## ", 1)[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    monkeypatch.setattr(shoal, "Engine", lambda model: nullcontext(real_engine))
    exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert os.getpid() == real_engine._server._pid
