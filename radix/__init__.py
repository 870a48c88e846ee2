"""The prefix cache: a radix tree of the tokens whose KV is in pages, which requests reuse and which may be evicted.

| file | what it owns |
| --- | --- |
| `pages.py` | pages and their free list |
| `tree.py` | the tree over pages |
| `component.py` | what a tree may have besides pages: components, each with a part of every resume point |
| `checkpoints.py`, `windows.py` | the components: rows of recurrent states; pages of windows |
| `eviction_order.py` | eviction order |
| `leases.py` | leases with owners and ends: what is evicted last |
| `integrity.py` | the check that no page is lost or owned twice |
| `events.py` | events that say what is cached |
| `snapshot.py` | a tree told in pieces, while it changes |
| `index.py` | a router's index over the trees of all replicas |
| `node.py` | nodes, and packed tokens |

Knows nothing of attention or HTTP. Read `tree.py` first.
"""
