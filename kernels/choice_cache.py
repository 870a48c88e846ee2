"""Choices that are timed at start, on disk, so that only the first start on a kind of GPU times them."""

import json
import logging
import os
import re
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

logger = logging.getLogger(__name__)

C = TypeVar("C")


class ChoiceCache(ABC, Generic[C]):
    """Choices by key, in one file of a folder; without a folder nothing is kept.

    Ranks of one machine may share the file: that of the last one to `save` stays, with the choices of those that it has
    read.
    """

    what: ClassVar[str]
    """What is chosen, for people."""

    def __init__(self, folder: Path | None, identity: str) -> None:
        """`identity`: all that the choices hold for, such as the kind of GPU. A file that cannot be read counts as
        empty."""
        self._file = None if folder is None else folder / (re.sub(r"[^A-Za-z0-9.]+", "_", identity) + ".json")
        self._choices = self._read()
        self._is_new = False

    @staticmethod
    @abstractmethod
    def _saved(choice: C) -> Any:
        """A choice as JSON holds it."""

    @staticmethod
    @abstractmethod
    def _restored(saved: Any) -> C:
        """The choice that `_saved` has made this of. Raises ValueError, TypeError or AttributeError for anything
        else."""

    def _found(self, key: str) -> C | None:
        return self._choices.get(key)

    def _add(self, key: str, choice: C) -> None:
        self._choices[key], self._is_new = choice, True

    def save(self) -> None:
        """Writes the file if a choice was added. Gives up with a warning if the folder cannot be written."""
        if self._file is None or not self._is_new:
            return
        choices = {key: self._saved(choice) for key, choice in (self._read() | self._choices).items()}
        half = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            half.write_text(json.dumps(choices))
            half.replace(self._file)
        except OSError as error:
            logger.warning("The choice of %s is not kept: %s", self.what, error)

    def _read(self) -> dict[str, C]:
        if self._file is None:
            return {}
        try:
            saved = json.loads(self._file.read_text())
            return {str(key): self._restored(choice) for key, choice in saved.items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is ignored, and %s are timed again: %s", self._file, self.what, error)
            return {}
