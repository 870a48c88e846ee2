"""Engines on the CPU that end with their test."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine, load_components


def clock() -> Callable[[], float]:
    """Seconds that pass as somebody asks: who goes first, starves and is preempted does not depend on the machine."""
    ticks = itertools.count(0.0, 1e-4)
    return lambda: next(ticks)


@contextmanager
def checked_engines(folder: Path, **defaults: object) -> Iterator[Callable[..., Engine]]:
    """A function that makes engines for the model in `folder`, in float32. Its keywords are settings, which go before
    `defaults`; its first argument loads the components. At the end, no page is lost and no sequence is left."""
    engines: list[Engine] = []

    def make(load: Callable[[Path, WorkerConfig], Components] = load_components, **config: object) -> Engine:
        settings = {"device": "cpu", "dtype": "float32", **defaults, **config}
        engines.append(Engine(folder, WorkerConfig.model_validate(settings), load=load, clock=clock()))
        return engines[-1]

    yield make
    for one in engines:
        one.check_integrity()
        assert len(one.scheduler) == 0
        one.close()
