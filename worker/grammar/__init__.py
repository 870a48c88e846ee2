"""What an output must match: from a JSON schema, a regular expression or a grammar to masks of allowed tokens.

`schema.py` and `regex.py` turn what clients write into grammars (`ebnf.py`) that xgrammar follows exactly, and refuse
the rest; `process.py` compiles them where a bad one can be killed. Read `compiler.py` first, then `state.py`.
"""

from worker.grammar.awaited import Awaited
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.error import GrammarError
from worker.grammar.state import CompiledGrammar, GrammarState, apply_bitmask, fill_masks, new_bitmask

__all__ = [
    "Awaited",
    "CompiledGrammar",
    "GrammarCompiler",
    "GrammarError",
    "GrammarState",
    "apply_bitmask",
    "fill_masks",
    "new_bitmask",
]
