"""A router without models: tiny tokenizers, a scripted replica that speaks the real messages over real ZeroMQ, and the
real server around them."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
import uvicorn
import zmq
from fastapi import FastAPI
from openai import OpenAI
from tokenizers import decoders, models, pre_tokenizers, trainers

from router.api import create_app
from router.chat.chat_template import ChatTemplate
from router.config import RouterConfig
from router.fleet.demand import Sleep
from router.fleet.fleet import Fleet
from router.http import connection
from router.http.connection import WaitingConnections, protocol
from router.metrics.metrics import Metrics
from router.models import Models
from router.prepare.defaults import SamplingDefaults
from router.replicas import connection as replica_connection
from router.replicas.replicas import Replicas
from router.service import Service
from router.text.tokenizer import Tokenizer
from tests.placer import DirectPlacer
from tests.plane import SECRET
from tests.quick_http import local_socket
from worker.curve import REPLICA, Curve, Door
from worker.messages import (
    BEAT_S,
    MAX_FRAME_BYTES,
    PROTOCOL,
    Abort,
    CacheEvents,
    Failure,
    Flush,
    Generate,
    Hello,
    Output,
    Outputs,
    ReplicaLoad,
    SchemaCheck,
    Subscribe,
    TokenLogprobs,
    UsageReport,
    decode_from_router,
    encode,
)

WAIT_S = 20.0
CONTEXT = 512
MODEL = "tiny"
REPLY = "The quick brown fox — naïve café 🦊👩‍👩‍👧 jumps over 12 lazy dogs."
CORPUS = [REPLY, "Hello there, general! The capital of France is Paris.", "user assistant system\n", "a b c d e f g h"]
CHATML = (
    "{% for message in messages %}{% if message.role == 'assistant' and loop.first %}"
    "{{ raise_exception('a conversation begins with the user') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' ~ opening | default('') }}{% endif %}"
)
REAL_MODEL = Path.home() / ".cache/shoal/models/SmolLM2-135M-Instruct"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has left is missed soon, and a replica that was lost is tried again soon."""
    for name in ("PROBE_AFTER_S", "PROBE_AGAIN_S", "PROBE_EVERY_S"):
        monkeypatch.setattr(connection, name, 0.02)
    monkeypatch.setattr(replica_connection, "RECONNECT_S", 0.02)
    monkeypatch.setattr(replica_connection, "RECONNECT_MAX_S", 0.1)


def byte_level_backend() -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<tool é>"])  # an added token that is text, with a character that is no byte's
    return backend


def byte_fallback_backend() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral have it: a mark for the space, bytes for what is not in the vocabulary."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.é", "▁H", "▁h", "el", "lo", "▁lo", "hel"]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁", "lo"), ("h", "el")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level_backend(), ChatTemplate(CHATML, {}))


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> tokenizers.Tokenizer:
    return byte_level_backend()


@pytest.fixture(scope="session")
def byte_level_tokenizer_maker() -> Callable[[], tokenizers.Tokenizer]:
    return byte_level_backend


@pytest.fixture(scope="session")
def byte_fallback_tokenizer_maker() -> Callable[[], tokenizers.Tokenizer]:
    return byte_fallback_backend


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> tokenizers.Tokenizer:
    return byte_fallback_backend()


@pytest.fixture(scope="session")
def real_folder() -> Path:
    if not (REAL_MODEL / "tokenizer.json").exists():
        pytest.skip(f"{REAL_MODEL} is not there: `make serve` fetches it")
    return REAL_MODEL


# ---------------------------------------------------------------- a replica


@dataclass
class Running:
    identity: bytes
    request: Generate
    token_ids: list[int]  # all of its output, also what another replica has made
    position: int


Script = Callable[[Generate], list[int]]


def says(tokenizer: Tokenizer, text: str = REPLY) -> Script:
    """A script: the same text for everybody, then the end of the turn."""
    ids = [*tokenizer.encode(text), tokenizer.token_id("<|im_end|>")]
    return lambda request: ids


