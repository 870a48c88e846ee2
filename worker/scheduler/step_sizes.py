"""How many tokens steps have, for operators."""

from worker.messages import MAX_COUNTED_STEP_TOKENS, ReplicaLoad

NUM_BOUNDS = MAX_COUNTED_STEP_TOKENS.bit_length()  # 1, 2, 4 and so on


class StepSizes:
    """Counts steps by their number of tokens."""

    def __init__(self) -> None:
        self._counts = [0] * (NUM_BOUNDS + 1)
        self._tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts a step."""
        self._counts[min((num_tokens - 1).bit_length(), NUM_BOUNDS)] += 1
        self._tokens += num_tokens

    def describe(self, load: ReplicaLoad) -> None:
        """Sets what the load tells of steps."""
        load.step_tokens, load.computed_tokens = list(self._counts), self._tokens
