"""The parts of `bench/pipeline.py`, the benchmark of pipelines.

What is asked: `layout.py` (devices and schedules) and `traffic.py` (requests that arrive). Who answers: `measured.py`,
real ranks, started by `ranks.py` in this process or by `nodes.py` on Ray nodes; or `simulated.py`. How a load is
offered to either, and what became of it: `offered.py`, `metered.py`. What a layout carries is searched for in
`study.py`, all of them in the order of `survey.py`, every answer kept by `sweep.py`. What that says: `findings.py` and
`picture.py`.
"""
