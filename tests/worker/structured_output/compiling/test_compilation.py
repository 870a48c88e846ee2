"""The trial of a compiled grammar: whether its masks are quick enough for a server."""

from collections.abc import Iterator

import numpy as np
import pytest

from worker.structured_output import GrammarError
from worker.structured_output.compiling import compilation as module
from worker.structured_output.compiling.compilation import Compilation

SLOW, QUICK = 1.0, 0.0
VOCAB_SIZE = 64


class TimedMatcher:
    """Allows one token. Its masks take these times, as its clock tells them."""

    now_s = 0.0

    def __init__(self, times_s: list[float]) -> None:
        self._times_s = iter(times_s)

    def fill_next_token_bitmask(self, bitmask: np.ndarray, row: int, debug: bool) -> None:
        bitmask[row, 0] = 1
        TimedMatcher.now_s += next(self._times_s)

    def accept_token(self, token_id: int, debug: bool) -> bool:
        return True

    def is_terminated(self) -> bool:
        return False


@pytest.fixture
def compilation(monkeypatch: pytest.MonkeyPatch) -> Compilation:
    made = Compilation.__new__(Compilation)
    made._vocab_size = VOCAB_SIZE
    monkeypatch.setattr(module.time, "thread_time", lambda: TimedMatcher.now_s)
    return made


def matchers(*trials: list[float]) -> Iterator[TimedMatcher]:
    return (TimedMatcher(times_s) for times_s in trials)


def test_a_mask_that_is_slow_once_is_tried_again(compilation: Compilation) -> None:
    trials = matchers([QUICK, SLOW], [SLOW], [QUICK, QUICK, QUICK])
    compilation._try_out(lambda: next(trials), tokens=3)
    assert next(trials, None) is None


def test_a_grammar_whose_masks_are_slow_each_time_is_refused(compilation: Compilation) -> None:
    trials = matchers([QUICK, SLOW], [QUICK, SLOW], [QUICK, SLOW])
    with pytest.raises(GrammarError, match="too slow to follow"):
        compilation._try_out(lambda: next(trials), tokens=3)
