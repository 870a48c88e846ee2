"""The size of a chunk."""

import pytest

from pipeline.chunk import chunk_tokens


@pytest.mark.parametrize(
    ("missing", "budget", "room", "size"),
    [
        (1, 512, 16, 1),  # a decode
        (1000, 512, 2000, 512),  # a long prompt takes what the step has left
        (1000, 512, 40, 40),  # or what there are pages for
        (10, 512, 2000, 10),
        (10, 0, 2000, 0),
        (10, -3, 2000, 0),
        (10, 512, 0, 0),
    ],
)
def test_sizes(missing, budget, room, size):
    assert chunk_tokens(missing, budget, room) == size


def test_a_complete_sequence_is_refused():
    with pytest.raises(ValueError, match="nothing missing"):
        chunk_tokens(0, 1, 1)
