"""A fleet on two Ray nodes of this machine whose processes and nodes are killed and stopped while clients ask for more.

Owns: the fleet and its processes (`two_nodes.py`), ranks that a benchmark can reach (`ranks.py`), clients that know the
right answers (`steady_load.py`), the faults and their order (`faults.py`), and the command `shoal bench chaos`. Read
`command.py` first.
"""
