"""The ranks of a replica: the leading rank, in the scheduler's process, and the followers, which apply its plans.

    engine ── plan ──▶ MultiRankExecutor ── the same plan, by ZeroMQ ──▶ Follower (every other rank)
                              │                                             │
                         ModelRunner ◀──────── all-reduce, gather ────▶ ModelRunner

- Every rank applies the same plans in the same order.
- With pipeline parallelism, the leading rank is in the last stage, where tokens are sampled. It sends plans to the
  other ranks well before it runs its own part of them.
- Tokens whose values the host does not know yet are only on the leading rank's device. A step that needs them waits for
  them on the first stage.
- Ranks find each other in a store (`worker.parallel.rank_store`). The leading rank's process opens it, and says where
  it is and what secret admits to it; with the same secret followers get the plans. A rank that fails leaves the reason
  in the store.
"""

import logging
import os
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import torch
import zmq

from pipeline.meter import Span
from worker.config import WorkerConfig
from worker.curve import Curve, Door
from worker.errors import RankLost, one_line
from worker.executor.clock_sync import ClockStamp, ClockSync, host_id
from worker.executor.executor import Executor, ForwardOutput
from worker.executor.gpu_defaults import resolve_device
from worker.executor.model_runner import ModelRunner
from worker.executor.weight_loader import Progress
from worker.parallel.pipeline_stage import PipelineStage
from worker.parallel.rank_store import CONNECT_S, RankStore
from worker.parallel.rendezvous import Rendezvous
from worker.progress import NewestSteps
from worker.step import Plan, StepTime

log = logging.getLogger(__name__)

WATCH_EVERY_S = 0.2
GRACE_S = 5.0  # how long a rank may take to end by itself
# A follower that answers no heartbeat for so long counts as silent: it was stopped (SIGSTOP), or its host is gone.
# ZeroMQ's own thread answers, which needs neither the GIL nor the device. So garbage collection, a library that holds
# the GIL and a long step delay nothing; on a busy CPU the thread, which sleeps nearly always, runs within milliseconds.
HEARTBEAT_MS, SILENT_MS = 1000, 3000

TELL_EVERY_MS = 2  # how often a follower without a plan checks whether its device is done

_END = b""
_TIMES = "times"
# Of frames: what a follower may send to the leading rank, which a stranger may announce too.
NOTHING_BYTES, TIMES_BYTES = 1 << 10, 1 << 24
KIND = "plans"
_NOTE = (-1).to_bytes(8, "little", signed=True)  # begins a frame that is an `_AdapterNote`; a plan has its step there


class _AdapterNote(msgspec.Struct):
    """An adapter that ranks are to read from `folder`, or to forget if that is None."""

    number: int
    folder: str | None


class _StageTimes(msgspec.Struct, array_like=True):
    """Times of steps that a stage has computed, by its machine's clock."""

    stamp: ClockStamp
    ran: list[StepTime]


def other_ranks(config: WorkerConfig) -> list[int]:
    """Returns all ranks except the leading one."""
    return [rank for rank in range(config.num_ranks) if rank != config.leading_rank]


# ---------------------------------------------------------------- the leading rank


