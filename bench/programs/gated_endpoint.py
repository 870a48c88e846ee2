"""A Shoal server's endpoint for programs, without a model: the first calls of programs are answered when all have come.

    python -m bench.programs.gated_endpoint 10000

Prints its port. Each answer is the id of its program.
"""

import asyncio
import json
import resource
import sys
from typing import Any

MODEL = "gated"
BACKLOG = 4096


class GatedEndpoint:
    """Answers the first calls of `programs` programs at the same time, and all others at once."""

    def __init__(self, programs: int) -> None:
        self._missing = programs
        self._gate = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers the requests of one connection, until the client closes it."""
        try:
            while line := await reader.readline():
                method, path = line.decode().split()[:2]
                length = 0
                while (header := await reader.readline()) not in (b"\r\n", b""):
                    name, _, value = header.decode().partition(":")
                    length = int(value) if name.lower() == "content-length" else length
                body = json.loads(await reader.readexactly(length)) if length else {}
                answer = json.dumps(await self._answer(method, path, body)).encode()
                head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(answer)}\r\n\r\n"
                writer.write(head.encode() + answer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    async def _answer(self, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": MODEL}]}
        if method != "POST":
            return {}
        program = body["program"]
        if not program["continues"]:
            self._missing -= 1
            if self._missing <= 0:
                self._gate.set()
            await self._gate.wait()
        choice = {"index": 0, "text": program["id"], "finish_reason": "length", "logprobs": None}
        return {"id": "x", "choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}


def allow_connections(number: int) -> None:
    """Raises this process's limit of open files for `number` connections. Raises ValueError if the system refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        if hard != resource.RLIM_INFINITY and hard < wanted:
            raise ValueError(f"{number} connections need {wanted} open files; raise `ulimit -n`, which is {hard}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _run(programs: int) -> None:
    endpoint = GatedEndpoint(programs)
    async with await asyncio.start_server(endpoint.serve, "127.0.0.1", 0, backlog=BACKLOG) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


if __name__ == "__main__":
    allow_connections(int(sys.argv[1]))
    asyncio.run(_run(int(sys.argv[1])))
