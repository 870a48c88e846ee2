"""The language of programs: functions that extend a text by calls of a model.

Owns: expressions, states, the interpreter, and the interface of the backends that calls go to. Knows nothing of how a
server schedules. Read `function.py` first, then `state.py` and `interpreter.py`.

A program runs in one thread with all others: `loop.py` has how.
"""