class FakeReplica:
    """A scheduler that follows a script: `script(request)` gives all output tokens of a request. One token a step for
    each request. `allow` holds it after so many tokens in total, until more are allowed. Runs in a thread of its own.
    """

    def __init__(self, tokenizer: Tokenizer, script: Script, per_step: int = 1) -> None:
        self._end_id = tokenizer.token_id("<|im_end|>")
        self.script = script
        self.reply: Callable[[Generate], Output | None] = lambda request: None
        self.check: Callable[[Generate], SchemaCheck | None] = lambda request: None
        self.per_step = per_step
        self.cached_tokens = 3
        self.load = ReplicaLoad(incarnation="one", kv_tokens_total=1000, prompt_tokens=7, preemptions=2, flushed=[])
        self.flushes: list[str] = []
        self.confirms_flushes = True
        self.kv_tokens_used = 0
        self.tells_load = True
        self.protocol = PROTOCOL  # 1: as a replica that tells none
        self.speaks_idle = True
        self.logprob = -0.5
        self._credit: int | None = None
        self._running: list[Running] = []
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._open("tcp://127.0.0.1:*")
        self._inbox: list[Callable[[], None]] = []
        self._bell = self._context.socket(zmq.PUSH)
        self._ear = self._context.socket(zmq.PULL)
        self._ear.bind("inproc://bell")
        self._bell.connect("inproc://bell")
        self.sent = 0  # outputs
        self._news = threading.Condition()
        self.received: list[Generate | Abort | Subscribe] = []
        self._subscribers: set[bytes] = set()
        self._alive = True
        self._thread = threading.Thread(target=self._run, name="replica")
        self._thread.start()

    # ------------------------------------------------ for tests

    def allow(self, tokens: int | None) -> None:
        """So many tokens more, or (None) any number."""
        self._do(lambda: self._allow(tokens))

    def tell(self, *messages: Any) -> None:
        """Sends messages, or raw bytes, to every router that subscribed, and hears nothing in between."""
        frames = [message if isinstance(message, bytes) else encode(message) for message in messages]
        self._do(lambda: [self._socket.send_multipart([who, frame]) for who in self._subscribers for frame in frames])

    def wait_for(self, wanted: Callable[[], Any]) -> Any:
        """The first true value of `wanted`, asked whenever something has been received or sent."""
        with self._news:
            assert self._news.wait_for(wanted, WAIT_S), f"waited in vain; received {self.received}"
            return wanted()

    def requests(self) -> list[Generate]:
        return [message for message in self.received if isinstance(message, Generate)]

    def aborted(self) -> list[str]:
        return [name for message in self.received if isinstance(message, Abort) for name in message.request_ids]

    @property
    def running(self) -> list[str]:
        return [running.request.request_id for running in self._running]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Its thread does nothing meanwhile, as in a long step."""
        thaw = threading.Event()
        try:
            self._do(lambda: thaw.wait(WAIT_S))
            yield
        finally:
            thaw.set()

    def hang_up(self) -> None:
        """Breaks all connections, and listens again at the same address."""
        self._do(self._rebind)

    def crash(self) -> None:
        """As `die`, for its own thread."""
        self._alive = False

    def die(self) -> None:
        """As a process that is killed: the connection breaks, what was not sent is lost."""
        if not self._context.closed:
            self._do(self.crash)
            self._thread.join(WAIT_S)
            self._bell.close(0)
            self._context.destroy(0)

    # ------------------------------------------------ in its thread

    def _rebind(self) -> None:
        self._poller.unregister(self._socket)
        self._shut()
        self._running.clear()
        self._subscribers.clear()
        self._open(self.address)

    def _open(self, address: str) -> None:
        self._outside = zmq.Context()
        self._socket = self._outside.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._door = Door(self._outside, Curve(SECRET, REPLICA), {self._socket: MAX_FRAME_BYTES})
        self._socket.setsockopt(zmq.SNDHWM, 0)  # at the mark, a ROUTER would drop what it cannot send
        while True:
            try:
                self._socket.bind(address)
                break
            except zmq.ZMQError as error:  # closing takes a moment
                if error.errno != zmq.EADDRINUSE:
                    raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._socket, zmq.POLLIN)

    def _shut(self) -> None:
        self._door.close()
        self._socket.close(0)
        self._outside.term()

    def _do(self, work: Callable[[], Any]) -> None:
        self._inbox.append(work)
        with contextlib.suppress(zmq.Again):  # it has crashed
            self._bell.send(b"", zmq.NOBLOCK)

    def _allow(self, tokens: int | None) -> None:
        self._credit = None if tokens is None else (self._credit or 0) + tokens

    def fail(self, failure: Failure) -> None:
        """Ends every request so from now on."""
        self.reply = lambda request: Output(request_id=request.request_id, finish_reason="error", failure=failure)

    def hold(self) -> "FakeReplica":
        """No token until some are allowed."""
        self._credit = 0
        return self

    def _run(self) -> None:
        self._poller.register(self._ear, zmq.POLLIN)
        while self._alive:
            busy = bool(self._running) and self._credit != 0
            ready = dict(self._poller.poll(0 if busy else int(BEAT_S * 1000)))
            with self._news:
                if not ready and not busy and self.speaks_idle:
                    for router in self._subscribers:
                        self._socket.send_multipart([router, encode(Outputs([]))])
                if self._ear in ready:
                    self._ear.recv()
                    self._inbox.pop(0)()
                if self._socket in ready:
                    identity, frame = self._socket.recv_multipart()
                    self._take(identity, decode_from_router(frame))
                if self._alive:
                    self._step()
                self._news.notify_all()
        self._shut()

    def _take(self, identity: bytes, message: Generate | Abort | Subscribe) -> None:
        self.received.append(message)
        match message:
            case Subscribe():
                self._subscribers.add(identity)
                if self.protocol > 1:
                    self._socket.send_multipart([identity, encode(Hello(self.protocol))])
                snapshot = CacheEvents(incarnation="one", first_seq=1, events=[], page_size=16, piece=0)
                self._socket.send_multipart([identity, encode(snapshot)])
                if self.tells_load:
                    self._socket.send_multipart([identity, encode(self.load)])
            case Flush():
                self.flushes.append(message.id)
                if self.confirms_flushes:
                    told = msgspec.structs.replace(self.load, flushed=[message.id], kv_tokens_used=self.kv_tokens_used)
                    self._socket.send_multipart([identity, encode(told)])
            case Generate():
                answer = self.reply(message)
                if answer is not None:
                    self._socket.send_multipart([identity, encode(Outputs([answer]))])
                    return
                token_ids = self.script(message)
                self._running.append(Running(identity, message, token_ids, len(message.output_ids)))
            case UsageReport():
                for other in self._subscribers - {identity}:
                    self._socket.send_multipart([other, encode(message)])
            case Abort():
                self._running = [r for r in self._running if r.request.request_id not in message.request_ids]

    def _step(self) -> None:
        for running in list(self._running):
            if self._credit == 0:
                return
            if self._credit is not None:
                self._credit -= 1
            self.sent += 1
            output = self._output(running)
            self._socket.send_multipart([running.identity, encode(Outputs([output]))])
            if output.finish_reason is not None:
                self._running.remove(running)

    def _output(self, running: Running) -> Output:
        request, sampling = running.request, running.request.sampling
        first = running.position == len(request.output_ids)
        end = min(running.position + self.per_step, len(running.token_ids), sampling.max_tokens)
        token_ids = running.token_ids[running.position : end]
        running.position = end
        stops = {*sampling.stop_token_ids} if sampling.ignore_eos else {*sampling.stop_token_ids, self._end_id}
        stopped = [token_id for token_id in token_ids if token_id in stops]
        if stopped:
            token_ids = token_ids[: token_ids.index(stopped[0]) + 1]
        length = end in (sampling.max_tokens, len(running.token_ids))
        output = Output(
            request_id=request.request_id,
            token_ids=token_ids,
            finish_reason="stop" if stopped else "length" if length else None,
            stop_token_id=stopped[0] if stopped else None,
        )
        if output.finish_reason is not None:
            output.check = self.check(request)
        if sampling.logprobs is not None:
            output.logprobs = [self._logprobs(token_id, sampling.logprobs) for token_id in token_ids]
        if first:
            output.cached_tokens = self.cached_tokens
            output.queue_s = 0.25
            if sampling.prompt_logprobs is not None:
                rest = [self._logprobs(token_id, sampling.prompt_logprobs) for token_id in request.prompt_ids[1:]]
                output.prompt_logprobs = [None, *rest][sampling.prompt_logprobs_start :]
        return output

    def _logprobs(self, token_id: int, top: int) -> TokenLogprobs:
        likeliest = [(token_id, self.logprob), *((other, -2.0 - other) for other in range(100, 100 + top))]
        return TokenLogprobs(token_id, self.logprob, likeliest[:top])


# ---------------------------------------------------------------- the server


class Server(uvicorn.Server):
    """The application on a port of its own, in a thread."""

    def __init__(self, app: FastAPI, config: RouterConfig) -> None:
        made: Any = protocol(config, WaitingConnections())
        super().__init__(uvicorn.Config(app, http=made, log_level="error", ws="none", timeout_graceful_shutdown=5))
        self.socket = local_socket()
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.up = threading.Event()
        self.clients: list[OpenAI] = []  # closed at the end
        self.loop: asyncio.AbstractEventLoop
        self.thread = threading.Thread(target=self.run, kwargs={"sockets": [self.socket]}, name="server")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.up.set()

    def __enter__(self) -> "Server":
        self.thread.start()
        assert self.up.wait(WAIT_S)
        return self

    def __exit__(self, *error: object) -> None:
        self.should_exit = True
        self.thread.join(WAIT_S)
        for client in self.clients:
            client.close()
        assert not self.thread.is_alive()

    def client(self) -> OpenAI:
        self.clients.append(OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S))
        return self.clients[-1]

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)


@dataclass
class Stack:
    """Everything of one router, and its replicas."""

    tokenizer: Tokenizer
    fleet: Fleet
    placer: DirectPlacer
    replicas: Replicas
    service: Service
    server: Server
    fakes: dict[str, FakeReplica]
    metrics: Metrics
    models: Models
    client: OpenAI = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.server.client()

    @property
    def url(self) -> str:
        return self.server.url

    def ready(self, *names: str) -> None:
        """Waits until exactly these replicas are ready."""

        async def wait() -> None:
            while self.replicas.ready != set(names):
                await self.replicas.changed()

        self.server.do(wait())

    def idle(self) -> None:
        """Waits until no request is booked."""
        self.until(lambda: not any(view.bookings for view in self.fleet.snapshot()))

    def until(self, wanted: Callable[[], Any]) -> None:
        """Waits in the server's loop until `wanted` is true."""

        async def wait() -> None:
            while not wanted():
                await asyncio.sleep(0.002)

        self.server.do(asyncio.wait_for(wait(), WAIT_S))

    def lose_one(self) -> tuple[str, str]:
        """Lets the one of two replicas that has the request die after its second token, and the other go on. Returns
        the names of both, the dead one first."""
        self.until(lambda: any(fake.requests() for fake in self.fakes.values()))
        first, second = sorted(self.fakes, key=lambda name: not self.fakes[name].requests())
        self.fakes[first].allow(2)
        self.until(lambda: self.fakes[first].sent == 2)
        self.fakes[first].die()
        self.fakes[second].allow(None)
        return first, second

    def raw(self, path: str, body: dict[str, Any]) -> socket.socket:
        """A connection on which the request has been sent and nothing read."""
        host, port = self.server.socket.getsockname()[:2]
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection = socket.create_connection((host, port), timeout=WAIT_S)
        connection.sendall(head.encode() + data)
        return connection

    @staticmethod
    def read_until(connection: socket.socket, wanted: bytes) -> bytes:
        """All that comes on a connection up to `wanted`: an answer's head and its parts may come apart."""
        received = b""
        while wanted not in received:
            part = connection.recv(1 << 16)
            assert part, received
            received += part
        return received

    def pool(self) -> ThreadPoolExecutor:
        """Threads for requests that wait."""
        return ThreadPoolExecutor(4)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples whose line begins with `name`."""
        lines = self.metrics.page().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


StackMaker = Callable[..., Stack]
ServiceMaker = Callable[..., Service]


@pytest.fixture
def make_service(tokenizer: Tokenizer) -> Iterator[ServiceMaker]:
    """Makes the service of a model with fake replicas; ends these."""
    with ExitStack() as stack:

        def make(
            metrics: Metrics,
            *fakes: FakeReplica,
            name: str = MODEL,
            config: RouterConfig | None = None,
            tokens: Tokenizer = tokenizer,
            defaults: SamplingDefaults | None = None,
            context_length: int = CONTEXT,
            drain_s: float | None = None,
            sleep: Sleep | None = None,
        ) -> Service:
            settings = config or RouterConfig()
            for fake in fakes:
                stack.callback(fake.die)
            fleet = Fleet("round_robin")
            replicas = Replicas(fleet, metrics.model(name), SECRET, drain_s=drain_s)
            replicas.set_replicas({f"r{number}": fake.address for number, fake in enumerate(fakes)})
            return Service(
                tokens,
                replicas,
                DirectPlacer(fleet, replicas, min(settings.replica_wait_s, WAIT_S)),
                fleet,
                metrics.model(name),
                model=name,
                context_length=context_length,
                defaults=defaults or SamplingDefaults(),
                output_format=tokens.output_format(settings.tool_call_parser, settings.reasoning_parser),
                config=settings,
                sleep=sleep,
            )

        yield make


@pytest.fixture
def serve_app() -> Iterator[Callable[[Any, RouterConfig], Server]]:
    """Serves an application on a port of its own."""
    with ExitStack() as stack:
        yield lambda app, config: stack.enter_context(Server(app, config))


@pytest.fixture
def serve(serve_app: Callable[[Any, RouterConfig], Server]) -> Iterator[Callable[[Models], Server]]:
    """Serves models on a port of its own; sees that nothing is left behind."""
    with ExitStack() as stack:

        def start(models: Models) -> Server:
            server = serve_app(create_app(models), models.config)

            async def settled() -> None:
                for service in models.services:
                    while service.replicas.ready != service.replicas.known:
                        await service.replicas.changed()

            async def idle() -> None:
                while any(view.bookings for service in models.services for view in service._fleet.snapshot()):
                    await asyncio.sleep(0.002)

            def nothing_left() -> None:
                if server.thread.is_alive():  # a test may have ended it
                    server.do(asyncio.wait_for(idle(), WAIT_S))
                links = [link for service in models.services for link in service.replicas._connections.values()]
                assert not any(link.streams for link in links)

            server.do(settled())
            stack.callback(nothing_left)
            return server

        yield start


@pytest.fixture
def make_stack(tokenizer: Tokenizer, make_service: ServiceMaker, serve: Callable[[Models], Server]) -> StackMaker:
    """Makes a running server of one model with fake replicas."""

    def make(
        *fakes: FakeReplica,
        config: RouterConfig | None = None,
        tokens: Tokenizer = tokenizer,
        defaults: SamplingDefaults | None = None,
        drain_s: float | None = None,
        sleep: Sleep | None = None,
    ) -> Stack:
        metrics = Metrics()
        settings = config or RouterConfig()
        service = make_service(
            metrics, *fakes, config=settings, tokens=tokens, defaults=defaults, drain_s=drain_s, sleep=sleep
        )
        models = Models([service], metrics, settings)
        server = serve(models)
        named = {f"r{number}": fake for number, fake in enumerate(fakes)}
        placer: Any = service._placer
        return Stack(tokens, placer.fleet, placer, service.replicas, service, server, named, metrics, models)

    return make


@pytest.fixture
def make_replica(tokenizer: Tokenizer) -> Callable[..., FakeReplica]:
    def make(text: str = REPLY, script: Script | None = None, **options: Any) -> FakeReplica:
        return FakeReplica(tokenizer, script or says(tokenizer, text), **options)

    return make


@pytest.fixture
def stack(make_stack: StackMaker, make_replica: Callable[..., FakeReplica]) -> Stack:
    """One replica that says REPLY."""
    return make_stack(make_replica())
