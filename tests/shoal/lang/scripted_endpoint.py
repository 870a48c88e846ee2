"""An endpoint whose answers follow from the text, over HTTP: OpenAI's completions and chat completions, and Anthropic's
messages, streamed or not. Tests compare runs on it, since it gives the same answer to the same text.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

# Words take the space before them, as those of models' tokenizers do.
_TOKEN = re.compile(r" ?\w+|\s|[^\w\s]")

Json = dict[str, Any]


def tokenize(text: str) -> list[str]:
    """The tokens of a text: words, white space, and other characters one by one."""
    return _TOKEN.findall(text)


def script(continuations: Mapping[str, str]) -> Callable[[str], str]:
    """Answers that go on with known texts, by the texts before them. A prompt that ends with a key, or with a key and a
    part of what follows it, is answered with what is left. Other prompts get an empty answer."""

    def answer(prompt: str) -> str:
        found = ""
        for key, continuation in continuations.items():
            at = prompt.rfind(key)
            since = prompt[at + len(key) :]
            if at >= 0 and continuation.startswith(since) and len(continuation) - len(since) > len(found):
                found = continuation[len(since) :]
        return found

    return answer


@dataclass
class ScriptedAnswer:
    """An answer: its tokens up to the one that completed a stop string, and its text up to that."""

    text: str
    tokens: list[str]
    finish_reason: str
    stop: str | None = None


@dataclass
class ScriptedEndpoint:
    """A server on a free port of this machine, in a thread: `with ScriptedEndpoint(answer) as endpoint`.

    | field | meaning |
    | --- | --- |
    | `answer` | the text that follows a prompt, up to the end of the answer |
    | `refused` | parameters that the endpoint answers with status 400 |
    | `alternatives` | log probabilities of other tokens that chat completions name with each token, if asked for any |
    | `failures` | (status, headers) of the next requests, one after the other |
    | `requests` | (path, body) of all others |
    """

    answer: Callable[[str], str]
    refused: frozenset[str] = frozenset()
    alternatives: Mapping[str, float] = field(default_factory=dict)
    failures: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    requests: list[tuple[str, Json]] = field(default_factory=list)

    def __enter__(self) -> "ScriptedEndpoint":
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def bodies(self) -> list[Json]:
        return [body for _, body in self.requests]

    def generate(self, prompt: str, max_tokens: int, stops: list[str]) -> ScriptedAnswer:
        """The output of one call."""
        text, tokens = "", list[str]()
        for token in tokenize(self.answer(prompt)):
            if len(tokens) == max_tokens:
                return ScriptedAnswer(text, tokens, "length")
            tokens.append(token)
            text += token
            complete = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
            if complete:
                _, at, stop = min(complete)
                return ScriptedAnswer(text[:at], tokens, "stop", stop)
        return ScriptedAnswer(text, tokens, "stop")


def chat_prompt(messages: list[Json], continued: bool) -> str:
    """A conversation as text. `continued`: the last message goes on; otherwise a message of the assistant begins."""
    parts = [f"<{message['role']}>{_plain(message['content'])}" for message in messages]
    return "".join(parts) + ("" if continued else "<assistant>")


def _plain(content: str | list[Json]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


# ---------------------------------------------------------------- the protocols


def _usage(prompt: str, outputs: list[ScriptedAnswer]) -> Json:
    read, written = len(tokenize(prompt)), sum(len(output.tokens) for output in outputs)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _stops(body: Json) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def _token_logprobs(tokens: list[str]) -> list[float]:
    """Log probabilities by which shorter tokens are likelier."""
    return [-float(len(token)) for token in tokens]


def _completion_logprobs(tokens: list[str], body: Json) -> Json | None:
    if body.get("logprobs") is None:
        return None
    values = _token_logprobs(tokens)
    top = [{token: value} for token, value in zip(tokens, values, strict=True)] if body["logprobs"] else None
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": []}


def _chat_logprobs(tokens: list[str], body: Json, alternatives: Mapping[str, float]) -> Json | None:
    if not body.get("logprobs"):
        return None
    entries = []
    others = [_token_entry(token, value) for token, value in alternatives.items()]
    for token, value in zip(tokens, _token_logprobs(tokens), strict=True):
        own = _token_entry(token, value)
        entries.append(own | {"top_logprobs": [own, *others] if body.get("top_logprobs") else []})
    return {"content": entries, "refusal": None}


def _token_entry(token: str, logprob: float) -> Json:
    return {"token": token, "logprob": logprob, "bytes": list(token.encode())}


def _completions(endpoint: ScriptedEndpoint, body: Json) -> Json:
    prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
    choices: list[Json] = []
    read = written = 0
    for prompt in prompts:
        for _ in range(body.get("n") or 1):
            output = endpoint.generate(prompt, body.get("max_tokens", 16), _stops(body))
            echoed = tokenize(prompt) if body.get("echo") else []
            logprobs = _completion_logprobs(echoed + output.tokens, body)
            if logprobs and echoed:
                logprobs["token_logprobs"][0] = None
            choices.append(
                {
                    "index": len(choices),
                    "text": "".join(echoed) + output.text,
                    "finish_reason": output.finish_reason,
                    "logprobs": logprobs,
                }
            )
            written += len(output.tokens)
        read += len(tokenize(prompt))
    usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return {"id": "cmpl-1", "object": "text_completion", "created": 0, "choices": choices, "usage": usage}


def _chat(endpoint: ScriptedEndpoint, body: Json) -> Json:
    prompt = chat_prompt(body["messages"], bool(body.get("continue_final_message")))
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    outputs = [endpoint.generate(prompt, limit, _stops(body)) for _ in range(body.get("n") or 1)]
    choices = [
        {
            "index": number,
            "message": {"role": "assistant", "content": output.text},
            "finish_reason": output.finish_reason,
            "logprobs": _chat_logprobs(output.tokens, body, endpoint.alternatives),
        }
        for number, output in enumerate(outputs)
    ]
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "choices": choices,
        "usage": _usage(prompt, outputs),
    }


def _pieces(text: str, tokens: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The text in pieces of a token; what a stop string cut off has tokens, and no text."""
    at = 0
    for token in tokens:
        yield text[at : at + len(token)], [token]
        at += len(token)


