"""Conversations of which later requests repeat the earlier ones: a few of a long trace, or made up.

Where the requests of one conversation go decides what is found cached, so a trace is thinned by whole conversations.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench.trace import Row
from bench.workload import SHARED, Lengths, Session, Span, Turn, multi_turn, poisson

COMMON = 0.1  # a block that this part of all requests hold is no one conversation's
BLOCK = 8  # tokens that all made-up conversations begin with, as Mooncake's all begin with one block


def sample(rows: Sequence[Row], one_in: int, seed: int) -> list[Row]:
    """About one in `one_in` of the conversations of a trace, whole and at their own times.

    A conversation is the rows that share a block beyond those that begin a tenth of all prompts. Raises ValueError for
    a trace whose rows share nothing.
    """
    uses = Counter(block for row in rows for block in set(row.blocks))
    if not any(count > 1 for count in uses.values()):
        raise ValueError("no two requests of this trace share a prefix: use one with hash_ids, such as Mooncake's")
    keys = [next((b for b in row.blocks if uses[b] <= COMMON * len(rows)), -1 - i) for i, row in enumerate(rows)]
    names = sorted(set(keys))
    drawn = np.random.default_rng(seed).random(len(names)) < 1 / one_in
    kept = {name for name, keep in zip(names, drawn.tolist(), strict=True) if keep}
    return [row for row, key in zip(rows, keys, strict=True) if key in kept]


def conversations(seed: int, count: int, duration_s: float, max_prompt: int) -> list[Session]:
    """`count` conversations, begun evenly over `duration_s`: without a trace, the like of one.

    All begin with the same block; each has 1 to 8 turns (geometric, 2 on average, fewer if they grow beyond
    `max_prompt` tokens), about 6 s apart. A turn's prompt is all prompts before it and its own question, without the
    answers, so that it is known beforehand: as in a trace, every request is a session of its own.
    """
    rng = np.random.default_rng(seed)
    question, answer = Lengths.parse("lognormal:72:0.9"), Lengths.parse("lognormal:5:0.6:32")
    turns = np.minimum(rng.geometric(0.5, count), 8).tolist()
    begins = poisson(rng, count / duration_s, count)
    requests = []
    for whole, length, at_s in zip(multi_turn(rng, count, 8, question, answer, 6.0), turns, begins, strict=True):
        said = [Span((SHARED, 0), BLOCK)]
        for turn in whole.turns[:length]:
            at_s += turn.think_s
            said += turn.spans
            if sum(span.tokens for span in said) <= max_prompt:
                requests.append(Session((Turn(tuple(said), turn.output_tokens),), at_s))
    return sorted(requests, key=lambda request: request.arrival_s or 0.0)
