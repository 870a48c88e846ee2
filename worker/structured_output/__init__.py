"""Structured output: from a JSON schema, a regular expression or a grammar to masks of allowed tokens.

`schema.py` and `regex.py` convert what clients write into rules (`ebnf.py`) and refuse what cannot be converted. Two
engines follow the same rules: xgrammar, and llguidance where xgrammar cannot or would take too much (`engines.py` has
the choice, `lark.py` and `lazy_matcher.py` the way to llguidance, `client_lark.py` the grammars that clients write in
Lark). `process.py` compiles grammars in processes that can be killed, `client_turns.py` lets clients take turns.
`relaxation.py` leaves out what no grammar enforces, for requests that allow it; `answer_checks.py` has their answers
judged. `unique_items.py` adds to llguidance what no grammar says: items that must differ.

Read `compiler.py` first, then `state.py` and `batch.py`.
"""

from worker.structured_output.answer_checks import AnswerChecks
from worker.structured_output.compiling.compiler import GrammarCompiler
from worker.structured_output.error import CompilerUnavailable, GrammarError
from worker.structured_output.grammar_queue import GrammarQueue
from worker.structured_output.matching.batch import accept_tokens, fill_masks, fill_masks_after
from worker.structured_output.matching.grammar_threads import GrammarThreads
from worker.structured_output.matching.state import CompiledGrammar, GrammarState, apply_bitmask, new_bitmask

__all__ = [
    "AnswerChecks",
    "CompiledGrammar",
    "CompilerUnavailable",
    "GrammarCompiler",
    "GrammarError",
    "GrammarQueue",
    "GrammarState",
    "GrammarThreads",
    "accept_tokens",
    "apply_bitmask",
    "fill_masks",
    "fill_masks_after",
    "new_bitmask",
]
