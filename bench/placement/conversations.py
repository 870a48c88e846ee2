"""Conversations, in which later requests repeat earlier ones: sampled from a trace, or made up.

A trace is thinned by whole conversations. The hit rate depends on where the requests of a conversation go, so no
conversation may lose some of its requests.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from bench.load.trace import TraceRequest
from bench.load.workload import SHARED, ConversationTurn, Lengths, Session, TokenSpan, multi_turn, poisson

COMMON = 0.1  # a block in more than this share of all requests does not identify a conversation
BLOCK = 8  # tokens that all made-up conversations begin with, as all requests of Mooncake begin with the same block


def sample(rows: Sequence[TraceRequest], one_in: int, seed: int) -> list[TraceRequest]:
    """Samples about one in `one_in` of the conversations of a trace. Requests keep their arrival times.

    Rows belong to the same conversation if they agree in their first block that at most a tenth of all rows contain.
    Raises ValueError if the rows of the trace share nothing.
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
    """Makes up `count` conversations, in place of a trace. They begin at Poisson times over about `duration_s`.

    - All conversations begin with the same block of BLOCK tokens.
    - A conversation has 1 to 8 turns (geometric, about 2 on average), about 6 s apart. Turns whose prompts would exceed
      `max_prompt` tokens are left out.
    - The prompt of a turn consists of all earlier questions and its own, without the answers. So it is known in
      advance, and every request is a session of its own, as in a trace.
    """
    rng = np.random.default_rng(seed)
    question, answer = Lengths.parse("lognormal:72:0.9"), Lengths.parse("lognormal:5:0.6:32")
    turns = np.minimum(rng.geometric(0.5, count), 8).tolist()
    begins = poisson(rng, count / duration_s, count)
    requests = []
    for whole, length, at_s in zip(multi_turn(rng, count, 8, question, answer, 6.0), turns, begins, strict=True):
        said = [TokenSpan((SHARED, 0), BLOCK)]
        for turn in whole.turns[:length]:
            at_s += turn.think_s
            said += turn.spans
            if sum(span.tokens for span in said) <= max_prompt:
                requests.append(Session((ConversationTurn(tuple(said), turn.output_tokens),), at_s))
    return sorted(requests, key=lambda request: request.arrival_s or 0.0)
