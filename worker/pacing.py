"""How fast the prompts of a whole batch of requests are computed, where only the end of the last one counts.

A decode reads all weights for a few tokens, and leaves most of the arithmetic of the device unused; a prompt beside it
takes what is left for nothing. So prompts are not computed all at once but spread over the decodes of others, and the
requests with the most tokens to come start first: whoever has few may start late, as long as it ends with the last.
(Longest processing time first: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969. Prompts beside decodes:
https://arxiv.org/abs/2403.02310.)
"""

import numpy as np

# Tokens from which on the matrix products of a step take as long as it has tokens: with fewer there is time for more.
# A GPU does some 160 operations for each byte that it reads; 2 bytes a weight and 2 operations on it for each token
# make that 160 tokens, and the products' tiles fill the GPU from some times as many on. Of 384, 512 and 768 it is the
# one that ended a batch soonest on an H200.
FULL_STEP = 512


def prompt_tokens(
    to_come: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, num_decodes: int, max_running: int
) -> int:
    """How many tokens of prompts the next step computes beside its `num_decodes` decodes, at least.

    to_come: outputs that each running sequence has yet to produce. Of those whose prompt is not computed, in the order
    in which they will be: `prompts`, the tokens that are missing of it, and `outputs`, how many come after it.

    The batch lasts as many steps as the longest of all has outputs to come, or as all take `max_running` at a time. A
    request that is to end by then has its prompt computed when as many steps are left as it has outputs. The rate is
    the least steady one that keeps to all of this, or what fills the step.
    """
    longest = max(int(to_come.max(initial=0)), int(outputs.max(initial=0)))
    steps = max(longest, -(-int(to_come.sum() + outputs.sum()) // max_running))
    rates = np.cumsum(prompts) / np.maximum(steps - outputs + 1, 1)
    return max(FULL_STEP - num_decodes, int(np.ceil(rates.max(initial=0))))
