"""Calls of tools by a real model: whether every call's arguments fit the tool's schema, and what that costs.

    shoal bench tools
    shoal bench tools --requests 60 --rounds 1

Validity: every request brings one to three tools with generated schemas, and asks for a call in one of three ways in
turn: `tool_choice` "required", the name of a tool, and "auto" with tools that are `strict`. Half of the answers are
streams. The model draws at temperature 1, so it is the grammar alone that makes a call valid. jsonschema reads the
arguments.

valid        share of the calls that are valid; the last call of an answer that the token limit cut is none
refused      share of the requests whose schema is refused
cut          share of the answers that the token limit cut
auto_called  share of the answers under "auto" that have a call

Throughput: one side asks for calls. The other side sends the same conversations with the same tools, as many at once,
and gets the same numbers of tokens as free text. The sides take turns, and the median of all rounds counts. Before the
rounds, the grammars are compiled, as those of an agent are from its second request on.

throughput_vs_text  tokens per second of calls, divided by those of text
first_call_s        median time until the first call of a tool set whose grammar must be compiled first

The exit code is 1 if a call is not valid, or if a request fails other than by a refusal of its schema.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import httpx

import shoal
from bench import results
from bench.correctness.tool_schemas import made_tools
from bench.correctness.tool_validity import Called, CallingAnswer, Validity
from bench.load.options import count
from bench.results import Figure, number
from shoal.help import Parser

Item = TypeVar("Item")
Value = TypeVar("Value")

MODES = ("required", "named", "auto")
TOOL_SETS, TURNS = 16, 3  # for throughput: conversations with tools of their own, and how often a round asks each
FIRST_SET = 1_000_000  # number of the first of these, so that no other part of the run has compiled them
SHOWN = 5


class CallingClient:
    """Asks a server for calls, `at_once` requests at a time."""

    def __init__(self, transport: httpx.AsyncBaseTransport, url: str, model: str, at_once: int) -> None:
        self._client = httpx.AsyncClient(transport=transport, base_url=url, timeout=None)
        self._model, self._at_once = model, at_once

    async def all(self, ask: Callable[[Item], Awaitable[Value]], items: Iterable[Item]) -> list[Value]:
        """Asks about every item. Returns what `ask` returns, in the order of the items."""
        items = list(items)
        found: dict[int, Value] = {}
        left = iter(enumerate(items))

        async def work() -> None:
            for place, item in left:
                found[place] = await ask(item)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._at_once):
                group.create_task(work())
        return [found[place] for place in range(len(items))]

    async def ask(self, mode: str, body: dict[str, Any]) -> CallingAnswer:
        """Asks for an answer, as a stream if the body says so."""
        response = await self._client.post("/chat/completions", json={"model": self._model, **body})
        if response.status_code != 200:
            return CallingAnswer(mode, error=response.json()["error"]["message"], status=response.status_code)
        return _streamed(mode, response.content) if body.get("stream") else _whole(mode, response.json())


def _whole(mode: str, answer: dict[str, Any]) -> CallingAnswer:
    (choice,) = answer["choices"]
    functions = [call["function"] for call in choice["message"].get("tool_calls") or ()]
    calls = tuple(Called(function["name"], function["arguments"]) for function in functions)
    return CallingAnswer(mode, calls, choice["finish_reason"], answer["usage"]["completion_tokens"])


def _streamed(mode: str, body: bytes) -> CallingAnswer:
    names: list[str] = []
    arguments: list[str] = []
    reason, tokens = None, 0
    for event in body.split(b"\n\n"):
        data = event.removeprefix(b"data: ")
        if not data or data == b"[DONE]":
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            return CallingAnswer(mode, error=chunk["error"]["message"], status=500)
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        for choice in chunk["choices"]:
            reason = choice["finish_reason"] or reason
            for call in choice["delta"].get("tool_calls") or ():
                if "id" in call:
                    names.append(call["function"]["name"])
                    arguments.append("")
                arguments[call["index"]] += call["function"].get("arguments", "")
    return CallingAnswer(mode, tuple(map(Called, names, arguments)), reason, tokens)


def request(number: int, mode: str, most_tokens: int) -> dict[str, Any]:
    """The body of request `number`, with tools of its own."""
    tools = made_tools(number)
    name = tools[number % len(tools)]["function"]["name"]
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Call {name} with arguments that you find interesting."}],
        "tools": tools,
        "temperature": 1,
        "seed": number,
        "max_tokens": most_tokens,
        "parallel_tool_calls": number % 4 == 3,
    }
    match mode:
        case "required":
            body["tool_choice"] = "required"
        case "named":
            body["tool_choice"] = {"type": "function", "function": {"name": name}}
        case "auto":
            body["tools"] = [{**tool, "function": {**tool["function"], "strict": True}} for tool in tools]
            body["messages"] = _with_earlier_calls(body["messages"][0], name)
    return body


def _with_earlier_calls(ask: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """A conversation with calls, after which a small model makes one more by itself."""
    function = {"name": name, "arguments": "{}"}
    call = {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
    return [ask, call, ask, call, ask]


async def validity(client: CallingClient, requests: int, most_tokens: int) -> Validity:
    """Asks for calls of `requests` different sets of tools, and judges all."""

    async def one(number: int) -> CallingAnswer:
        mode = MODES[number % len(MODES)]
        body = request(number, mode, most_tokens)
        if number // len(MODES) % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return await client.ask(mode, body)

    found = Validity()
    answers = await client.all(one, range(requests))
    for place, answer in enumerate(answers):
        found.add(made_tools(place), answer)
    return found


async def throughput(client: CallingClient, rounds: int, most_tokens: int) -> tuple[list[Figure], dict[str, Any]]:
    """Compares calls with text. Returns the figures, and the tokens per second of both sides by round. Raises
    RuntimeError if a request fails."""
    sets = range(FIRST_SET, FIRST_SET + TOOL_SETS)
    firsts = [await _timed(_calls(client, [(number, 0)], most_tokens)) for number in sets]
    asked = [(number, turn) for turn in range(TURNS) for number in sets]
    lengths = await _calls(client, asked, most_tokens)
    rates: dict[str, list[float]] = {"calls": [], "text": []}
    for each in range(rounds):
        sides: dict[str, Callable[[], Awaitable[list[int]]]] = {
            "calls": lambda: _calls(client, asked, most_tokens),
            "text": lambda: _text(client, asked, lengths),
        }
        for side in ("calls", "text") if each % 2 else ("text", "calls"):
            seconds, tokens = await _timed(sides[side]())
            rates[side].append(sum(tokens) / seconds)
    ratios = [calls / text for calls, text in zip(rates["calls"], rates["text"], strict=True)]
    figures = [
        Figure("protocols.tools.throughput_vs_text", statistics.median(ratios), "ratio", True),
        Figure("protocols.tools.calls.tok_s", statistics.median(rates["calls"]), "tokens/s", True),
        Figure("protocols.tools.text.tok_s", statistics.median(rates["text"]), "tokens/s", True),
        Figure("protocols.tools.first_call_s", statistics.median(seconds for seconds, _ in firsts), "s", False),
    ]
    return figures, {"tok_s": rates, "ratios": ratios}


async def _timed(work: Awaitable[Value]) -> tuple[float, Value]:
    began = time.perf_counter()
    done = await work
    return time.perf_counter() - began, done


async def _calls(client: CallingClient, asked: list[tuple[int, int]], most_tokens: int) -> list[int]:
    """The numbers of tokens of calls, by (number of the tools, turn)."""
    bodies = [_measured(number, turn, most_tokens) for number, turn in asked]
    return await _tokens(client, bodies)


async def _text(client: CallingClient, asked: list[tuple[int, int]], lengths: list[int]) -> list[int]:
    """The same as text of these lengths."""
    bodies = [
        _measured(number, turn, length) | {"tool_choice": "auto", "ignore_eos": True}
        for (number, turn), length in zip(asked, lengths, strict=True)
    ]
    return await _tokens(client, bodies)


def _measured(number: int, turn: int, most_tokens: int) -> dict[str, Any]:
    return request(number, "required", most_tokens) | {"seed": turn, "parallel_tool_calls": False}


async def _tokens(client: CallingClient, bodies: list[dict[str, Any]]) -> list[int]:
    answers = await client.all(lambda body: client.ask("required", body), bodies)
    if failed := [answer.error for answer in answers if answer.error is not None]:
        raise RuntimeError(f"a request failed: {failed[0]}")
    return [answer.tokens for answer in answers]


def parser() -> Parser:
    """The command line."""
    p = Parser("shoal bench tools", __doc__ or "")
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="name or folder (default: %(default)s)")
    p.add_argument("--device", default="cpu", help="default: %(default)s")
    p.add_argument("--requests", type=count, default=500, help="requests, each with tools of its own (default 500)")
    p.add_argument("--rounds", type=count, default=7, help="rounds of both sides of the throughput (default 7)")
    p.add_argument("--at-once", type=count, default=16, help="requests at once (default 16)")
    p.add_argument("--most-tokens", type=count, default=256, help="most tokens of an answer (default 256)")
    p.add_argument("--name", default="protocols.tools", help="name of the result (default protocols.tools)")
    p.add_argument(
        "--out", type=Path, default=results.FOLDER, metavar="DIR", help="folder of the result (default: bench/results)"
    )
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures both, prints the figures, writes the result file. Returns the exit code."""
    args = parser().parse_args(argv)
    with shoal.Engine(args.model, device=args.device) as engine:
        client = CallingClient(engine.transport, engine.base_url, engine.model, args.at_once)
        found = asyncio.run(validity(client, args.requests, args.most_tokens))
        client = CallingClient(engine.transport, engine.base_url, engine.model, args.at_once)
        figures, raw = asyncio.run(throughput(client, args.rounds, args.most_tokens))
    figures = found.figures + figures
    for figure in figures:
        print(f"{figure.name:36} {number(figure.value)} {figure.unit}")
    problems = [*found.failed, *found.missing, *found.wrong]
    for problem in [*problems[:SHOWN], *found.refused[:SHOWN]]:
        print(f"    {problem}")
    raw |= {"answers": dict(found.answers), "wrong": found.wrong, "refusals": found.refused, "failures": found.failed}
    print(f"written: {results.write(args.name, figures, raw, folder=args.out).name}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
