"""How many tokens of a sequence the next step computes: pure, so that the scheduler and a simulator share it."""


def chunk_tokens(missing: int, budget: int, room: int) -> int:
    """The size of the next chunk of a sequence that lacks `missing` tokens; 0 when none can be computed now.

    `budget`: tokens that the step may still take, its decodes already counted, so that a long prompt never holds them
    up (stall-free batching, https://arxiv.org/abs/2403.02310). `room`: tokens for which the sequence has pages or
    could get some. Raises ValueError when nothing is missing: such a sequence has no business in a batch.
    """
    if missing < 1:
        raise ValueError("a sequence with nothing missing has no next chunk")
    return max(0, min(missing, budget, room))
