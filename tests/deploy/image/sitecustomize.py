"""Part of the images of rehearsals: a served model whose steps take as long as a large one's, SHOAL_STEP_S seconds. One
of random weights, as a benchmark has, is as quick as it is.

Python imports it as it starts.
"""

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

ENGINE = "worker.engine.engine"


class _Slow(Loader):
    """Loads the engine's module, and slows its steps."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        init, step = module.Engine.__init__, module.Engine.step
        slow: set[int] = set()

        def made(engine: object, model_dir: Path, config: Any, **more: Any) -> None:
            init(engine, model_dir, config, **more)
            if config.load_format != "dummy":
                slow.add(id(engine))

        def taken(engine: object) -> object:
            if id(engine) in slow:
                time.sleep(float(os.environ["SHOAL_STEP_S"]))
            return step(engine)

        module.Engine.__init__, module.Engine.step = made, taken


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name == ENGINE else None  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _Slow(spec.loader)
        return spec


if "SHOAL_STEP_S" in os.environ:
    sys.meta_path.insert(0, _Finder())
