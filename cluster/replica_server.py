"""A replica's server, made from the configuration, under Ray and without it. Imports torch."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from worker.config import WorkerConfig
from worker.engine.engine import load_components
from worker.engine.server import Server
from worker.executor.executor import Executor
from worker.executor.launch import open_executor
from worker.executor.multi_rank import MultiRankExecutor
from worker.folders import cache_folder
from worker.parallel.rank_store import RankStore


def open_server(folder: Path, config: WorkerConfig, host: str, secret: bytes, store: RankStore | None = None) -> Server:
    """Loads the model of `folder` and binds to a free port of `host`. This process becomes the leading rank. `secret`:
    that of the routers. `store`: where the other ranks of the replica come; without one they are started here. Raises
    the errors of the model's folder, the weights or the device."""
    caches = cache_folder()
    gemm_folder = caches / "gemm"
    opened: Callable[..., Executor] = partial(open_executor, gemm_folder=gemm_folder)
    if store is not None:
        opened = partial(MultiRankExecutor, store=store, host=host, gemm_folder=gemm_folder)
    load = partial(
        load_components,
        make_executor=opened,
        cost_folder=caches / "costs",
        length_folder=caches / "lengths",
        grammar_folder=caches / "grammars",
    )
    return Server(folder, config, host=host, secret=secret, load=load)


def published(server: Server) -> dict[str, Any]:
    """Returns what routers must know about the replica:

    | key | value |
    | --- | --- |
    | `address` | of its ZeroMQ socket |
    | `context_length` | in tokens: what both the model and the KV cache allow |
    | `attention` | its `worker.executor.attention_selector.AttentionChoice`, as a tuple |
    """
    engine = server.engine
    return {
        "address": server.address,
        "context_length": engine.scheduler.context_length,
        "attention": tuple(engine.executor.attention_choice),
    }
