"""What this process and all that it started have used of the CPUs, by what they are for."""

import contextlib
from collections import defaultdict

import psutil

# What a command line has in it, and whose it is.
ROLES = {
    "ServeReplica:shoal:Router": "routers",
    "ProxyActor": "proxies",
    "haproxy": "proxies",
    "ray::Rank": "ranks",
    "bench.silent": "ranks",
}
CLIENT, OTHERS = "client", "others"


def cpu_s() -> dict[str, float]:
    """Seconds of user and system time so far, by role. This process is the client."""
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
    """What was used since `before`, which is an earlier `cpu_s`."""
    return {role: round(seconds - before.get(role, 0.0), 3) for role, seconds in cpu_s().items()}
