"""The ranks of a replica: one leads, with the scheduler and the sampler beside it; the others follow its plans.

    engine ── plan ──▶ Leader ── the same plan, by ZeroMQ ──▶ Follower (every other rank)
                         │                                       │
                         └── Runner ◀── all-reduce, gather ──▶ Runner

Every rank applies the same plans in the same order. Of a pipeline the leader is in the last stage, where tokens are
sampled: plans are sent to the others well before it comes to its own part of them. Tokens that the host has not seen
yet are on the leader's device alone: a step that needs them waits on the first stage for them. Ranks find each other in
a store, at an address that the leader's process publishes, and whichever fails leaves the reason there.
"""

import logging
import os
import subprocess
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
import zmq

from pipeline.meter import Span
from worker.clocks import Clocks, Stamp, host_id
from worker.config import WorkerConfig
from worker.parallel import TIMEOUT_S, Meeting, RankLost
from worker.plan import Plan
from worker.refusal import in_one_line
from worker.runner import Ran, Runner, place
from worker.stage import Stage
from worker.weights import Progress

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.2
CONNECT_S = 30.0
GRACE_S = 5.0  # what a rank gets to end by itself
HEARTBEAT_MS = 5000  # a follower on a host that vanished must not pile up plans for ever

TELL_EVERY_MS = 2  # how often a rank without a plan looks whether its device is done

_END = b""
_TIMES = "times"


class _Told(msgspec.Struct, array_like=True):
    """Steps that a stage has computed, by its own clock."""

    stamp: Stamp
    ran: list[Ran]


def open_store(host: str = "127.0.0.1") -> tuple[dist.Store, str]:
    """Where the ranks of one replica meet, on a free port of this machine, and its address for the others: the one by
    which they reach this machine. It lives as long as this process."""
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=CONNECT_S))
    return store, f"{host}:{store.port}"


def find_store(address: str) -> dist.Store:
    """The store that another process opened. Raises RankLost if nobody answers there."""
    host, _, port = address.rpartition(":")
    try:
        return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_S))
    except RuntimeError as error:
        raise RankLost(f"the leading rank does not answer at {address}: {error}") from error


def other_ranks(config: WorkerConfig) -> list[int]:
    """All but the leading one."""
    return [rank for rank in range(config.num_ranks) if rank != config.leading_rank]


# ---------------------------------------------------------------- the leading rank


