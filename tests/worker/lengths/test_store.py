"""What was learned of output lengths outlives the replica."""

import logging
from pathlib import Path

import numpy as np
import pytest

from worker.lengths import LengthStore
from worker.lengths.features import NUM_FEATURES
from worker.lengths.predictor import MIN_LEARNED_REQUESTS
from worker.messages import Generate, SamplingParams

PROMPTS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def teach(store: LengthStore) -> None:
    """Outputs of 10 tokens for the first prompt, and of 500 for the second."""
    for number in range(2 * MIN_LEARNED_REQUESTS):
        known = store.predictor.arrived(request(number % 2))
        store.predictor.ended(known, (10, 500)[number % 2], was_cut=False)


def request(which: int) -> Generate:
    return Generate(request_id="r", prompt_ids=PROMPTS[which], sampling=SamplingParams(max_tokens=1000))


def test_the_next_replica_knows_what_the_last_one_learned(tmp_path: Path) -> None:
    store = LengthStore.load(Path("models/tiny-1.5b"), tmp_path)
    teach(store)
    store.save()
    again = LengthStore.load(Path("elsewhere/tiny-1.5b"), tmp_path)
    for which in (0, 1):
        assert again.predictor.arrived(request(which)).estimate == store.predictor.arrived(request(which)).estimate
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-1.5b.npz"]
    assert LengthStore.load(Path("models/tiny-1.7b"), tmp_path).predictor.num_learned == 0


def test_nothing_is_written_before_anything_was_learned(tmp_path: Path) -> None:
    LengthStore.load(Path("tiny"), tmp_path / "lengths").save()
    LengthStore.load(Path("tiny"), None).save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "infinite", "empty"])
def test_a_file_that_cannot_be_read_is_no_obstacle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store = LengthStore.load(Path("tiny"), tmp_path)
    teach(store)
    store.save()
    file = tmp_path / "tiny.npz"
    learned = store.predictor.learned()
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage in ("text", "empty"):
        file.write_text("no archive" if damage == "text" else "")
    else:
        weights = np.zeros(7) if damage == "shape" else np.full(NUM_FEATURES, np.inf)
        np.savez(file, known=learned["known"], weights=weights, squares=learned["squares"])
    with caplog.at_level(logging.WARNING):
        again = LengthStore.load(Path("tiny"), tmp_path)
    assert again.predictor.num_learned == 0 and "tiny.npz" in caplog.text
    teach(again)
    again.save()  # over the damaged one
    assert LengthStore.load(Path("tiny"), tmp_path).predictor.num_learned == 2 * MIN_LEARNED_REQUESTS


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "lengths").write_text("a file")
    store = LengthStore.load(Path("tiny"), tmp_path / "lengths")
    teach(store)
    with caplog.at_level(logging.WARNING):
        store.save()
        teach(store)
        store.save()
    assert caplog.text.count("not kept") == 1
    (tmp_path / "lengths").unlink()  # as a disk that is full no longer
    store.save()
    assert LengthStore.load(Path("tiny"), tmp_path / "lengths").predictor.num_learned == 4 * MIN_LEARNED_REQUESTS
