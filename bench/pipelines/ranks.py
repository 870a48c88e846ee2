"""Replicas of this process: a process and a device for every other rank."""

import gc
import time
from pathlib import Path
from typing import Any

import torch

from bench.pipelines.layout import Layout, Setting
from bench.replica import speaking
from pipeline.cost import CostModel
from pipeline.meter import Meter
from worker.config import WorkerConfig
from worker.engine import Engine, Parts, load_parts
from worker.messages import Generate, Output
from worker.runner import settled


class InProcess:
    """An engine of this process, as `bench.pipelines.measured.Target`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.kv_tokens = engine.runner.num_pages * engine.runner.page_size

    def add(self, request: Generate) -> None:
        self.engine.add(request)

    def take(self, wait_s: float) -> list[Output]:
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
        gc.freeze()  # to look through all that stays takes longer than many steps

    def observed(self) -> tuple[Meter, list[CostModel]]:
        self.finish()
        return self.engine.meter(), self.engine.costs.models

    def finish(self) -> None:
        """Until nothing is in flight."""
        while self.engine.has_work:
            self.engine.step()


class Ranks:
    """`bench.pipelines.measured.Targets` on this machine. The ranks of a layout are loaded once, for all settings."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        """`settings` of every replica of the model in `folder`."""
        self._folder, self._settings = folder, settings
        self._layout: Layout | None = None
        self._setting: Setting | None = None
        self._parts: Parts | None = None
        self._target: InProcess | None = None

    def under(self, layout: Layout, setting: Setting) -> tuple[InProcess, bool]:
        is_new = layout != self._layout
        if is_new:
            self.close()
            self._layout = layout
            # With this schedule the costs of steps are learned, whatever the layout.
            with speaking():
                self._parts = load_parts(self._folder, self._config(layout, schedule="uniform"))
        if self._target is None or setting != self._setting:
            self._setting, self._target = setting, self._begin(layout, setting)
        return self._target, is_new

    def close(self) -> None:
        if self._target is not None:
            self._target.finish()
            self._target.engine.close()
        elif self._parts is not None:
            self._parts.runner.close()
            self._parts.grammars.close()
        self._layout = self._setting = self._parts = self._target = None
        gc.unfreeze()  # or what is in circles keeps the memory that the next layout needs
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _config(self, layout: Layout, **more: Any) -> WorkerConfig:
        return settled(WorkerConfig(**self._settings | more, tp=layout.tp, pp=layout.pp))

    def _begin(self, layout: Layout, setting: Setting) -> InProcess:
        """An engine with another setting on the same ranks. What steps cost is still known."""
        assert self._parts is not None
        if self._target is not None:
            self._target.finish()
        parts = self._parts
        return InProcess(Engine(self._folder, self._config(layout, **setting.settings), load=lambda *_: parts))