class Leader:
    """A runner for the engine, on all ranks of a replica. Where a step fails it raises RankLost: the tables of the rank
    that failed are no longer the others'."""

    def __init__(
        self,
        model: Path,
        config: WorkerConfig,
        store: dist.Store,
        host: str = "127.0.0.1",
        progress: Progress | None = None,
        processes: "list[subprocess.Popen[bytes]] | None" = None,
    ) -> None:
        """Waits for the other ranks to come to `store`; they connect to `host`, this machine's address. `processes` are
        theirs, in their order, if this process started them. Raises what `Runner` raises, and RankLost."""
        self._lost: str | None = None
        self._is_ready = False
        self._processes = processes or []
        self._closing = threading.Event()
        self._leaving = ExitStack()
        self._launched_s = 0.0
        self._launched: torch.cuda.Event | None = None
        self._context = zmq.Context()
        self._rank = config.leading_rank
        self._followers = {rank: self._bind(host) for rank in other_ranks(config)}
        self._sent: deque[Plan] = deque()
        self._times = self._context.socket(zmq.PULL)
        self._times.bind(f"tcp://{host}:*")
        self._clocks = Clocks()
        store.set(_TIMES, self._times.getsockopt_string(zmq.LAST_ENDPOINT))
        for rank, follower in self._followers.items():
            store.set(f"plans/{rank}", follower.getsockopt_string(zmq.LAST_ENDPOINT))
        self._watcher = threading.Thread(target=self._watch, args=(store,), name="ranks", daemon=True)
        self._watcher.start()
        self.stage: Stage | None = None
        try:
            self.stage = Stage.join(store, self._rank, config.tp, config.pp, _own_device(config, self._rank))
            self._leaving.callback(self.stage.close)
            self.runner = Runner(model, config, progress, self.stage)
            self._leaving.callback(self.runner.close)
            for rank, follower in self._followers.items():
                if not follower.poll(int(CONNECT_S * 1000), zmq.POLLOUT):  # it may just have come
                    raise RankLost(f"rank {rank} does not connect")
        except BaseException as error:
            reason = self._reason(error)
            _tell(store, self._rank, error)
            self.close()
            if reason is not None:
                raise RankLost(reason) from error
            raise
        self.device = self.runner.device
        self.page_size, self.num_pages = self.runner.page_size, self.runner.num_pages
        self.vocab_size, self.context_length = self.runner.vocab_size, self.runner.context_length
        self.eos_token_ids = self.runner.eos_token_ids
        self.last_tokens = self.runner.last_tokens
        if self.device.type == "cuda":
            self._launched = torch.cuda.Event()
        self._is_ready = True

    @property
    def likeliest(self) -> torch.Tensor | None:
        """As the runner's."""
        return self.runner.likeliest

    def expect(self, plan: Plan) -> None:
        """As `Runner.expect`, after sending the plan to the other ranks: they begin. Raises RankLost."""
        if self._lost is not None:
            raise RankLost(self._lost)
        try:
            self._clocks.sent(plan.step)
            self._send(plan.encode())
            self.runner.expect(plan)
        except Exception as error:
            raise self._loss(error) from error
        self._sent.append(plan)

    def forward(self, plan: Plan) -> torch.Tensor:
        """As `Runner.forward`, of a plan that is sent now if it has not been. Raises RankLost."""
        if not self._sent:
            self.expect(plan)
        if self._lost is not None:
            raise RankLost(self._lost)
        sent = self._sent.popleft()
        assert sent is plan, "plans are run in the order in which they were sent"
        try:
            logits = self.runner.forward(plan)
        except Exception as error:
            raise self._loss(error) from error
        if self._launched is not None:
            self._launched_s = time.monotonic()
            self._launched.record()
        return logits

    def sampled(self, plan: Plan) -> None:
        """As `Runner.sampled`."""
        self.runner.sampled(plan)

    def ran(self) -> list[Ran]:
        """As `Runner.ran`, of all stages, by this machine's clock; those of one stage are in order. What others have
        yet to tell comes later."""
        ran = self.runner.ran()
        while self._times.poll(0):
            told = msgspec.msgpack.decode(self._times.recv(), type=_Told)
            by = self._clocks.offset_s(told.stamp)
            ran += [Ran(stage, step, Span(*(at_s + by for at_s in span))) for stage, step, span in told.ran]
        return ran

    def close(self) -> None:
        """Ends the other ranks. Not while another thread is in `forward`."""
        if self._closing.is_set():
            return
        try:
            while self._sent:  # what the others have begun takes all of them
                self.forward(self._sent[0])
            self._send(_END)
            if self.stage is not None and self._lost is None and self._is_ready:
                _leave_together(self.stage, self.device)
        except RankLost as error:
            log.info("a rank was lost before all had left: %s", error)
        except RuntimeError as error:  # this rank's device is gone: nobody is to wait for it
            log.warning("leaving the other ranks: %s", self._loss(error))
        self._closing.set()
        self._watcher.join()
        for follower in self._followers.values():
            follower.close(linger=int(GRACE_S * 1000) if self._lost is None else 0)
        for process in self._processes:
            end(process, GRACE_S if self._lost is None else 0)
        self._times.close(linger=0)
        self._context.term()
        self._leaving.close()

    def _bind(self, host: str) -> "zmq.Socket[bytes]":
        follower = self._context.socket(zmq.PUSH)
        follower.set(zmq.SNDHWM, 0)
        follower.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        follower.bind(f"tcp://{host}:*")
        return follower

    def _send(self, frame: bytes) -> None:
        for rank, follower in self._followers.items():
            try:
                follower.send(frame, zmq.NOBLOCK)  # without a limit: only where nobody is there it would block
            except zmq.Again:
                raise RankLost(f"rank {rank} has gone") from None

    def _loss(self, error: Exception) -> RankLost:
        """What an error in a step means. All ranks are told."""
        reason = self._reason(error) or f"rank {self._rank}: {in_one_line(error, 500)}"
        assert self.stage is not None
        self.stage.replica.fail(reason)
        self._lost = reason
        return RankLost(reason)

    def _reason(self, error: BaseException) -> str | None:
        """What another rank says went wrong, which explains an error here; None if all are well."""
        if isinstance(error, RuntimeError):  # maybe a collective's: then the other rank's own reason is on its way
            deadline_s = time.monotonic() + 8 * WATCH_EVERY_S
            while self._lost is None and time.monotonic() < deadline_s:
                time.sleep(WATCH_EVERY_S / 4)
        return self._lost or (str(error) if isinstance(error, RankLost) else None)

    # ------------------------------------------------------------ another thread

    def _watch(self, store: Any) -> None:
        """Looks for ranks that have failed, processes that have ended, and steps that do not end."""
        # A connection of its own: what one thread asks must not wait for what another does.
        replica = Meeting(store.clone(), self._rank, 1)
        while not self._closing.wait(WATCH_EVERY_S):
            for rank, process in zip(self._followers, self._processes, strict=False):
                if (status := process.poll()) is not None:
                    time.sleep(WATCH_EVERY_S)  # its own reason comes first
                    replica.fail(f"rank {rank}: its process ended with status {status}")
            try:
                replica.check()
                if self._is_stuck(TIMEOUT_S):
                    replica.fail(f"a step has not ended for {TIMEOUT_S:g} s: a rank hangs")
            except RankLost as error:
                self._lost = str(error)
                self._end_if_stuck()
                return

    def _is_stuck(self, after_s: float) -> bool:
        """Whether the GPU is still in a step that was launched so long ago."""
        if self._launched is None or not self._launched_s:
            return False
        return time.monotonic() - self._launched_s > after_s and not self._launched.query()

    def _end_if_stuck(self) -> None:
        """A GPU that waits for a rank which has gone waits for ever, and so does a thread that waits for the GPU: only
        the end of the process helps."""
        if not self._closing.wait(GRACE_S) and self._is_stuck(0):
            log.critical("The GPU waits for a rank that is lost: %s. This process ends.", self._lost)
            os._exit(1)


