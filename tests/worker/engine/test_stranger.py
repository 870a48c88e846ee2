"""A whole server, two ranks and a router, and a process that reaches all of its ports but does not have its secrets."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import zmq

from router.fleet.fleet import Fleet
from router.metrics.metrics import Metrics
from router.replicas.replicas import Replicas
from tests import strangers
from tests.plane import SECRET
from tests.worker.conftest import without_grammars
from tests.worker.references import settings
from worker.curve import REPLICA, ROUTER, Curve
from worker.engine.server import Server
from worker.executor import multi_rank
from worker.executor.multi_rank import Follower, MultiRankExecutor
from worker.messages import (
    PROTOCOL,
    Adapter,
    AdapterChange,
    Flush,
    Generate,
    SamplingParams,
    Subscribe,
    UsageReport,
    encode,
)
from worker.parallel import rank_store
from worker.parallel.rank_store import RankStore, find_store, open_store

PROMPT = [11, 7, 5, 3, 2] * 20
LIMIT_S = 60
FRAMES = [
    encode(Subscribe("stranger", "tcp://127.0.0.1:9", PROTOCOL)),
    encode(Generate(request_id="theirs", prompt_ids=PROMPT, sampling=SamplingParams(max_tokens=3), priority=1 << 30)),
    encode(UsageReport("stranger", {}, {"client": []})),
    encode(AdapterChange([Adapter("evil", "/")])),
    encode(Flush("theirs")),
    b"junk",
    b"",
]


@contextmanager
def replica(folder: Path) -> Iterator[tuple[Server, RankStore]]:
    """A replica of two ranks, whose other rank is a thread."""
    config = settings(tp=2)
    store, meeting = open_store()

    def follow() -> None:
        Follower(folder, config, 1, find_store(meeting)).run()

    with ThreadPoolExecutor(1) as threads:
        followed = threads.submit(follow)
        server = Server(
            folder,
            config,
            secret=SECRET,
            load=lambda model, own: without_grammars(model, own, MultiRankExecutor(model, own, store)),
        )
        loop = threading.Thread(target=server.run, name="replica")
        loop.start()
        try:
            yield server, store
        finally:
            server.stop()
            loop.join(LIMIT_S)
            followed.result(LIMIT_S)


async def answered(router: Replicas, name: str) -> list[int]:
    sampling = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    request = Generate(request_id=name, prompt_ids=PROMPT, sampling=sampling)
    return [token async for output in router.generate("r0", request) for token in output.token_ids]


def test_a_stranger_reads_nothing_and_changes_nothing(tiny_model: Callable[[str], Path]) -> None:
    """gloo listens, too: what ranks compute with each other is for a private network (docs/SECURITY.md)."""
    told: list[object] = []

    async def attacked(server: Server, store: RankStore, before: set[int]) -> None:
        router = Replicas(Fleet(), Metrics().model("tiny"), SECRET, peer_host="127.0.0.1")
        router.on_usage, router.on_adapters = told.append, told.append
        router.set_replicas({"r0": server.address})
        await router.start()
        try:
            while not router.ready:
                await router.changed()
            tokens = await answered(router, "first")
            executor = server.engine.executor
            assert isinstance(executor, MultiRankExecutor) and router._peers is not None
            sockets = [executor._times, *executor._followers.values()]
            ranks = [each.getsockopt_string(zmq.LAST_ENDPOINT) for each in sockets]
            places = {
                server.address: Curve(SECRET, REPLICA),
                router._peers.address: Curve(SECRET, ROUTER),
                store.address: Curve(store.secret, rank_store.KIND),
                **dict.fromkeys(ranks, Curve(store.secret, multi_rank.KIND)),
            }
            ports = {urlsplit(place).port for place in places}
            assert len(ports) == 5 and len(listening() - before - ports) == 2, "but gloo's, one of each rank"
            read = await asyncio.to_thread(read_bytes, places)
            assert read == 0
            assert await answered(router, "second") == tokens and router.ready == {"r0"}
            assert len(server._bookings) == len(server._peers) == 1 and not server._adapters and not told
            assert not executor.silent_ranks and router._peers.others == 0
        finally:
            await router.close()

    before = listening()
    with replica(tiny_model("llama")) as (server, store):
        asyncio.run(asyncio.wait_for(attacked(server, store, before), LIMIT_S))


def listening() -> set[int]:
    """Ports of this process."""
    return {each.laddr.port for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN}


def read_bytes(places: dict[str, Curve]) -> int:
    """What a stranger gets from all of these listeners, who admit the callers of other keys."""
    read = 0
    for address, curve in places.items():
        for keys in (
            *strangers.wrong_keys(curve, REPLICA),
            *(other for other in places.values() if other is not curve),
        ):
            speakers = strangers.SPEAKERS if isinstance(keys, strangers.WithoutKeys) else (zmq.DEALER,)
            read += sum(strangers.read_bytes(address, keys, FRAMES, speaker) for speaker in speakers)
        assert b"READY" not in strangers.hung_up_on(address, b"GET / HTTP/1.1\r\nHost: shoal\r\n\r\n" + bytes(200))
    return read
