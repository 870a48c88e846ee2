"""Priorities among the threads and processes of Shoal on a machine whose cores are all busy: the kernel's niceness.

| who | niceness more than the process was started with |
| --- | --- |
| routers, replies of replicas, grammars that take little: milliseconds each | 0 |
| steps that are computed on a CPU, which take all that there is | `STEPS_NICE` |
| grammars that take long, and texts of megabytes | `YIELDING_NICE` |

The kernel divides a core by weights: by 1.25 less for each step of niceness. With this and with steps of 30 ms for
others' prompts (`fair_share.STEP_S`), two replicas and a router on one core: TTFT P99 of a client under `long_prompts`,
`many_choices` and `leases` of `shoal bench door` was 2.95, 3.49 and 2.51 times that without an attack, and is 1.29,
2.21 and 0.44 times that. Without other load nothing changes.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

STEPS_NICE, YIELDING_NICE = 4, 14
_LOWEST = 19


def yield_to_others(nice: int) -> None:
    """Lowers the priority of this thread, and of those that it starts, unless the system forbids it."""
    if nice and sys.platform == "linux":  # elsewhere priorities belong to processes
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, thread) + nice))


def run_steps(work: Callable[[], None], device: str) -> None:
    """Runs `work`, which computes steps on a device. On a CPU that is done in a thread of its own, which yields to
    others: the threads among which PyTorch divides its products belong to it, and do so, too. Raises what `work`
    raises."""
    if device != "cpu":
        return work()
    done: Future[None] = Future()

    def yielding() -> None:
        yield_to_others(STEPS_NICE)
        try:
            work()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    # A daemon: a step that hangs does not keep the process from ending.
    threading.Thread(target=yielding, name="steps", daemon=True).start()
    done.result()
