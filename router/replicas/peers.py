"""The other routers of the same replicas: each tells all others its bookings as it makes them.

Bookings go straight from router to router, by ZeroMQ's PUB and SUB. A replica could pass them on, but handles messages
only between two steps, and a long step is just when the others must know. Routers find each other through the
replicas: each says its address as it subscribes, and a replica tells all of its routers (`Routers`). So no list of
routers is configured, and all forget a router that is gone as the replicas notice it.

A booking that is lost does no harm: the replica's next load counts it.
"""

import asyncio
import logging
import secrets

import msgspec
import zmq
import zmq.asyncio

from router.fleet.fleet import Fleet
from router.fleet.known_replica import PeerBooking
from worker.curve import ROUTER, Curve, Door
from worker.messages import PROTOCOL, Subscribe
from worker.sparse_log import SparseLog

log = logging.getLogger(__name__)

MAX_UNSENT_BOOKINGS = 10_000  # bookings that wait for one router, before newer ones are dropped: about 10 MB
MAX_HEARD_BYTES = 1 << 10  # of a frame: others only subscribe
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerBooking)


class Peers:
    """The other routers of one model's replicas. One event loop uses it, from `start` to `close`."""

    def __init__(self, fleet: Fleet, host: str, secret: bytes) -> None:
        """`host`: an address of this machine that the machines of the other routers can reach. `secret`: that of the
        other routers."""
        self._fleet = fleet
        self._host = host
        self._curve = Curve(secret, ROUTER)
        self._odd = SparseLog(log)
        self.name = fleet.name = secrets.token_hex(8)
        self.address = ""
        self._told: dict[str, dict[str, str]] = {}  # by replica: the routers that it knows, with their addresses
        self._listening: dict[str, asyncio.Task[None]] = {}  # by address
        self._context: zmq.asyncio.Context | None = None

    def start(self, context: zmq.asyncio.Context) -> None:
        """Binds to a free port; nothing else listens in `context`. Raises zmq.ZMQError if `host` is no address of this
        machine."""
        self._context = context
        self._out = context.socket(zmq.PUB)
        self._out.setsockopt(zmq.SNDHWM, MAX_UNSENT_BOOKINGS)
        self._door = Door(context, self._curve, {self._out: MAX_HEARD_BYTES})
        try:
            self._out.bind(f"tcp://{self._host}:*")
        except zmq.ZMQError:
            self._close_out()
            raise
        self.address = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._fleet.on_booking = self._tell

    async def close(self) -> None:
        if self._context is None:
            return
        self._fleet.on_booking = self._context = None
        tasks, self._listening = list(self._listening.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._close_out()

    def _close_out(self) -> None:
        self._door.close()
        self._out.close(linger=0)

    @property
    def others(self) -> int:
        """How many other routers there are."""
        return len(self._listening)

    def subscription(self) -> Subscribe:
        """The message by which a replica learns of this router."""
        return Subscribe(self.name, self.address, PROTOCOL)

    def found(self, replica_id: str, addresses: dict[str, str]) -> None:
        """Takes over which routers a replica knows, by name; none, once the connection to it is lost."""
        self._told[replica_id] = addresses
        if not addresses:
            del self._told[replica_id]
        wanted = {
            address for known in self._told.values() for name, address in known.items() if name != self.name and address
        }
        for address in self._listening.keys() - wanted:
            self._listening.pop(address).cancel()
        for address in wanted - self._listening.keys():
            self._listening[address] = asyncio.get_running_loop().create_task(self._hear(address))

    def _tell(self, booking: PeerBooking) -> None:
        self._out.send(_encoder.encode(booking), zmq.NOBLOCK)

    async def _hear(self, address: str) -> None:
        """Hears one router, until it is cancelled. A socket of its own: `connect` on a socket that waits for a message
        may take away the signal that one has come."""
        if self._context is None:
            return
        with self._context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, MAX_UNSENT_BOOKINGS)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._curve.calls(socket)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                log.error("a router has the address %r, which cannot be connected to: %s", address, error)
                return
            while True:
                try:
                    self._fleet.hear(_decoder.decode(await socket.recv()))
                except msgspec.DecodeError as error:
                    self._odd.warning("another router sent something other than a message: %s", error)
