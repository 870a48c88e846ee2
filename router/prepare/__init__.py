"""From a request that was read to sequences that replicas can run: prompts as tokens, and sampling parameters.

Owns the defaults of a model, the forms that an answer must have, branches of programs, and the refusal of all that
cannot run. Knows nothing of replicas. Read `prepared_request.py` first, then `prompts.py`.
"""
