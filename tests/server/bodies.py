"""Requests by the thousand: valid ones that use every parameter, and what becomes of them when they are damaged. All
from a `random.Random`, so that a number brings the same request back.
"""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from router.wire.messages_types import CountTokensRequest, MessagesRequest
from router.wire.requests import ChatRequest, CompletionRequest, EmbeddingsRequest, RerankRequest, ScoreRequest
from router.wire.responses_types import ResponsesRequest

MODEL = "tiny-llama"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
COUNT_TOKENS = f"{MESSAGES}/count_tokens"
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
TEXTS = ["a", "Hello there!", "naïve café 🦊", "\x00\x7f", "日本", " \n\t", "<|end|>", "{}", '"', "the " * 6]
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok"],
    "additionalProperties": False,
}
GRAMMARS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, "b", None]}}}},
    {"response_format": {"type": "json_object"}},
    {"regex": "[a-c]{2,5}"},
    {"regex": "(yes|no)!?"},
    {"choice": ["red", "green", "naïve 🦊"]},
    {"ebnf": 'root ::= ("x" | "y"){1,3}'},
    {"response_format": {"type": "structural_tag", "format": {"type": "regex", "pattern": "[ab]{1,9}"}}},
]
JUNK: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    2**31,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e-320,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    " ",
    "x",
    "1",
    "null",
    "\x00",
    "\ud800",
    "\udfff\ud800",
    "🦊",
    "é" * 999,
    "x" * 70_000,
    [],
    [[]],
    [None],
    [0],
    [258],
    [2**31 - 1],
    ["a", 1],
    [[1], "a"],
    [""],
    {},
    {"a": 1},
    {"": {}},
    {"type": "text"},
    {"type": "json_schema"},
    {"type": "x"},
    {"role": "user"},
    [{"role": "tool", "content": "x"}],
    {"0": 101},
    {"0": 1},
    {"-1": 1},
    {"9" * 30: 1},
    {"²": 1},
    {"1e1": 1},
    [{"type": "image_url", "image_url": {"url": "x"}}],
    {"id": "p", "branch": "b"},
    {"id": "p", "branch": "b", "continues": True},
]
BAD: dict[str, list[Any]] = {
    "regex": r"( [ * a{9999999} (a*)*b \1 (?=a) (?P<n>a) \p{L} [^\s\S] ^$ (?i)x [z-a] \ x{3,1} (a{1,99}){1,99}".split(),
    "ebnf": ["root ::=", "root ::= root", "x", 'a ::= "b"', 'root ::= "a" root', 'root ::= b\nb ::= "', "root ::= ["],
    "choice": [["\x00"], ["a", "a"], ["<|end|>"], ["x" * 5000], [str(i) for i in range(900)]],
}
BAD["regex"] += ["(" * 500 + ")" * 500, "a|" * 3000, "\ud800"]
BAD["ebnf"] += [
    'root ::= ""',
    "root ::= " + "(" * 2000,
    'root ::= ("a"?){1,99999}',
    "root ::= root | root",
    "\x00",
    "é",
]
BAD_GRAMMARS: list[dict[str, Any]] = [{name: grammar} for name, grammars in BAD.items() for grammar in grammars]
BAD_SCHEMAS: list[Any] = [
    {"type": "nope"},
    {"type": 1},
    {"$ref": "#/nope"},
    {"$ref": "http://x/y"},
    {"$ref": "#"},
    {"not": {}},
    {"enum": []},
    {"type": "string", "pattern": "("},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"multipleOf": 0},
    {"allOf": []},
    {"type": "integer", "minimum": 10**400},
    {"type": "number", "maximum": 1e308, "minimum": -1e308},
    {"const": 10**400},
    {"properties": []},
    {"required": "x"},
    {"items": 3},
    {"type": []},
    {"type": ["string", "string"]},
    {"minLength": -1},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
    {"type": "string", "format": "nope"},
    {"const": "\ud800"},
    {"type": "object", "properties": {str(i): {} for i in range(300)}},
    {"type": "array", "minItems": 10**9},
    {"x-y": 1},
]
SCHEMA_FIELDS: dict[str, list[Callable[[Any], dict[str, Any]]]] = {  # where a schema stands, by endpoint
    path: [
        lambda schema: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        lambda schema: {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
        },
    ]
    for path in (CHAT, COMPLETIONS)
} | {
    RESPONSES: [
        lambda schema: {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}},
        lambda schema: {"tools": [{"type": "function", "name": "f", "parameters": schema}], "tool_choice": "required"},
    ],
    MESSAGES: [
        lambda schema: {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        lambda schema: {"tools": [{"name": "f", "input_schema": schema}], "tool_choice": {"type": "any"}},
    ],
}
FIELDS = """
model messages prompt max_tokens max_completion_tokens n temperature top_p top_k min_p presence_penalty
frequency_penalty repetition_penalty logit_bias seed stop stop_token_ids tools min_tokens ignore_eos
skip_special_tokens priority user response_format regex choice ebnf stream stream_options logprobs
top_logprobs echo best_of suffix audio store metadata tool_choice functions modalities service_tier
reasoning_effort chat_template_kwargs prompt_cache_key Model __class__ structured_outputs guided_json guided_regex
guided_choice guided_grammar include_stop_str_in_output length_penalty program choices unconditional
parallel_tool_calls thinking_token_budget enable_thinking think continue_final_message add_generation_prompt rid
use_beam_search prompt_logprobs allowed_token_ids bad_words truncate_prompt_tokens truncation_side truncate
input instructions previous_response_id background include text reasoning truncation max_output_tokens
system thinking output_config output_format stop_sequences cache_control query documents top_n return_documents
text_1 text_2 queries dimensions encoding_format instruction
""".split()
FIELDS += ["", "\ud800"]
KNOWN: dict[str, list[str]] = {
    path: list(fields.__struct_fields__)
    for path, fields in {
        CHAT: ChatRequest,
        COMPLETIONS: CompletionRequest,
        RESPONSES: ResponsesRequest,
        MESSAGES: MessagesRequest,
        COUNT_TOKENS: CountTokensRequest,
        EMBEDDINGS: EmbeddingsRequest,
        RERANK: RerankRequest,
        SCORE: ScoreRequest,
    }.items()
}
CONTENT_TYPES = [
    None,
    "application/json",
    "text/plain",
    "application/x-www-form-urlencoded",
    "application/json; charset=utf-16",
    "multipart/form-data; boundary=x",
    "*/*",
    "x",
    "",
]
PATHS = [
    *"""
/ // /v1 /v1/ /v1/models/ /v1/models/%00 /v1/models/..%2f.. /v1/models/é /v1/completions/ /V1/completions
/v1/chat /v1/choices /v1/programs/x
/v1/embeddings /v1/rerank /rerank /v1/score /tokenize /detokenize
/tokenizer_info /health_generate /flush_cache /reset_prefix_cache /abort_request /abort_requests
/health /ping /version /ready /metrics /docs /openapi.json
/v1/messages /v1/messages/count_tokens /v1/messages/x
/v1/responses /v1/responses/x /v1/responses/x/input_items /v1/responses/%00/cancel
/v1/models?x=%ff
/%ff /favicon.ico /v1/models
""".split(),
    "/v1/models/" + MODEL,
    "/v1/models/" + "x" * 5000,
    CHAT,
    COMPLETIONS,
]
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"]


