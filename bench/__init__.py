"""Every number that the README quotes, one command each.

Owns: the benchmarks (`serve.py`, `offline.py`, `gpu.py`, `host.py`, `exactness.py`, `router.py`, and `pipeline.py` with
its parts in `pipelines/`), and what they share: workloads and traces, the load and its metrics, models of known shapes.
Every benchmark writes `bench/results/NAME.json` through `results.py`; `python -m bench.results` makes `RESULTS.md` of
them. Read `serve.py` first.
"""