# ---------------------------------------------------------------- the others


class Follower:
    """A rank that does what the leader does, one plan after another."""

    def __init__(
        self, model: Path, config: WorkerConfig, rank: int, store: dist.Store, progress: Progress | None = None
    ) -> None:
        """Loads this rank's part, together with the others. Raises what `Runner` raises, after telling them."""
        self._rank, self._store = rank, store
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.PULL)
        self._plans.set(zmq.RCVHWM, 0)
        self._times = self._context.socket(zmq.PUSH)
        self._host = host_id()
        self._came: list[tuple[int, float]] = []  # plans, of which the leader has not been told
        self._leaving = ExitStack()
        try:
            self._stage = Stage.join(store, rank, config.tp, config.pp, _own_device(config, rank))
            self._leaving.callback(self._stage.close)
            self._plans.connect(store.get(f"plans/{rank}").decode())
            self._times.connect(store.get(_TIMES).decode())
            self._runner = Runner(model, config, progress, self._stage)
            self._leaving.callback(self._runner.close)
        except BaseException as error:
            _tell(self._store, self._rank, error)
            self.close()
            raise

    def run(self) -> None:
        """Follows until the leader closes. Raises what a step raises, after telling the others."""
        try:
            self._follow()
            _leave_together(self._stage, self._runner.device)
        except BaseException as error:
            _tell(self._store, self._rank, error)
            raise
        finally:
            self.close()

    def _follow(self) -> None:
        """Every plan that has come is expected before the oldest is computed: what it needs arrives meanwhile."""
        plans: deque[Plan] = deque()
        ended = False
        while plans or not ended:
            self._tell_times()
            while not plans and not ended and self._runner.is_running and not self._plans.poll(TELL_EVERY_MS):
                self._tell_times()
            while not ended and (not plans or self._plans.poll(0)):
                frame = self._plans.recv()
                ended = not frame
                if frame:
                    plans.append(Plan.decode(frame))
                    self._came.append((plans[-1].step, time.monotonic()))
                    self._runner.expect(plans[-1])
            if plans:
                self._runner.forward(plans.popleft())

    def _tell_times(self) -> None:
        """Of a stage's ranks, which go together, the first tells."""
        if ran := self._runner.ran():
            if self._stage.group.rank == 0:
                told = _Told(Stamp(self._host, time.monotonic(), self._came), ran)
                with suppress(zmq.Again):  # so many that nobody asks for them
                    self._times.send(msgspec.msgpack.encode(told), zmq.NOBLOCK)
            self._came.clear()

    def close(self) -> None:
        """Gives back the sockets and leaves the group. Not while another thread is in `run`."""
        self._plans.close(linger=0)
        self._times.close(linger=0)
        self._context.term()
        self._leaving.close()


def _tell(store: dist.Store, rank: int, error: BaseException) -> None:
    """Leaves the reason of a rank's end in the store, if it was not found there. One that a collective ended waits a
    little for the reason of the rank that ended first."""
    if isinstance(error, RankLost):
        return
    replica = Meeting(store, rank, 1)
    with suppress(RuntimeError):  # RankLost is one; the store's process may have ended
        if isinstance(error, RuntimeError):
            deadline_s = time.monotonic() + 3 * WATCH_EVERY_S
            while time.monotonic() < deadline_s:
                replica.check()
                time.sleep(WATCH_EVERY_S / 4)
        replica.fail(f"rank {rank}: {in_one_line(error, 500)}")


def _leave_together(stage: Stage, device: torch.device) -> None:
    """Wait until all ranks have computed all that they were told to. A GPU that is still in a step waits for what the
    others write, and reads their memory, which goes with their processes. Raises RankLost if one does not come."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    stage.replica.meet()


def _own_device(config: WorkerConfig, rank: int) -> torch.device:
    """The rank's device, on a GPU made the current one: Ray shows a rank its own only, elsewhere it sees all. There the
    leading rank has the first, which is the current one of every other thread of its process too."""
    device, _ = place(config)
    if device.type == "cuda":
        torch.cuda.set_device((rank - config.leading_rank) % torch.cuda.device_count())
    return device


def end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Gives a rank's process so long to end by itself."""
    assert process.stdin is not None
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdin.close()
