"""What a replica sends of one sequence."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from worker.messages import Output, TokenLogprobs


def outputs(token_ids: Sequence[int], cuts: Sequence[int], **end: Any) -> list[Output]:
    """The tokens in pieces that end at `cuts`. `end`: fields of the last one."""
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(token_ids)}), len(token_ids)]
    made = [
        Output(
            request_id="a",
            token_ids=list(token_ids[start:stop]),
            logprobs=[TokenLogprobs(token_id, -1.0) for token_id in token_ids[start:stop]],
        )
        for start, stop in pairwise(bounds)
    ]
    for name, value in ({"finish_reason": "length"} | end).items():
        setattr(made[-1], name, value)
    return made
