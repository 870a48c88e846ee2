"""A policy's view of sequences, and budgets that are filled."""

from typing import Any

import numpy as np

from pipeline.budget import Budget
from pipeline.policy import SchedulerView


def view(decodes: Any = (), waiting: Any = (), **more: Any) -> SchedulerView:
    """Sequences that decode, by context, none in flight; and what the others lack."""
    counts: dict[str, Any] = {"decoding": len(decodes), "decoding_context": sum(decodes)}
    return SchedulerView(**{**counts, "waiting": len(waiting), "waiting_tokens": sum(waiting), **more})


def fill(budget: Budget | None, decodes: Any = (), prompts: Any = ()) -> tuple[int, list[int]]:
    """Decodes taken and the chunks of prompts, each (start, missing)."""
    assert budget is not None
    taken = budget.take_decodes(np.array(decodes, dtype=np.int64))
    sizes = []
    for start, missing in prompts:
        size = budget.chunk(start, missing, missing)
        if size:
            budget.add(start, size)
        sizes.append(size)
    return taken, sizes
