"""Streams that never stop coming, and what became of each: `python -m tests.deploy.streams URL CLIENTS TOKENS`.

Runs in a network of its own, so it is a program. Each client asks for stream after stream at temperature 0, always with
the same prompt. At the end of standard input no new ones begin, and once all have ended they are written as JSON.
"""

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import httpx


@dataclass
class Stream:
    """`text` is empty if it failed at once. `gap_s`: the longest between two pieces. `problem`: why it is not whole."""

    client: int
    began_s: float
    text: str = ""
    pieces: int = 0
    gap_s: float = 0.0
    ended_s: float = 0.0
    problem: str | None = None


async def stream(http: httpx.AsyncClient, url: str, client: int, tokens: int) -> Stream:
    """One stream, read to its end."""
    found = Stream(client, time.time())
    body = {"model": "tiny-llama", "prompt": f"client {client}", "max_tokens": tokens, "stream": True}
    body |= {"temperature": 0, "ignore_eos": True}
    reason: Any = None
    is_done = False
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                found.problem = f"{answer.status_code}: {(await answer.aread()).decode()[:500]}"
            last = time.monotonic()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    piece = json.loads(line.removeprefix("data: "))
                    if "error" in piece:
                        found.problem = str(piece["error"])
                        continue
                    found.text += piece["choices"][0]["text"]
                    reason = piece["choices"][0]["finish_reason"] or reason
                    now = time.monotonic()
                    found.gap_s, last = max(found.gap_s, now - last), now
                    found.pieces += 1
    except httpx.HTTPError as error:
        found.problem = repr(error)
    found.ended_s = time.time()
    if found.problem is None and (reason != "length" or not is_done):
        found.problem = f"cut off without a word after {found.pieces} pieces (finish_reason={reason}, [DONE]={is_done})"
    return found


async def main(url: str, clients: int, tokens: int) -> list[Stream]:
    ended = asyncio.Event()
    found = []

    async def follow(client: int) -> None:
        while not ended.is_set():
            async with httpx.AsyncClient(timeout=httpx.Timeout(600.0, connect=10.0)) as http:
                found.append(await stream(http, url, client, tokens))
            if found[-1].problem is not None:
                await asyncio.sleep(0.5)  # a server that refuses shall not be asked all the time

    async def listen() -> None:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        ended.set()

    await asyncio.gather(listen(), *(follow(client) for client in range(clients)))
    return found


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))]))
