"""Clients that break their connections off, somewhere in a request or its answer."""

import random
import socket
import struct

from .bodies import COMPLETIONS, MODEL, encoded

WAIT_S = 120.0  # as other clients of a soak: a loaded machine is slow


def break_off(address: tuple[str, int], number: int) -> int:
    """Sends a request over a connection of its own, or a part of it, and breaks off. Returns how many bytes of the
    answer came before."""
    chance = random.Random(number)
    body = {"model": MODEL, "prompt": "x" * chance.randint(1, 60), "max_tokens": 250, "ignore_eos": True, "n": 2}
    body |= {"stream": chance.random() < 0.7} | chance.choice([{}, {"regex": "[a-z]{250}"}, {"priority": 1}])
    content = encoded(body)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    with socket.create_connection(address, timeout=WAIT_S) as connection:
        if chance.random() < 0.3:  # a reset instead of an orderly end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if chance.random() < 0.2:
            connection.sendall((head + content)[: chance.randrange(1, len(head + content))])
            return 0
        connection.sendall(head + content)
        wanted = chance.choice([0, 1, 200, 1000, 5000, 20_000]) if body["stream"] else 0
        got = 0
        while got < wanted and (data := connection.recv(4096)):
            got += len(data)
        return got
