"""The benchmarks, one command each, and the modules that they share.

| folder | commands | measures |
| --- | --- | --- |
| `load/` | `serve` | any server that speaks OpenAI's protocol, under load |
| `replica/` | `offline`, `gpu`, `online`, `host` | one replica, from its GPUs to its HTTP clients |
| | `compare` | any of these in this checkout and in an older one |
| `pipeline/` | `pipeline` | pipelines of several stages, measured and simulated |
| `placement/` | `router` | placement policies, on a trace with shared prefixes |
| `fleet/` | `fleet` | placement rules, ours and other systems', on a simulated fleet |
| `chaos/` | `chaos` | a fleet under load, whose processes and nodes are killed and stopped |
| `programs/` | `against_raw` | programs of the language, against the same by plain calls |
| `correctness/` | `exactness`, `quality` | whether outputs equal those of transformers, and their quality |
| | `clients` | what works of the clients that others wrote |
| `schemas/` | `schemas` | structured output on schemas that people publish |

Every benchmark writes `bench/results/NAME.json` through `results.py`. `python -m bench.results` makes `RESULTS.md` from
these files. `targets.py` holds the target of each figure. Read `load/serve.py` first.
"""
