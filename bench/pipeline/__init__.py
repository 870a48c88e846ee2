"""Benchmark of pipelines of several stages: bubbles, their causes, and the load that a layout carries.

| file | what it owns |
| --- | --- |
| `command.py` | the command line, `shoal bench pipeline` |
| `layout.py`, `traffic.py` | the inputs: devices and schedules; requests that arrive |
| `baselines.py` | schedules of other systems, for comparison |
| `real_site.py`, `local_ranks.py`, `ray_nodes.py` | real ranks, started in this process or on Ray nodes |
| `simulated_site.py`, `simulated_replica.py`, `simulator.py` | the same scheduler on simulated devices |
| `load_generator.py`, `meter_report.py` | a load that is offered to either, and its outcome |
| `capacity_search.py`, `capacity.py`, `experiment_grid.py`, `result_store.py` | the search for a layout's capacity |
| `ablation.py` | the simulated effect of each mechanism of the schedule (`docs/MECHANISMS.md`) |
| `figures.py`, `timeline_plot.py` | the resulting figures and pictures |

Read `command.py` first.
"""
