"""Replicas that compute nothing: they speak a replica's messages, and give each of their streams a token at each step.

    python -m bench.overhead.paced_replicas 8 0.02   # 8 replicas with steps of 20 ms: prints their addresses, runs on

A prompt's first token comes at once, as if the prompt took no time. So what a client waits longer is the router's.
"""

import math
import sys
import time
from dataclasses import dataclass, field

import zmq

from bench.secret import SECRET
from worker.curve import REPLICA, Curve, Door
from worker.messages import (
    BEAT_S,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    CacheEvents,
    FromReplica,
    FromRouter,
    Generate,
    Hello,
    Output,
    Outputs,
    ReplicaLoad,
    Subscribe,
    decode_from_router,
    encode,
)

MIN_ID, MAX_ID = 300, 10_000  # of output: whole words in the vocabularies of bench.replica.dummy_models
STRIDE = 577  # from one token to the next: any number that hits most of them


@dataclass
class _Stream:
    request_id: str
    router: bytes
    left: int
    token_id: int

    def next(self) -> Output:
        self.left -= 1
        self.token_id = MIN_ID + (self.token_id + STRIDE) % (MAX_ID - MIN_ID)
        output = Output(request_id=self.request_id, token_ids=[self.token_id])
        if not self.left:
            output.finish_reason = "length"
        return output


@dataclass
class PacedReplica:
    """A replica's socket and its streams. `due_s`: when its next step ends, by `time.monotonic`."""

    socket: "zmq.Socket[bytes]"
    step_s: float
    due_s: float
    streams: dict[str, _Stream] = field(default_factory=dict)
    routers: set[bytes] = field(default_factory=set)
    told_s: float = 0.0
    booking: int = 0

    def take(self) -> None:
        """Handles one message."""
        router, frame = self.socket.recv_multipart()
        message: FromRouter = decode_from_router(frame)
        match message:
            case Subscribe():
                self.routers.add(router)
                snapshot = CacheEvents(incarnation="paced", first_seq=1, events=[], page_size=16, piece=0)
                for answer in (Hello(PROTOCOL), snapshot, self._load()):
                    self._send(router, answer)
            case Generate():
                self.booking = message.booking
                first = message.request_id, router, message.sampling.max_tokens, len(self.streams)
                stream = self.streams[message.request_id] = _Stream(*first)
                output = stream.next()
                output.cached_tokens, output.queue_s = 0, 0.0
                self._send(router, Outputs([output]))
                if not stream.left:
                    del self.streams[message.request_id]
            case Abort():
                for request_id in message.request_ids:
                    self.streams.pop(request_id, None)

    def step(self, now_s: float) -> None:
        """Gives every stream a token, and tells the load from time to time."""
        self.due_s = max(now_s, self.due_s + self.step_s)
        outputs: dict[bytes, list[Output]] = {}
        for stream in list(self.streams.values()):
            outputs.setdefault(stream.router, []).append(stream.next())
            if not stream.left:
                del self.streams[stream.request_id]
        for router, told in outputs.items():
            self._send(router, Outputs(told))
        if now_s - self.told_s > BEAT_S / 10:
            self.told_s = now_s
            for router in self.routers:
                self._send(router, self._load())

    def _load(self) -> ReplicaLoad:
        return ReplicaLoad(
            incarnation="paced", bookings_seen=self.booking, running=len(self.streams), kv_tokens_total=800_000
        )

    def _send(self, router: bytes, message: FromReplica) -> None:
        self.socket.send_multipart([router, encode(message)], zmq.NOBLOCK)


def run(number: int, step_s: float) -> None:
    """Runs `number` replicas in this thread for ever. Prints their addresses in a line."""
    context = zmq.Context()
    poller = zmq.Poller()
    replicas: dict[zmq.Socket[bytes], PacedReplica] = {}
    sockets = [context.socket(zmq.ROUTER) for _ in range(number)]
    Door(context, Curve(SECRET, REPLICA), dict.fromkeys(sockets, MAX_FRAME_BYTES))
    for index, socket in enumerate(sockets):
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.bind("tcp://127.0.0.1:*")
        poller.register(socket, zmq.POLLIN)
        replicas[socket] = PacedReplica(socket, step_s, time.monotonic() + step_s * index / number)
    print(*(socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in replicas), flush=True)
    while True:
        wait_s = min(replica.due_s for replica in replicas.values()) - time.monotonic()
        for socket, _ in poller.poll(max(0, math.ceil(wait_s * 1000))):
            replicas[socket].take()
        now_s = time.monotonic()
        for replica in replicas.values():
            if replica.due_s <= now_s:
                replica.step(now_s)


if __name__ == "__main__":
    run(int(sys.argv[1]), float(sys.argv[2]))