@dataclass(frozen=True)
class Sent:
    """One HTTP request."""

    path: str
    content: bytes
    method: str = "POST"
    headers: dict[str, str | bytes] = field(default_factory=dict)


def encoded(value: Any) -> bytes:
    """JSON, or nearly: NaN, infinities and lone surrogates too."""
    return json.dumps(value).encode()


# ---------------------------------------------------------------- valid


def valid(random: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body of a chat or a completion, both without tools, that gets status 200."""
    chat = random.random() < 0.4
    return (CHAT, valid_chat(random)) if chat else (COMPLETIONS, valid_completion(random))


def valid_chat(random: random.Random) -> dict[str, Any]:
    """A chat that gets status 200. Its text is the same every time: it is greedy or has a seed."""
    limit = random.randint(1, 12)
    return _drawn(random, _chat(random, limit), limit)


def valid_completion(random: random.Random) -> dict[str, Any]:
    """A completion, as `valid_chat`."""
    limit = random.randint(1, 12)
    return _drawn(random, _completion(random, limit), limit)


def _drawn(random: random.Random, fields: dict[str, Any], limit: int) -> dict[str, Any]:
    """The body with parameters of sampling."""
    body = {"model": MODEL, **fields}
    for name, value in _optional(random, limit).items():
        if random.random() < 0.25:
            body[name] = value
    if body.get("temperature") != 0:
        body["seed"] = random.choice([0, 1, -5, 2**63 - 1, -(2**63), random.getrandbits(40)])
    if random.random() < 0.15:
        body |= copy.deepcopy(random.choice(GRAMMARS))
    return body


def _optional(random: random.Random, limit: int) -> dict[str, Any]:
    def number(low: float, high: float) -> float:
        return random.choice([low, high, random.uniform(low, high)])

    return {
        "temperature": random.choice([0, 0, 1e-5, number(0, 2)]),
        "top_p": random.choice([1, 0, 1e-6, random.uniform(0.01, 1)]),
        "top_k": random.choice([-1, 0, 1, 2, 50, 2**31 - 1]),
        "min_p": number(0, 1),
        "presence_penalty": number(-2, 2),
        "frequency_penalty": number(-2, 2),
        "repetition_penalty": random.choice([0.01, 100, 1, random.uniform(0.5, 2)]),
        "logit_bias": {str(random.randrange(258)): number(-100, 100) for _ in range(random.randint(0, 5))},
        "stop": random.choice(["e", ["a", "b"], [], ["\x00", " "], "never to be found", ["é", "🦊"]]),
        "stop_token_ids": random.choice([[], [257], random.sample(range(258), 40)]),
        "min_tokens": random.randint(0, limit),
        "include_stop_str_in_output": random.choice([True, False, None]),
        "ignore_eos": random.choice([True, False, None]),
        "skip_special_tokens": random.choice([True, False, None]),
        "allowed_token_ids": random.choice([None, None, [*range(258)], random.sample(range(258), 90)]),
        "bad_words": random.choice([[], ["e"], ["a b", "the", "é"]]),
        "prompt_logprobs": random.choice([None, 0]),
        "truncate_prompt_tokens": random.choice([None, -1]),
        "return_token_ids": random.choice([True, False]),
        "request_id": random.choice([None, "mine", "é"]),
        "priority": random.choice([0, 1, -1, 2**31 - 1, -(2**31)]),
        "user": random.choice(["somebody", "", None]),
        "n": random.choice([1, 1, 2, 3]),
        "response_format": random.choice([None, {"type": "text"}]),
    }


def _chat(random: random.Random, limit: int) -> dict[str, Any]:
    def message() -> dict[str, Any]:
        text = random.choice(TEXTS)
        parts = [{"type": "text", "text": text}, {"type": "text", "text": "!"}]
        made = {"role": random.choice(["system", "developer", "user", "assistant"]), "content": text}
        return made | random.choice([{}, {}, {"content": parts}, {"name": "me"}, {"tool_calls": [], "audio": None}])

    body: dict[str, Any] = {"messages": [message() for _ in range(random.randint(1, 3))]}
    body[random.choice(["max_tokens", "max_completion_tokens"])] = limit
    if random.random() < 0.3:
        body |= {"logprobs": True} | random.choice([{}, {"top_logprobs": random.randint(0, 20)}])
    if random.random() < 0.2:
        body |= {
            "store": True,
            "think": None,
            "use_beam_search": False,
            "tools": [],
            "service_tier": "auto",
            "parallel_tool_calls": True,
            "metadata": {},
        }
        body |= {"prompt_cache_key": "k", "chat_template_kwargs": {"enable_thinking": False, "a": [1, {}]}}
    return body


def _completion(random: random.Random, limit: int) -> dict[str, Any]:
    def token_ids() -> list[int]:
        return [random.randrange(258) for _ in range(random.randint(1, 30))]

    texts = random.sample(TEXTS, 3)
    body: dict[str, Any] = {"prompt": random.choice([texts[0], texts, token_ids(), [token_ids(), token_ids()]])}
    if random.random() < 0.9:
        body["max_tokens"] = limit
    for name, value in {"echo": True, "logprobs": random.randint(0, 20), "suffix": None}.items():
        if random.random() < 0.25:
            body[name] = value
    return body


# ---------------------------------------------------------------- damaged


def damaged(random: random.Random, path: str, body: dict[str, Any]) -> Sent:
    """A request with something wrong with it, mostly. `body`: a valid one, which is changed."""
    if random.random() < 0.08:
        return Sent(random.choice(PATHS), random.choice([b"", b"{}", b"\xff"]), random.choice(METHODS))
    if random.random() < 0.15 and path in (CHAT, COMPLETIONS):
        path = random.choice(["/tokenize", "/detokenize"])
        body = {k: v for k, v in body.items() if k in ("model", "prompt", "messages")}
        if path == "/detokenize":
            body = {"model": MODEL, "tokens": [random.randrange(258) for _ in range(9)]}
    for _ in range(random.choice([1, 1, 2, 4])):
        _damage(random, path, body)
    if random.random() < 0.2:
        body |= {"stream": True} | random.choice([{}, {"stream_options": {"include_usage": True}}])
    content = encoded(body)
    if random.random() < 0.25:
        content = _bytes(random, content)
    headers: dict[str, str | bytes] = {}
    if random.random() < 0.2:
        kind = random.choice(CONTENT_TYPES)
        headers = {} if kind is None else {"Content-Type": kind}
    if random.random() < 0.1:
        other = {"Authorization": b"Bearer \xe9", "Content-Encoding": "gzip", "Accept": "x", "Range": "bytes=9-"}
        headers |= dict([random.choice(list(other.items()))])
    return Sent(path, content, headers=headers)


def _damage(random: random.Random, path: str, body: dict[str, Any]) -> None:
    """Changes one thing."""
    what = random.random()
    if what < 0.15 and path in (CHAT, COMPLETIONS):
        body |= copy.deepcopy(random.choice(BAD_GRAMMARS))
    elif what < 0.3 and path in SCHEMA_FIELDS:
        body |= copy.deepcopy(random.choice(SCHEMA_FIELDS[path])(random.choice(BAD_SCHEMAS)))
    elif what < 0.4 and body:
        del body[random.choice(list(body))]
    elif what < 0.5:
        body[random.choice(KNOWN.get(path, FIELDS))] = None  # as if it were left out, mostly
    elif what < 0.7:
        names = KNOWN.get(path, FIELDS) if random.random() < 0.8 else FIELDS
        body[random.choice(names)] = copy.deepcopy(random.choice(JUNK))
    else:
        _inside(random, body)


def _inside(random: random.Random, value: Any) -> None:
    """Puts junk somewhere in a value, however deep."""
    while True:
        keys: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value)))
        if not keys:
            return
        key = random.choice(keys)
        if not isinstance(value[key], dict | list) or random.random() < 0.3:
            value[key] = copy.deepcopy(random.choice(JUNK))
            return
        value = value[key]


def damaged_anywhere(random: random.Random, good: dict[str, Any]) -> bytes:
    """The JSON of a good body with one to three places, however deep, overwritten, taken out or added to; now and then
    with other bytes."""
    body = copy.deepcopy(good)
    for _ in range(random.randint(1, 3)):
        container, key = random.choice(list(_places(body)) or [(body, "x")])
        junk = copy.deepcopy(random.choice([*JUNK, random.choice(list(good.values()))]))
        match random.randrange(4):
            case 0 if key != "x":
                del container[key]
            case 1 if isinstance(container, dict):
                container[random.choice(["x", "type", "role", "id", "status", "cache_control", "input"])] = junk
            case _:
                container[key] = junk
    content = encoded(body)
    if random.random() < 0.1:
        at = random.randrange(len(content))
        content = content[:at] + bytes([random.randrange(256)]) * random.randint(0, 3) + content[at + 1 :]
    return content


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a body, with each of its keys."""
    for key, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(part, dict | list):
            yield from _places(part)


def _bytes(random: random.Random, content: bytes) -> bytes:
    """Damages the JSON itself."""
    at = random.randrange(len(content) + 1)
    depth = random.choice([10, 900, 5000, 100_000])
    return random.choice(
        [
            content[:at],
            content[:at] + bytes([random.randrange(256)]) + content[at + 1 :],
            content[:at] + b"\xff\xfe" + content[at:],
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            content + content,
            b"[" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b'{"model":' + content[1:],
            b'{"messages":' + b"[" * depth + b"]" * depth + b"}",
            content[:-1] + b',"model":"tiny-llama","n":1,"n":2}',
            content[:-1] + b',"logit_bias":' + b'{"1":' * depth + b"1" + b"}" * depth + b"}",
            content[:-1] + b',"seed":' + b"9" * depth + b"}",
            content[:-1] + b',"temperature":NaN}',
            content[:-1] + b',"top_p":1e-999999}',
            content[:-1] + b',"user":"\\u0000\\ud83d"}',
            b" " * depth + content,
            b"",
            b"null",
            b"x" * ((1 << 20) + 1),
        ]
    )
