"""The prefix cache: a radix tree of the tokens whose KV is in pages, which requests reuse and which may be evicted.

| file | what it owns |
| --- | --- |
| `pages.py` | pages and their free list |
| `tree.py` | the tree over pages |
| `policies.py` | eviction order |
| `leases.py` | leases with owners and ends: what is evicted last |
| `integrity.py` | the check that no page is lost or owned twice |
| `events.py` | events that say what is cached |
| `mirror.py` | a router's copy of a replica's tree |
| `node.py` | nodes, for tree and mirror |

Knows nothing of attention or HTTP. Read `tree.py` first.
"""
