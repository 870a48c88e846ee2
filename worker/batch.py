"""One step in the making: which sequences are in it, with how many tokens each, and what is left of its budget."""

from worker.plan import PENDING, Chunk, Plan
from worker.request import Sequence

# Most in a step: where log probabilities of prompts are wanted, every token gives a row, of vocabulary x 4 bytes.
PROMPT_LOGIT_ROWS = 256

# Most chunks are decodes without a new page: they share these.
_PENDING_IDS = [PENDING]
_NO_PAGES: list[int] = []


class Batch:
    """Sequences and the sizes of their chunks. They are unchanged until `plan`."""

    def __init__(self, token_budget: int, page_size: int) -> None:
        self.tokens_left = token_budget
        self._page_size = page_size
        self._prompt_rows_left = PROMPT_LOGIT_ROWS
        self._sizes: dict[Sequence, int] = {}
        self._prefilling: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def budget_for(self, seq: Sequence) -> int:
        """Tokens that `seq` may have of this step."""
        return min(self.tokens_left, self._prompt_rows_left) if seq.wants_prompt_logits else self.tokens_left

    def add_decode(self, seq: Sequence) -> None:
        """`add` of one token, for a sequence past its prompt."""
        self._sizes[seq] = 1
        self.tokens_left -= 1

    def add(self, seq: Sequence, size: int) -> None:
        self._sizes[seq] = size
        self.tokens_left -= size
        if seq.wants_prompt_logits:
            self._prompt_rows_left -= size

    def watch(self, seq: Sequence) -> None:
        """Counts `seq`, of which this step or the one in flight computes a part of the prompt, among those whose prefix
        others may wait for."""
        self._prefilling.append(seq)

    def discard(self, seq: Sequence) -> None:
        """Takes a sequence out again, if it is in."""
        self.tokens_left += self._sizes.pop(seq, 0)
        if seq in self._prefilling:
            self._prefilling.remove(seq)

    def computes_prefix_of(self, seq: Sequence) -> bool:
        """Whether a sequence in this step, or in the one in flight, computes the page that the waiting `seq` would
        compute first. The tree has it once that step has ended, so that waiting costs less than computing it twice."""
        for other in self._prefilling:
            start = other.num_confirmed - other.num_confirmed % self._page_size
            end = start + self._page_size
            if start < seq.cached_estimate or end > seq.reusable_tokens:
                continue
            # The page itself first: it is the likeliest to differ.
            if seq.tokens.agrees(other.tokens, start, end) and seq.tokens.agrees(other.tokens, 0, start):
                return True
        return False

    def sequences(self) -> list[Sequence]:
        """Those in this step, in the order of the plan's chunks."""
        return list(self._sizes)

    def plan(self, step: int) -> Plan:
        """The step as the ranks see it. From now on the sequences count as computed so far, and those of which nothing
        is missing then have one more token pending."""
        return Plan(step, [_chunk(seq, size) for seq, size in self._sizes.items()])


def _chunk(seq: Sequence, size: int) -> Chunk:
    start, end, known = seq.num_computed, seq.num_computed + size, seq.tokens.size
    if start == known:
        token_ids = _PENDING_IDS
    elif size == 1 and end == known:
        token_ids = [seq.last_token]
    else:
        token_ids = seq.tokens.view(start, end).tolist()
    num_logits = 0
    if end == known + seq.num_pending:
        num_logits = 1
        seq.num_pending += 1
    if seq.prompt_logprobs is not None and seq.wants_prompt_logits:
        num_logits = end - max(start, seq.reusable_tokens)
    seq.num_computed = end
    reset, num_pages = seq.new_table, seq.pages.size
    if not reset and seq.num_sent_pages == num_pages:
        return Chunk(seq.slot, start, token_ids, _NO_PAGES, False, num_logits)
    pages = seq.pages.view(0 if reset else seq.num_sent_pages, num_pages).tolist()
    seq.new_table = False
    seq.num_sent_pages = num_pages
    return Chunk(seq.slot, start, token_ids, pages, reset, num_logits)
