"""Ray: the composition root, which alone imports both `router` and `worker`.

Owns: the configuration file (`config.py`), the Serve application (`app.py`) with its placement (`request_router.py`), a
replica's placement group and its rank processes (`replica.py`, `rank.py`), models on disk (`models.py`), bring-up and
teardown (`launch.py`, on one machine `local.py`) and the `ray up` files (`ray/`). Ray starts, places, watches and
restarts processes here; it carries no tokens. Read `app.py` first.
"""
