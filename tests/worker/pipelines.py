"""Engines of several stages and ranks, whose other ranks are threads of this process."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.worker.conftest import without_grammars
from tests.worker.engines import clock
from tests.worker.references import settings
from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine
from worker.executor.multi_rank import Follower, MultiRankExecutor, other_ranks
from worker.parallel.rank_store import find_store, open_store

ENDS_S = 60


@contextmanager
def pipeline(
    folder: Path,
    *,
    fails: bool = False,
    own_parts: Mapping[str, object] = MappingProxyType({}),
    change: Callable[[Components, WorkerConfig], Components] = lambda parts, config: parts,
    **changes: object,
) -> Iterator[Engine]:
    """An engine whose other ranks are threads, and stay when they have ended, as the actors around them do. `own_parts`
    are fields of `Components` in place of the usual ones; `change` makes others of those."""
    config = settings(**changes)
    store, meeting = open_store()
    kept: list[Follower] = []

    def follow(rank: int) -> None:
        follower = Follower(folder, config, rank, find_store(meeting))
        kept.append(follower)
        follower.run()

    def parts(model: Path, own: WorkerConfig) -> Components:
        executor = leading.enter_context(closing(MultiRankExecutor(model, own, store)))
        return change(without_grammars(model, own, executor)._replace(**own_parts), own)

    others = other_ranks(config)
    with ThreadPoolExecutor(len(others)) as threads, ExitStack() as leading:
        followers: list[Future[None]] = [threads.submit(follow, rank) for rank in others]
        with closing(Engine(folder, config, load=parts, clock=clock())) as engine:
            yield engine
            if not fails:
                engine.check_integrity()
        for follower in followers:
            assert (follower.exception(ENDS_S) is not None) == fails
