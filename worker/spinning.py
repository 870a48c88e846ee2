"""How long idle OpenMP threads spin before they sleep, on CPUs."""

from collections.abc import MutableMapping

# Between two operators, PyTorch's threads wait for each other in a loop that keeps the core. If another process wants
# that core, such as a second replica, the wait lasts until the kernel takes the core away, some milliseconds later, at
# each of hundreds of operators of a step. libgomp spins 300,000 times by default.
# Tried on SmolLM2-135M on two cores: alone, a decode step takes 2 to 4% longer than with the default; next to one busy
# process it is twice to four times as fast. 1,000 costs 22% alone.
_SPINS = "20000"


def limit_spinning(environment: MutableMapping[str, str]) -> None:
    """Limits the spinning of a process with this environment. To be called before the process imports torch, which
    loads the OpenMP runtime. GOMP_SPINCOUNT and OMP_WAIT_POLICY that are set already stay and decide."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", _SPINS)