class MultiRankExecutor(Executor):
    """Executor of a replica with several ranks; this process is the leading rank. A step that fails raises RankLost,
    because the page tables of the rank that failed may differ from the others'."""

    def __init__(
        self,
        model: Path,
        config: WorkerConfig,
        store: RankStore,
        host: str = "127.0.0.1",
        progress: Progress | None = None,
        processes: "list[subprocess.Popen[bytes]] | None" = None,
        gemm_folder: Path | None = None,
    ) -> None:
        """Waits until all other ranks have come to `store`, then loads this rank's part of the model.

        - `host`: this machine's address, to which the other ranks connect.
        - `processes`: the other ranks' processes, by rank, if this process started them.
        - `gemm_folder`: as for `ModelRunner`.

        Raises RankLost, and the exceptions of `ModelRunner`.
        """
        self._lost: str | None = None
        self._is_ready = False
        self._processes = processes or []
        self._closing = threading.Event()
        self._leaving = ExitStack()
        self._launched_s = 0.0
        self._launched: torch.cuda.Event | None = None
        self._context = zmq.Context()
        self._rank = config.leading_rank
        self._longest_step_s = config.longest_step_s
        self._store = store  # C++ calls it as long as there are groups
        self._followers = {rank: self._follower() for rank in other_ranks(config)}
        self._sending = threading.Lock()  # held by the thread that uses the followers' sockets
        self._silent: list[int] = []
        self._sent: deque[Plan] = deque()
        self._times = self._context.socket(zmq.PULL)
        limits = dict.fromkeys(self._followers.values(), NOTHING_BYTES) | {self._times: TIMES_BYTES}
        self._door = Door(self._context, Curve(store.secret, KIND), limits)
        for socket in limits:
            socket.bind(f"tcp://{host}:*")
        self._clocks = ClockSync()
        store.set(_TIMES, self._times.getsockopt_string(zmq.LAST_ENDPOINT))
        for rank, follower in self._followers.items():
            store.set(f"plans/{rank}", follower.getsockopt_string(zmq.LAST_ENDPOINT))
        self._watcher = threading.Thread(target=self._watch, args=(store,), name="ranks", daemon=True)
        self._watcher.start()
        self.stage: PipelineStage | None = None
        try:
            self.stage = PipelineStage.join(store, self._rank, config.tp, config.pp, _own_device(config, self._rank))
            self._leaving.callback(self.stage.close)
            self.runner = ModelRunner.load(model, config, progress, self.stage, gemm_folder)
            self._leaving.callback(self.runner.close)
            for rank, follower in self._followers.items():
                if not follower.poll(int(CONNECT_S * 1000), zmq.POLLOUT):  # it may have connected only now
                    raise RankLost(f"rank {rank} does not connect")
        except BaseException as error:
            reason = self._reason(error) or _tell(store, self._rank, error)
            self.close()
            if reason is not None:
                raise RankLost(reason) from error
            raise
        self.device = self.runner.device
        self.layout = self.runner.layout
        self.vocab_size, self.context_length = self.runner.vocab_size, self.runner.context_length
        self.expert_balance = self.runner.expert_balance
        self.eos_token_ids = self.runner.eos_token_ids
        self.attention_choice = self.runner.attention_choice
        self.last_tokens = self.runner.last_tokens
        if self.device.type == "cuda":
            self._launched = torch.cuda.Event()
        self._is_ready = True

    def announce(self, plan: Plan) -> None:
        """See `Executor.announce`. Sends the plan to the other ranks, which begin to run it."""
        if self._lost is not None:
            raise RankLost(self._lost)
        try:
            self._clocks.sent(plan.step)
            self._send(plan.encode())
            self.runner.announce(plan)
        except Exception as error:
            raise self._loss(error) from error
        self._sent.append(plan)

    def forward(self, plan: Plan) -> ForwardOutput:
        """See `Executor.forward`. Announces the plan if that was not done before."""
        if not self._sent:
            self.announce(plan)
        if self._lost is not None:
            raise RankLost(self._lost)
        sent = self._sent.popleft()
        assert sent is plan, "plans are run in the order in which they were sent"
        try:
            output = self.runner.forward(plan)
        except Exception as error:
            raise self._loss(error) from error
        if self._launched is not None:
            self._launched_s = time.monotonic()
            self._launched.record()
        return output

    def finish_step(self, plan: Plan) -> None:
        """See `Executor.finish_step`."""
        self.runner.finish_step(plan)

    def prepare_adapter(self, number: int, folder: Path) -> "Future[None]":
        """See `Executor.prepare_adapter`. The result is this rank's; another rank that is behind waits for its own
        copy, and one that finds no such folder ends the replica."""
        self._send_note(_AdapterNote(number, str(folder)))
        return self.runner.prepare_adapter(number, folder)

    def forget_adapter(self, number: int) -> None:
        """See `Executor.forget_adapter`."""
        self._send_note(_AdapterNote(number, None))
        self.runner.forget_adapter(number)

    def take_step_times(self) -> list[StepTime]:
        """See `Executor.take_step_times`."""
        ran = self.runner.take_step_times()
        while self._times.poll(0):
            times = msgspec.msgpack.decode(self._times.recv(), type=_StageTimes)
            offset_s = self._clocks.offset_s(times.stamp)
            ran += [StepTime(stage, step, Span(*(at_s + offset_s for at_s in span))) for stage, step, span in times.ran]
        return ran

    @property
    def newest_steps(self) -> NewestSteps:
        """See `Executor.newest_steps`."""
        return self.runner.newest_steps

    @property
    def silent_ranks(self) -> Sequence[int]:
        """See `Executor.silent_ranks`."""
        return self._silent

    def close(self) -> None:
        """Ends the other ranks. Must not be called while another thread is in `forward`."""
        if self._closing.is_set():
            return
        try:
            while self._sent:  # steps that other ranks have begun need every rank
                self.forward(self._sent[0])
            self._send(_END)
            if self.stage is not None and self._lost is None and self._is_ready:
                _leave_together(self.stage, self.device)
        except RankLost as error:
            log.info("a rank was lost before all had left: %s", error)
        except RuntimeError as error:  # this rank's device has failed: no rank should wait for it
            log.warning("leaving the other ranks: %s", self._loss(error))
        self._closing.set()
        self._watcher.join()
        self._door.close()
        for follower in self._followers.values():
            follower.close(linger=int(GRACE_S * 1000) if self._lost is None else 0)
        for process in self._processes:
            end(process, GRACE_S if self._lost is None else 0)
        self._times.close(linger=0)
        self._context.term()
        self._leaving.close()

    def _follower(self) -> "zmq.Socket[bytes]":
        follower = self._context.socket(zmq.PUSH)
        follower.set(zmq.SNDHWM, 0)
        follower.set(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        follower.set(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        return follower

    def _send(self, frame: bytes) -> None:
        with self._sending:
            for rank, follower in self._followers.items():
                try:
                    follower.send(frame, zmq.NOBLOCK)  # the queue has no limit: a send blocks only without a peer
                except zmq.Again:
                    raise RankLost(f"rank {rank} has gone") from None

    def _send_note(self, note: "_AdapterNote") -> None:
        if self._lost is None:  # else the next plan says so
            with suppress(RankLost):
                self._send(_NOTE + msgspec.json.encode(note))

    def _loss(self, error: Exception) -> RankLost:
        """Reports an error in a step to all ranks, and returns it as RankLost with the reason."""
        reason = self._reason(error) or f"rank {self._rank}: {one_line(error, 500)}"
        assert self.stage is not None
        self.stage.rendezvous.fail(reason)
        self._lost = reason
        return RankLost(reason)

    def _reason(self, error: BaseException) -> str | None:
        """Returns the reason another rank gave for its failure, which explains an error here; None if there is none."""
        if isinstance(error, RuntimeError):  # perhaps from a collective: then another rank's reason is on its way
            deadline_s = time.monotonic() + 8 * WATCH_EVERY_S
            while self._lost is None and time.monotonic() < deadline_s:
                time.sleep(WATCH_EVERY_S / 4)
        return self._lost or (str(error) if isinstance(error, RankLost) else None)

    # ------------------------------------------------------------ another thread

    def _watch(self, store: RankStore) -> None:
        """Watches for ranks that have failed, processes that have ended, and steps that do not end."""
        replica = Rendezvous(store, self._rank, 1)
        while not self._closing.wait(WATCH_EVERY_S):
            if self._is_ready:  # all have connected, and do so once
                with self._sending:
                    # Events of the sockets would tell less: strangers come and go there too.
                    self._silent = [rank for rank, each in self._followers.items() if not each.poll(0, zmq.POLLOUT)]
            for rank, process in zip(self._followers, self._processes, strict=False):
                if (status := process.poll()) is not None:
                    time.sleep(WATCH_EVERY_S)  # a reason from the rank itself comes first
                    replica.fail(f"rank {rank}: its process ended with status {status}")
            try:
                replica.check()
                if self._is_stuck(self._longest_step_s):
                    replica.fail(f"a step has not ended for {self._longest_step_s:g} s: a rank hangs")
            except RankLost as error:
                self._lost = str(error)
                self._end_if_stuck()
                return

    def _is_stuck(self, after_s: float) -> bool:
        """Whether the GPU has not finished the newest step, launched more than `after_s` seconds ago."""
        if self._launched is None or not self._launched_s:
            return False
        return time.monotonic() - self._launched_s > after_s and not self._launched.query()

    def _end_if_stuck(self) -> None:
        """Ends this process if its GPU waits for a lost rank. The GPU would wait for ever, and so would a thread that
        waits for the GPU."""
        if not self._closing.wait(GRACE_S) and self._is_stuck(0):
            log.critical("The GPU waits for a rank that is lost: %s. This process ends.", self._lost)
            os._exit(1)


# ---------------------------------------------------------------- followers


class Follower:
    """A rank other than the leading one. Runs its part of every plan that the leading rank sends, in order."""

    def __init__(
        self,
        model: Path,
        config: WorkerConfig,
        rank: int,
        store: RankStore,
        progress: Progress | None = None,
        gemm_folder: Path | None = None,
    ) -> None:
        """Loads this rank's part of the model, together with the other ranks. Raises the exceptions of `ModelRunner`,
        after reporting them to the other ranks. Raises RankLost if another rank failed first. `gemm_folder`: as for
        `ModelRunner`."""
        self._rank, self._store = rank, store
        self._context = zmq.Context()
        self._plans = self._context.socket(zmq.PULL)
        self._plans.set(zmq.RCVHWM, 0)
        self._plans.set(zmq.RECONNECT_IVL, -1)  # plans may have been lost: then the leading rank must notice it
        self._times = self._context.socket(zmq.PUSH)
        for socket in (self._plans, self._times):
            Curve(store.secret, KIND).calls(socket)
        self._host = host_id()
        self._came: list[tuple[int, float]] = []  # (step, time) of plans' arrivals that were not reported yet
        self._leaving = ExitStack()
        try:
            self._stage = PipelineStage.join(store, rank, config.tp, config.pp, _own_device(config, rank))
            self._leaving.callback(self._stage.close)
            self._plans.connect(store.get(f"plans/{rank}").decode())
            self._times.connect(store.get(_TIMES).decode())
            self._runner = ModelRunner.load(model, config, progress, self._stage, gemm_folder)
            self._leaving.callback(self._runner.close)
        except BaseException as error:
            reason = _tell(self._store, self._rank, error)
            self.close()
            if reason is not None:
                raise RankLost(reason) from error
            raise

    def run(self) -> None:
        """Runs plans until the leading rank closes. Raises an error of a step, after reporting it to the other ranks.
        Raises RankLost if another rank failed first."""
        try:
            self._follow()
            _leave_together(self._stage, self._runner.device)
        except BaseException as error:
            if (reason := _tell(self._store, self._rank, error)) is not None:
                raise RankLost(reason) from error
            raise
        finally:
            self.close()

    @property
    def device(self) -> str:
        """The kind of device that computes steps: `cpu`, `cuda`."""
        return self._runner.device.type

    @property
    def newest_steps(self) -> NewestSteps:
        """How far this rank has come. May be read by any thread."""
        return self._runner.newest_steps

    def _follow(self) -> None:
        """Announces every plan that has arrived before it runs the oldest, so that inputs of later steps arrive
        meanwhile."""
        plans: deque[Plan] = deque()
        ended = False
        while plans or not ended:
            self._send_times()
            while not plans and not ended and self._runner.is_running and not self._plans.poll(TELL_EVERY_MS):
                self._send_times()
            while not ended and (not plans or self._plans.poll(0)):
                frame = self._plans.recv()
                ended = not frame
                if frame.startswith(_NOTE):
                    self._take_note(msgspec.json.decode(frame[len(_NOTE) :], type=_AdapterNote))
                elif frame:
                    plans.append(Plan.decode(frame))
                    self._came.append((plans[-1].step, time.monotonic()))
                    self._runner.announce(plans[-1])
            if plans:
                self._runner.forward(plans.popleft())

    def _take_note(self, note: _AdapterNote) -> None:
        if note.folder is None:
            self._runner.forget_adapter(note.number)
        else:
            self._runner.prepare_adapter(note.number, Path(note.folder))

    def _send_times(self) -> None:
        """Sends new step times to the leading rank. Only the first rank of a stage sends: all ranks of a stage run a
        step at the same time."""
        if ran := self._runner.take_step_times():
            if self._stage.communicator.rank == 0:
                times = _StageTimes(ClockStamp(self._host, time.monotonic(), self._came), ran)
                with suppress(zmq.Again):  # the queue is full: no one takes the times
                    self._times.send(msgspec.msgpack.encode(times), zmq.NOBLOCK)
            self._came.clear()

    def close(self) -> None:
        """Closes the sockets and leaves the group. Must not be called while another thread is in `run`."""
        self._plans.close(linger=0)
        self._times.close(linger=0)
        self._context.term()
        self._leaving.close()


def _tell(store: RankStore, rank: int, error: BaseException) -> str | None:
    """Leaves the reason of a rank's failure in the store and returns None. If another rank left a reason first, returns
    that one. Waits a little for such a reason if the error may come from a collective. Returns None for a RankLost."""
    if isinstance(error, RankLost):
        return None
    replica = Rendezvous(store, rank, 1)
    try:
        deadline_s = time.monotonic() + 3 * WATCH_EVERY_S
        while isinstance(error, RuntimeError) and time.monotonic() < deadline_s:
            replica.check()
            time.sleep(WATCH_EVERY_S / 4)
        replica.fail(f"rank {rank}: {one_line(error, 500)}")
    except RankLost as other:
        return str(other)
    except RuntimeError:  # the store's process has ended
        pass
    return None


def _leave_together(stage: PipelineStage, device: torch.device) -> None:
    """Waits until all ranks have computed all plans. A GPU that is still in a step waits for the other ranks' writes
    and reads their memory, which is gone when their processes end. Raises RankLost if a rank has failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    stage.rendezvous.barrier()


def _own_device(config: WorkerConfig, rank: int) -> torch.device:
    """Returns the rank's device, and makes a GPU the current device.

    Under Ray a rank sees only its own GPU. Elsewhere it sees all GPUs, and the leading rank takes the first, because
    that is the current device of every other thread of its process too.
    """
    device, _ = resolve_device(config)
    if device.type == "cuda":
        torch.cuda.set_device((rank - config.leading_rank) % torch.cuda.device_count())
    return device


def end(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """Waits `grace_s` seconds for a rank's process to end, then kills it."""
    assert process.stdin is not None
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(BrokenPipeError):  # what it never read is written once more
        process.stdin.close()
