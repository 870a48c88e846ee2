"""Forks that take long yield to other processes."""

import subprocess
import sys

import pytest

from worker.niceness import YIELDING_NICE
from worker.structured_output.compiling.forks import ended

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has descriptors of processes")
# Both end with the status 3 once they yield, and with 4 if they do not after ten times the CPU time.
SPINS = f"""
import os, time
while time.process_time() < 2.5:
    if os.getpriority(os.PRIO_PROCESS, 0) == {YIELDING_NICE}:
        os._exit(3)
os._exit(4)
"""
SPINS_IN_A_FORK = f"""
import os
if (fork := os.fork()) == 0:
    exec({SPINS!r})
os._exit(os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]))
"""


@pytest.mark.parametrize(("does", "status"), [(SPINS, 3), (SPINS_IN_A_FORK, 3), ("raise SystemExit(5)", 5)])
def test_what_takes_long_yields(does: str, status: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", does], process_group=0)
    assert ended(process.pid) == status << 8
    process.returncode = status
