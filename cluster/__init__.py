"""Ray: the composition root, which alone imports both `router` and `worker`.

Owns: the configuration file (`config.py`), the Serve application (`app.py`) with its placement (`request_router.py`), a
replica's placement group and its rank processes (`replica.py`, `rank.py`), models on disk (`models.py`), bring-up and
teardown (`launch.py`, on one machine `local.py`) and the `ray up` files (`ray/`). Ray starts, places, watches and
restarts processes here; it carries no tokens. Read `app.py` first.
"""

import os

# Before any module here imports Ray, which reads them then.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# The raylet's page about a process that died, which `log_to_driver` lets through: `shoal serve` says it in one line.
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed while executing a task")
