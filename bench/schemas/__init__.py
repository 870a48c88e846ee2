"""Structured output on schemas that people publish: which are accepted, whether the masks are right, and their cost.

| module | content |
| --- | --- |
| `gather.py` | the corpus, fetched from the packages of `sources.toml` into a folder of the user's cache |
| `instances.py` | valid and invalid instances of a schema, judged by jsonschema |
| `formats.py` | the formats that jsonschema checks |
| `command.py` | `shoal bench schemas` |

Read `command.py` first.
"""