def _openai_events(endpoint: ScriptedEndpoint, body: Json, chat: bool) -> Iterator[str]:
    if chat:
        prompt = chat_prompt(body["messages"], bool(body.get("continue_final_message")))
    else:
        prompt = body["prompt"]
    limit = body.get("max_completion_tokens") or body.get("max_tokens") or 16
    output = endpoint.generate(prompt, limit, _stops(body))
    base = {"id": "stream-1", "object": "chat.completion.chunk" if chat else "text_completion", "created": 0}
    for text, tokens in [*_pieces(output.text, output.tokens), ("", [])]:
        own = {"delta": {"content": text}} if chat else {"text": text}
        logprobs = _chat_logprobs(tokens, body, endpoint.alternatives) if chat else _completion_logprobs(tokens, body)
        reason = None if tokens else output.finish_reason
        choice = {"index": 0, **own, "finish_reason": reason, "logprobs": logprobs if tokens else None}
        yield f"data: {json.dumps(base | {'choices': [choice]})}\n\n"
    if (body.get("stream_options") or {}).get("include_usage"):
        yield f"data: {json.dumps(base | {'choices': [], 'usage': _usage(prompt, [output])})}\n\n"
    yield "data: [DONE]\n\n"


def _anthropic(endpoint: ScriptedEndpoint, body: Json) -> tuple[str, ScriptedAnswer]:
    messages = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    prompt = chat_prompt(messages + body["messages"], body["messages"][-1]["role"] == "assistant")
    return prompt, endpoint.generate(prompt, body["max_tokens"], body.get("stop_sequences") or [])


def _message(prompt: str, output: ScriptedAnswer) -> Json:
    reason = "max_tokens" if output.finish_reason == "length" else "stop_sequence" if output.stop else "end_turn"
    return {
        "id": "msg-1",
        "type": "message",
        "role": "assistant",
        "model": "scripted",
        "content": [{"type": "text", "text": output.text}],
        "stop_reason": reason,
        "stop_sequence": output.stop,
        "usage": {"input_tokens": len(tokenize(prompt)), "output_tokens": len(output.tokens)},
    }


def _anthropic_events(prompt: str, output: ScriptedAnswer) -> Iterator[str]:
    message = _message(prompt, output)
    begun = message | {"content": [], "stop_reason": None, "usage": message["usage"] | {"output_tokens": 1}}
    events: list[Json] = [
        {"type": "message_start", "message": begun},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
    ]
    events += [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        for text, _ in _pieces(output.text, output.tokens)
        if text
    ]
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": output.stop}
    events += [
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": ended, "usage": {"output_tokens": len(output.tokens)}},
        {"type": "message_stop"},
    ]
    for event in events:
        yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"


def _handler(endpoint: ScriptedEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if endpoint.failures:
                status, headers = endpoint.failures.pop(0)
                self._send(status, {"error": {"message": "not now", "type": "busy", "code": "busy"}}, headers)
                return
            endpoint.requests.append((self.path, body))
            if wrong := sorted(endpoint.refused & body.keys()):
                error = {"message": f"Unsupported parameter: {wrong[0]}", "type": "invalid_request_error"}
                self._send(400, {"type": "error", "error": error | {"code": "unsupported_parameter"}})
            elif self.path == "/v1/messages":
                self._answer_anthropic(body)
            elif body.get("stream"):
                self._stream(_openai_events(endpoint, body, self.path == "/v1/chat/completions"))
            else:
                make = _chat if self.path == "/v1/chat/completions" else _completions
                self._send(200, make(endpoint, body) | {"model": body["model"]})

        def _answer_anthropic(self, body: Json) -> None:
            if any(not stop.strip() for stop in body.get("stop_sequences") or ()):
                error = {"type": "invalid_request_error", "message": "stop_sequences: only white space"}
                self._send(400, {"type": "error", "error": error})
                return
            prompt, output = _anthropic(endpoint, body)
            if body.get("stream"):
                self._stream(_anthropic_events(prompt, output))
            else:
                self._send(200, _message(prompt, output))

        def _send(self, status: int, answer: Json, headers: dict[str, str] | None = None) -> None:
            content = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _stream(self, events: Iterator[str]) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for event in events:
                    content = event.encode()
                    self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")
            except ConnectionError:  # the client has heard enough
                self.close_connection = True

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing is logged: `requests` has it."""

    return Handler
