"""Every number that the README quotes, one command each.

Every benchmark writes `bench/results/NAME.json` through `results.py`; `python -m bench.results` makes `RESULTS.md` of them.
"""
