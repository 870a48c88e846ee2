"""The hit rate of a cache with checkpoints of recurrent states, next to that of one that can be continued at any page.

    python -m bench.fleet.checkpoint_hits

Requests of `workloads` come one after the other to one replica: the real scheduler and its tree, without a model. Both
caches hold as many tokens. A checkpoint takes the memory of `ROW_TOKENS` tokens of KV, and all together that of the KV
cache, which is the default (`worker/executor/state_cache.py`). Answers are in the full cache, and in the other one not:
a little less than it has, since long answers get checkpoints too.
"""

import argparse

import numpy as np

from bench.fleet.one_cache import OneCache
from bench.fleet.workloads import MADE, FleetRequest, chain, token_ids
from radix.checkpoints import CheckpointTree
from radix.pages import PagePool
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.messages import Generate, SamplingParams
from worker.scheduler.scheduler import Scheduler
from worker.step import SampledTokens

PAGE_SIZE = 16
ROW_TOKENS = 3000  # Qwen3.5-35B-A3B in 16 bits: 63 MB a row, 20 KB a token
LONGEST = 1 << 16
LOADS = ("zipf", "hot_prefix", "agents")


class CheckpointCache:
    """A replica's cache with checkpoints, as its scheduler fills it."""

    def __init__(self, kv_tokens: int, rows: int, interval: int) -> None:
        settings = {"page_size": PAGE_SIZE, "token_budget": LONGEST, "max_running": 1, "checkpoint_interval": interval}
        config = WorkerConfig.model_validate(settings)
        pool = PagePool(kv_tokens // PAGE_SIZE, PAGE_SIZE)
        self.tree = CheckpointTree(PAGE_SIZE, pool, PagePool(rows, PAGE_SIZE))
        self._scheduler = Scheduler(
            config,
            self.tree,
            vocab_size=1 << 30,
            context_length=LONGEST,
            eos_token_ids=(),
            policy=CostStore().policy(config, overlap=False),
        )

    def use(self, tokens: np.ndarray) -> int:
        """Runs a prompt, int32 [n]. Returns the length of the prefix that it went on from."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self._scheduler.add(Generate(request_id="one", prompt_ids=tokens.tolist(), sampling=sampling))
        step = self._scheduler.schedule().step
        assert step is not None and step.sampled.tolist() == [0], "a step takes a whole prompt"
        self._scheduler.update(step, step.sampled, SampledTokens(np.zeros(1, dtype=np.int64), {}, {}, []), {})
        (output,) = self._scheduler.take_outputs()
        assert output.cached_tokens is not None, output.failure
        return output.cached_tokens


def in_turns(requests: list[FleetRequest]) -> list[FleetRequest]:
    """All requests with their follow-ups, as if each took five seconds."""
    begins = [(request.at_s, list(chain([request]))) for request in requests]
    timed = [(at_s + 5.0 * turn, one) for at_s, each in begins for turn, one in enumerate(each)]
    return [one for _, one in sorted(timed, key=lambda pair: pair[0])]


def hit_rates(load: str, count: int, kv_tokens: int, interval: int) -> tuple[float, float, int]:
    """Hit rates of the full cache and of that with checkpoints, and the number of evicted checkpoints."""
    full, rows = OneCache(kv_tokens // PAGE_SIZE, PAGE_SIZE), kv_tokens // ROW_TOKENS
    checkpoints = CheckpointCache(kv_tokens, rows, interval)
    prompt = hits = found = 0
    for request in in_turns(MADE[load](np.random.default_rng(0), count, 8)):
        tokens = token_ids(request.spans)
        prompt += len(tokens)
        hits += full.use(tokens)
        full.use(token_ids((*request.spans, request.answer)))
        found += checkpoints.use(tokens)
    checkpoints.tree.check_integrity()
    return hits / prompt, found / prompt, checkpoints.tree.num_checkpoints_evicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="requests of each load")
    parser.add_argument("--kv-tokens", type=int, default=1_000_000, help="tokens that each cache holds")
    parser.add_argument("--interval", type=int, default=2048, help="checkpoint_interval")
    options = parser.parse_args()
    print(f"{'load':<12}{'full':>8}{'checkpoints':>13}{'ratio':>8}{'evicted':>9}")
    for load in LOADS:
        full, found, evicted = hit_rates(load, options.count, options.kv_tokens, options.interval)
        print(f"{load:<12}{full:>8.3f}{found:>13.3f}{found / full:>8.3f}{evicted:>9}")


if __name__ == "__main__":
    main()
