"""A file for what a replica has learned of output lengths: the next start of the model goes on from there.

The file holds sums of hashed features. No prompt can be read from it.
"""

import logging
import zipfile
from pathlib import Path

import numpy as np

from worker.folders import replaced
from worker.lengths.predictor import OutputLengthPredictor
from worker.saver import Saver

log = logging.getLogger(__name__)


class LengthStore:
    """A predictor and its file. Replicas of one model on one machine share the file: the one that saves last keeps what
    it has learned."""

    def __init__(self, file: Path | None = None) -> None:
        """Loads what is in `file`, if it is there and can be read. Without a file nothing is saved."""
        self.predictor = OutputLengthPredictor()
        self._file = file
        if file is not None and file.exists():
            try:
                with np.load(file, allow_pickle=False) as learned:
                    self.predictor.restore(learned)
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                log.warning("output lengths are learned from the beginning: %s cannot be read: %s", file, error)
        self._saver = Saver("what was learned of output lengths", lambda: self.predictor.num_learned, self._write)

    @classmethod
    def load(cls, model: Path, folder: Path | None) -> "LengthStore":
        """The store of a model, given as a folder or file, in `folder`; one that saves nothing without a folder."""
        name = model.stem if model.is_file() else model.name
        return cls(None if folder is None else folder / f"{name}.npz")

    def save(self) -> None:
        """Writes the file, if anything was learned since the last time."""
        self._saver.save()

    def save_if_due(self) -> None:
        """As `Saver.save_if_due`."""
        self._saver.save_if_due()

    def _write(self) -> None:
        if self._file is not None:
            with replaced(self._file) as half, half.open("wb") as file:
                np.savez(file, **self.predictor.learned())  # type: ignore[arg-type]
