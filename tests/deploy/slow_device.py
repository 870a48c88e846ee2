"""A device whose steps take a given time, so that the streams of a tiny model last: a module for a host's environment.

Imported by a .pth file, so that every Python process there has it. `SHOAL_REHEARSAL_STEP_S` says how long a step takes.
"""

import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ENGINE = "worker.engine.engine"


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != ENGINE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            step = module.Engine.step

            def slow(engine: object) -> object:
                time.sleep(float(os.environ.get("SHOAL_REHEARSAL_STEP_S", "0.05")))
                return step(engine)

            module.Engine.step = slow

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
