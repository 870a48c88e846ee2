"""Replicas in this process: every other rank has a process and a device of its own."""

import gc
import time
from pathlib import Path
from typing import Any

import torch

from bench.pipeline.layout import ParallelLayout, Setting
from bench.replica.replica import speaking
from pipeline.cost import CostModel
from pipeline.meter import Meter
from worker.config import WorkerConfig
from worker.engine.engine import Components, Engine, load_components
from worker.executor.gpu_defaults import with_gpu_defaults
from worker.messages import Generate, Output


class InProcess:
    """An engine in this process, as a `bench.pipeline.real_site.MeteredReplica`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv_tokens = engine.executor.num_pages * engine.executor.page_size

    def add(self, request: Generate) -> None:
        self.engine.add(request)

    def take_outputs(self, wait_s: float) -> list[Output]:
        if self.engine.has_work:
            return self.engine.step()
        time.sleep(max(0.0, wait_s))
        return []

    def abort(self, request_ids: list[str]) -> None:
        self.engine.abort(request_ids)

    def settle(self) -> None:
        self.finish()
        self.engine.reset_cache()
        self.engine.meter().reset()
        gc.freeze()  # collecting all objects that stay takes longer than many steps

    def observed(self) -> tuple[Meter, list[CostModel]]:
        self.finish()
        return self.engine.meter(), self.engine.costs.models

    def finish(self) -> None:
        """Runs steps until nothing is in flight."""
        while self.engine.has_work:
            self.engine.step()


class LocalRanks:
    """A `bench.pipeline.real_site.ReplicaSource` on this machine. The ranks of a layout are loaded once for all
    settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings`: of every replica of the model in `folder`."""
        self._folder, self._settings = folder, settings
        self._layout: ParallelLayout | None = None
        self._setting: Setting | None = None
        self._parts: Components | None = None
        self._target: InProcess | None = None

    def under(self, layout: ParallelLayout, setting: Setting) -> tuple[InProcess, bool]:
        is_new = layout != self._layout
        if is_new:
            self.close()
            self._layout = layout
            # With this schedule the costs of steps are learned on every layout.
            with speaking():
                self._parts = load_components(self._folder, self._config(layout))
        if self._target is None or setting != self._setting:
            self._setting, self._target = setting, self._begin(layout, setting)
        return self._target, is_new

    def close(self) -> None:
        if self._target is not None:
            self._target.finish()
            self._target.engine.close()
        elif self._parts is not None:
            self._parts.executor.close()
            self._parts.grammars.close()
        self._layout = self._setting = self._parts = self._target = None
        gc.unfreeze()  # otherwise reference cycles keep the memory that the next layout needs
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _config(self, layout: ParallelLayout) -> WorkerConfig:
        settings = self._settings | {"schedule": "uniform", "tp": layout.tp, "pp": layout.pp}
        return with_gpu_defaults(WorkerConfig(**settings), self._folder)

    def _begin(self, layout: ParallelLayout, setting: Setting) -> InProcess:
        """An engine with another setting on the same ranks. The learned costs of steps are kept."""
        assert self._parts is not None
        if self._target is not None:
            self._target.finish()
        parts = self._parts
        return InProcess(Engine(self._folder, setting.applied(self._config(layout)), load=lambda *_: parts))
