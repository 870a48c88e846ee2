"""The benchmarks, one command each, and the modules that they share.

| folder | commands | measures |
| --- | --- | --- |
| `load/` | `serve` | any server that speaks OpenAI's protocol, under load |
| `replica/` | `offline`, `gpu`, `online`, `host` | one replica, from its GPUs to its HTTP clients |
| | `drafts`; modules `lora`, `experts` | what drafts bring, what adapters cost, a layer's experts |
| | `compare`; module `floors` | any of these in this checkout and in an older one; what no engine can pass |
| `pipeline/` | `pipeline` | pipelines of several stages, measured and simulated |
| `placement/` | `router` | placement policies, on a trace with shared prefixes |
| `fleet/` | `fleet` | placement rules, ours and other systems', on a simulated fleet |
| `overhead/` | `overhead` | the cost of a router for a token, and what it adds to latencies |
| `lengths/` | modules `accuracy`, `order` | predicted output lengths, and what their order gives |
| `chaos/` | `chaos` | a fleet under load, whose processes and nodes are killed and stopped |
| `programs/` | `against_raw` | programs of the language, against the same by plain calls |
| `correctness/` | `exactness`, `quality` | whether outputs equal those of transformers, and their quality |
| | `clients` | what works of the clients that others wrote |
| `schemas/` | `schemas`; module `throughput` | structured output on schemas that people publish |

Every benchmark writes `bench/results/NAME.json` through `results.py`. `python -m bench.results` makes `RESULTS.md` from
these files. `targets.py` holds the target of each figure. Read `load/serve.py` first.

What answers a question once is no part of this folder for long: the result file keeps its command and its commit, at
which the instrument can be run again, and the instrument goes.
"""
