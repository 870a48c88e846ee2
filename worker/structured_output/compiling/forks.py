"""Limits of a process that compiles a grammar, and compilation in a fork with limits of its own."""

import contextlib
import mmap
import os
import resource
import select
import signal
import sys
from collections.abc import Callable

from worker.niceness import YIELDING_NICE
from worker.structured_output.error import GrammarError

_SPARE_BYTES = 1 << 20  # that may be taken between a look at the data and an allocation
_WALL_PER_CPU_S = 60.0  # for a fork, whose parent has a limit itself
_LONG_CPU_S = 0.25  # of a compilation: most take a tenth of that


def in_fork(work: Callable[[], bytes], cpu_s: float, memory_bytes: int) -> bytes | None:
    """The result of `work`, computed in a fork of this process. None if it takes more than `cpu_s` of CPU time or
    `memory_bytes` more memory than this process has, or raises GrammarError or MemoryError. This process must have one
    thread."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reader)
            limit_time(cpu_s, cpu_s * _WALL_PER_CPU_S)
            limit_memory(memory_bytes)
            with contextlib.suppress(GrammarError, MemoryError), open(writer, "wb") as file:
                file.write(b"+" + work())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        found = file.read()
    status = os.waitpid(process, 0)[1]
    return found[1:] if found and status == 0 else None


def cpu_time_s() -> float:
    """CPU seconds that this process and its forks that have ended took."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def limit_time(cpu_s: float, wall_s: float) -> None:
    """Lets the kernel end this process after `cpu_s` seconds of CPU time, all threads together, or after `wall_s`."""
    for timer, alarm, seconds in (
        (signal.ITIMER_PROF, signal.SIGPROF, cpu_s),
        (signal.ITIMER_REAL, signal.SIGALRM, wall_s),
    ):
        signal.signal(alarm, signal.SIG_DFL)
        signal.setitimer(timer, seconds)


def ended(process: int) -> int:
    """Waits for a child of this process that leads a group of processes, and returns its status. Once the group has
    taken more than `_LONG_CPU_S` of CPU time, it yields to all others: a grammar that takes seconds delays no token."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            watched = os.pidfd_open(process)
            try:
                while not select.select([watched], [], [], _LONG_CPU_S / 4)[0]:
                    if _cpu_s_of(process) >= _LONG_CPU_S:
                        os.setpriority(os.PRIO_PGRP, process, YIELDING_NICE)
                        break
            finally:
                os.close(watched)
    return os.waitpid(process, 0)[1]


def _cpu_s_of(process: int) -> float:
    """CPU seconds that a process and its forks have taken so far."""
    with open(f"/proc/{process}/task/{process}/children") as file:
        processes = [str(process), *file.read().split()]
    ticks = 0
    for each in processes:
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{each}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))  # its own, and those of its forks that have ended
    return ticks / os.sysconf("SC_CLK_TCK")


def limit_memory(more_bytes: int) -> int:
    """Limits this process to `more_bytes` more than it has now, or to less if the system says so. If the machine itself
    runs out of memory, the kernel kills this process before others. Returns the limit that was asked for, in bytes of
    data."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")
    asked, hard = _data_bytes() + more_bytes, resource.getrlimit(resource.RLIMIT_DATA)[1]
    limit = asked if hard == resource.RLIM_INFINITY else min(asked, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return asked


def has_memory_up_to(limit_bytes: int) -> bool:
    """Whether the machine gives this process memory up to `limit_bytes` of data. If not, an allocation that failed may
    have failed for the machine's sake."""
    left = limit_bytes - _data_bytes() - _SPARE_BYTES
    if left <= 0:
        return True
    try:
        mmap.mmap(-1, left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except OSError:
        return False
    return True


def _data_bytes() -> int:
    """Bytes of this process that RLIMIT_DATA counts."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
    except (OSError, StopIteration):
        return 0
