"""A file for what a replica has learned of output lengths: the next start of the model goes on from there.

The file holds sums of hashed features. No prompt can be read from it.
"""

import logging
import time
import zipfile
from pathlib import Path

import numpy as np

from worker.folders import replaced
from worker.lengths.predictor import OutputLengthPredictor

log = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0  # at most, and only while nothing runs


class LengthStore:
    """A predictor and its file. Replicas of one model on one machine share the file: the one that saves last keeps what
    it has learned."""

    def __init__(self, file: Path | None = None) -> None:
        """Loads what is in `file`, if it is there and can be read. Without a file nothing is saved."""
        self.predictor = OutputLengthPredictor()
        self._file = file
        self._saved_s = time.monotonic()
        self._is_told = False  # that it cannot be saved
        if file is not None and file.exists():
            try:
                with np.load(file, allow_pickle=False) as learned:
                    self.predictor.restore(learned)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                log.warning("output lengths are learned from the beginning: %s cannot be read: %s", file, error)
        self._num_saved = self.predictor.num_learned

    @classmethod
    def load(cls, model: Path, folder: Path | None) -> "LengthStore":
        """The store of a model, given as a folder or file, in `folder`; one that saves nothing without a folder."""
        name = model.stem if model.is_file() else model.name
        return cls(None if folder is None else folder / f"{name}.npz")

    def save(self) -> None:
        """Writes the file, if anything was learned since the last time. If it cannot be written, warns once, and the
        next call tries again: a disk may be full for a while."""
        if self._file is None or self.predictor.num_learned == self._num_saved:
            return
        self._saved_s, learned = time.monotonic(), self.predictor.num_learned
        try:
            with replaced(self._file) as half, half.open("wb") as file:
                np.savez(file, **self.predictor.learned())  # type: ignore[arg-type]
        except OSError as error:
            if not self._is_told:
                log.warning("what was learned of output lengths is not kept: %s", error)
            self._is_told = True
        else:
            self._num_saved, self._is_told = learned, False

    def save_if_due(self) -> None:
        """Calls `save` at most once every `SAVE_EVERY_S`. Called while nothing runs."""
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()
