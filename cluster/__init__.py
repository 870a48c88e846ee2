"""Ray, and the composition root: the only package that imports both `router` and `worker`.

Owns: the configuration file (`config.py`), the Serve application (`app.py`) with its placement (`request_router.py`), a
replica's placement group and its rank processes (`replica.py`, `rank.py`), models on disk (`models.py`), bring-up and
teardown (`launch.py`, on one machine `local.py`) and the `ray up` files (`ray/`). Here Ray starts, places, watches and
restarts processes; it carries no tokens. Also owns the server inside a Python program, without Ray (`in_process.py`,
`replica_process.py`). Read `app.py` first.
"""

import os

# Ray reads these when it is imported: set before any module here imports it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Hides the raylet's page about a process that died, which `log_to_driver` lets through: `shoal serve` has a line on it.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
