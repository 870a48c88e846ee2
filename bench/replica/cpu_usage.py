"""CPU time of this process and all its descendants, by role."""

import contextlib
from collections import defaultdict

import psutil

# A part of the command line, and the role of a process that has it.
ROLES = {
    "ServeReplica:shoal:Router": "routers",
    "ray::Rank": "ranks",
}
CLIENT, OTHERS = "client", "others"


def cpu_s() -> dict[str, float]:
    """CPU seconds (user and system) so far, by role. This process is the client."""
    me = psutil.Process()
    used: defaultdict[str, float] = defaultdict(float)
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            times = process.cpu_times()
            role = next((role for part, role in ROLES.items() if part in command), OTHERS)
            used[CLIENT if process == me else role] += times.user + times.system
    return dict(used)


def since(before: dict[str, float]) -> dict[str, float]:
    """CPU seconds used since `before`, an earlier result of `cpu_s`, by role."""
    return {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in cpu_s().items()}
