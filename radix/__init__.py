"""The prefix tree: which tokens have their KV in which pages, and who may reuse or evict them.

Owns: pages and their free list (`pages.py`), the tree over them (`tree.py`), which leaf goes first (`policies.py`), the
proof that nothing is lost or owned twice (`integrity.py`), the events that say what is cached (`events.py`), the mirror
that a router keeps of a replica's tree (`mirror.py`), and what tree and mirror share (`node.py`). Knows nothing of
attention or HTTP. Read `tree.py` first.
"""
