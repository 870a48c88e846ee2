"""Valid bodies for the endpoints besides plain completions: a conversation with tools in each protocol's form, and what
has no text for an answer. Damaged ones are made of them by `bodies.damaged`.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

from .bodies import (
    CHAT,
    COMPLETIONS,
    COUNT_TOKENS,
    EMBEDDINGS,
    MESSAGES,
    MODEL,
    RERANK,
    RESPONSES,
    SCHEMA,
    SCORE,
    TEXTS,
    valid_chat,
    valid_completion,
)

PARAMETERS: list[dict[str, Any]] = [
    SCHEMA,
    {"type": "object", "properties": {}},
    {"type": "object", "properties": {"q": {"type": "string", "enum": ["a", "naïve 🦊"]}}, "required": ["q"]},
    {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": ["integer", "null"]}}},
]
FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}


def _some(chance: random.Random, fields: dict[str, Any], share: float = 0.25) -> dict[str, Any]:
    """Some of the fields."""
    return {name: copy.deepcopy(value) for name, value in fields.items() if chance.random() < share}


def _functions(chance: random.Random) -> list[tuple[str, dict[str, Any]]]:
    names = chance.sample(["get", "mcp.x:read", "A-b_9"], chance.randint(1, 2))
    return [(name, copy.deepcopy(chance.choice(PARAMETERS))) for name in names]


# ---------------------------------------------------------------- chat completions


# Fields that other servers and the clients' packages add.
OTHERS: dict[str, Any] = {"parsed": {"a": [1]}, "extra_content": {"x": "y"}, "reasoning_details": [{}], "timestamp": 1}


def chat_tools(chance: random.Random) -> dict[str, Any]:
    """A chat with tools, and often with calls in its history."""
    functions = _functions(chance)
    name = functions[0][0]
    called = {"name": name, "arguments": chance.choice(['{"ok": true}', {"ok": True}, None])} | _some(chance, OTHERS)
    call = {"id": "call_1", "type": "function", "function": called}
    parts = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "x", "role": "assistant"}]
    said = chance.choice([None, "", "Hm.", [], parts])
    answer = {"role": "assistant", "content": said, "tool_calls": [call]} | _some(chance, OTHERS)
    result = {
        "role": "tool",
        "tool_call_id": "call_1",
        "content": chance.choice(["1", [{"type": "text", "text": "é"}]]),
    }
    messages: list[dict[str, Any]] = [{"role": "user", "content": chance.choice(TEXTS)}]
    messages += chance.choice([[], [answer, result], [answer, result, {"role": "user", "content": "?"}]])
    tools = [
        {
            "type": "function",
            "function": {"name": each, "parameters": schema, **_some(chance, {"strict": True, "description": "x"})},
        }
        for each, schema in functions
    ]
    named = {"type": "function", "function": {"name": name}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    optional = {
        "tool_choice": chance.choice(["none", "auto", "required", named, allowed]),
        "parallel_tool_calls": chance.choice([True, False]),
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        "reasoning_effort": chance.choice(["none", "low", "high"]),
        "thinking_token_budget": 3,
        "temperature": 0,
        "n": 2,
    }
    return {"model": MODEL, "messages": messages, "max_tokens": chance.randint(1, 16), "tools": tools} | _some(
        chance, optional, 0.4
    )


# ---------------------------------------------------------------- responses


def responses(chance: random.Random) -> dict[str, Any]:
    """A response of a text, or of items with calls in them. One of five is stored, in the background now and then."""
    functions = _functions(chance)
    name = functions[0][0]
    text = chance.choice(TEXTS)
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}
        | _some(chance, OTHERS | {"namespace": "group"}),
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]},
        {"role": "user", "content": text},
    ]
    body: dict[str, Any] = {
        "model": MODEL,
        "input": chance.choice([text, items[:2], items[1:], items[-1:]]),
        "max_output_tokens": chance.randint(1, 16),
    }
    body |= chance.choice([{"store": False}] * 4 + [{"store": True, "background": chance.random() < 0.5}])
    tools = [
        {"type": "function", "name": each, "parameters": schema, **_some(chance, {"strict": False})}
        for each, schema in functions
    ]
    if chance.random() < 0.5:
        hosted = [{"type": "web_search", "external_web_access": False}]
        group = [{"type": "namespace", "name": "group", "tools": tools[:1]}]
        body["tools"] = tools + chance.choice([[], hosted, group])
        choice = chance.choice(["none", "auto", "required", {"type": "function", "name": name}])
        body |= _some(chance, {"tool_choice": choice, "parallel_tool_calls": False}, 0.5)
    optional = {
        "instructions": "Say little.",
        "text": chance.choice([{"format": FORM}, {"format": {"type": "text"}}, {"format": {"type": "json_object"}}]),
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"],
        "truncation": chance.choice(["auto", "disabled"]),
        "metadata": {"a": "b"},
        "temperature": chance.choice([0, 1, 2]),
        "top_p": 0.5,
        "user": "someone",
        "stream": not body.get("background"),
    }
    return body | _some(chance, optional)


# ---------------------------------------------------------------- messages


def count_tokens(chance: random.Random) -> dict[str, Any]:
    """A conversation in Anthropic's form."""
    functions = _functions(chance)
    name = functions[0][0]
    text = chance.choice([text for text in TEXTS if text.strip()])
    used = {"type": "tool_use", "id": "toolu_1", "name": name, "input": {"ok": True}} | _some(chance, OTHERS)
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1"}
    turns: list[dict[str, Any]] = [{"role": "user", "content": chance.choice([text, [{"type": "text", "text": text}]])}]
    history = [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, used]},
        {"role": "user", "content": [result, {"type": "text", "text": "?"}]},
    ]
    turns += chance.choice([[], history, [{"role": "assistant", "content": "It is"}]])
    body: dict[str, Any] = {"model": MODEL, "messages": turns}
    if chance.random() < 0.5:
        body["tools"] = [
            {"name": each, "input_schema": schema, **_some(chance, {"description": "x", "strict": True})}
            for each, schema in functions
        ] + chance.choice([[], [{"type": "web_search_20250305", "name": "web_search"}]])
        kinds = [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": name}, {"type": "none"}]
        body |= _some(chance, {"tool_choice": {**chance.choice(kinds)}}, 0.5)
    system = chance.choice(["Be brief.", [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]])
    return body | _some(chance, {"system": system})


def messages(chance: random.Random) -> dict[str, Any]:
    """The same, to be answered."""
    body = count_tokens(chance) | {"max_tokens": chance.randint(1, 16)}
    optional = {
        "stop_sequences": ["a", "é"],
        "temperature": chance.choice([0, 0.5, 1]),
        "top_p": 0.9,
        "top_k": 5,
        "metadata": {"user_id": "x"},
        "stream": True,
        "thinking": {"type": "disabled"},
    }
    return body | _some(chance, optional)


# ---------------------------------------------------------------- answers without text


def embeddings(chance: random.Random) -> dict[str, Any]:
    """Texts and tokens to embed."""
    texts = [text for text in TEXTS if text]
    token_ids = [[chance.randrange(258) for _ in range(chance.randint(1, 30))] for _ in range(2)]
    given = chance.choice([texts[0], texts[:3], token_ids[0], token_ids])
    optional = {"encoding_format": chance.choice(["float", "base64"]), "dimensions": chance.randint(1, 64), "user": "x"}
    optional |= {"truncate_prompt_tokens": 9, "truncation_side": "left", "truncate": "END"}
    return {"model": MODEL, "input": given} | _some(chance, optional)


def rerank(chance: random.Random) -> dict[str, Any]:
    """A query and documents."""
    documents = [chance.choice([text, {"text": text}]) for text in chance.sample(TEXTS, chance.randint(1, 5))]
    optional = {"top_n": chance.randint(1, 9), "return_documents": False, "instruction": "Find it.", "user": "x"}
    optional |= {"truncate_prompt_tokens": -1}
    return {"model": MODEL, "query": chance.choice(TEXTS), "documents": documents} | _some(chance, optional)


def score(chance: random.Random) -> dict[str, Any]:
    """Pairs of texts by either pair of names."""
    first, second = chance.choice([("text_1", "text_2"), ("queries", "documents")])
    several = chance.sample(TEXTS, 3)
    queries = chance.choice([several[0], several, several[:1]])
    return {"model": MODEL, first: queries, second: several} | _some(
        chance, {"instruction": "Find it.", "truncate": True}
    )


ENDPOINTS: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    CHAT: lambda chance: chance.choice([valid_chat, chat_tools])(chance),
    COMPLETIONS: valid_completion,
    RESPONSES: responses,
    MESSAGES: messages,
    COUNT_TOKENS: count_tokens,
    EMBEDDINGS: embeddings,
    RERANK: rerank,
    SCORE: score,
}
