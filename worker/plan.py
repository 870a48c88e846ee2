"""One step's plan: what the scheduler tells every rank to compute. Every rank that applies the same plans in the same
order holds the same page tables; nothing else passes from the scheduler to the ranks."""

import msgspec

# The token of a chunk that the step before samples: no host knows it yet, `last_tokens[slot]` on the device has it.
PENDING = -1


class Chunk(msgspec.Struct, array_like=True, gc=False):
    """The part of one sequence that a step computes: positions `start` to `start + len(token_ids)`.

    `slot` is the sequence's row in the ranks' page tables and in the sampler, its own from admission until it finishes
    or is preempted. `pages` are appended to the row's table before the step runs, after `reset` has emptied it.
    A chunk whose `token_ids` are `[PENDING]` takes its token from the device.
    Token i of a sequence lives in page `table[i // page_size]` at offset `i % page_size`. The last `num_logits` tokens
    of the chunk give a row of logits each: none in the middle of a prompt, one where the next token is sampled, more
    where log probabilities of the prompt are asked for.
    """

    slot: int
    start: int
    token_ids: list[int]
    pages: list[int]
    reset: bool
    num_logits: int


class Plan(msgspec.Struct, array_like=True):
    """One step. Chunks of different sequences, in the order in which their logits come back."""

    step: int
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(len(c.token_ids) for c in self.chunks)
