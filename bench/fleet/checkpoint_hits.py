"""The hit rate of a cache that can be continued from some positions only, next to that of one that can be at any page.

    python -m bench.fleet.checkpoint_hits
    python -m bench.fleet.checkpoint_hits --windows gemma3-12b,gpt-oss-20b

Requests of `workloads` come one after the other to one replica: the real scheduler and its tree, without a model. Both
caches hold as many tokens. A checkpoint takes the memory of `ROW_TOKENS` tokens of KV, and all together that of the KV
cache, which is the default (`worker/executor/memory_budget.py`). Answers are in the full cache, and in the other one
not: a little less than it has, since long answers get checkpoints too.

With `--windows`, the other caches are those of models with pages of windows, by the names of
`bench.replica.dummy_models`. They have the memory in which all layers keep `--kv-tokens` tokens, and hold more. `full`
holds what all layers keep in this memory; `as long` is a full cache that holds as many tokens as the one with windows.
Before that, a table says how many tokens of sequences of one length this memory holds: running, each with its window,
with the default division of the memory and with that which fits the length.
"""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bench.fleet.one_cache import OneCache
from bench.fleet.workloads import MADE, FleetRequest, chain, token_ids
from bench.replica.dummy_models import SHAPES, written
from bench.results import Figure
from bench.results import write as write_result
from worker.config import WorkerConfig
from worker.engine.cost_store import CostStore
from worker.executor.memory_budget import KVBudget, token_bytes
from worker.kv_layout import KVGroup, KVLayout
from worker.messages import Generate, Output, SamplingParams
from worker.models.config import decoder_config, read_config
from worker.scheduler.scheduler import Scheduler
from worker.step import SampledTokens

PAGE_SIZE = 16
ROW_TOKENS = 3000  # Qwen3.5-35B-A3B in 16 bits: 63 MB a row, 20 KB a token
MAX_CONTEXT_TOKENS = 1 << 16
LOADS = ("zipf", "hot_prefix", "agents")
CHUNK = 8192  # token_budget of models with windows, as on a GPU
LENGTHS = (512, 2048, 8192, 32768, 131072)  # of sequences, in tokens


class ScheduledCache:
    """A replica's cache, as its scheduler fills it."""

    def __init__(self, groups: Sequence[KVGroup], token_budget: int, interval: int) -> None:
        settings = {"page_size": PAGE_SIZE, "max_running": 1, "checkpoint_interval": interval}
        config = WorkerConfig.model_validate(settings | {"token_budget": token_budget})
        self._scheduler = Scheduler(
            config,
            KVLayout(PAGE_SIZE, tuple(groups)),
            vocab_size=1 << 30,
            context_length=MAX_CONTEXT_TOKENS,
            eos_token_ids=(),
            policy=CostStore().policy(config, overlap=False),
        )
        self.tree = self._scheduler.kv_cache.tree

    def use(self, tokens: np.ndarray) -> int:
        """Runs a prompt, int32 [n]. Returns the length of the prefix that it went on from."""
        sampling = SamplingParams(max_tokens=1, temperature=0.0)
        self._scheduler.add(Generate(request_id="one", prompt_ids=tokens.tolist(), sampling=sampling))
        outputs: list[Output] = []
        while not outputs:
            step = self._scheduler.schedule().step
            assert step is not None, "it is alone"
            chosen = step.sampled
            sampled = SampledTokens(np.zeros(len(chosen), dtype=np.int64), {}, {}, [])
            self._scheduler.update(step, chosen, sampled, {})
            outputs = self._scheduler.take_outputs()
        (output,) = outputs
        assert output.cached_tokens is not None, output.failure
        return output.cached_tokens


def with_checkpoints(kv_tokens: int, rows: int, interval: int) -> ScheduledCache:
    """A cache with checkpoints of recurrent states. A step takes a whole prompt."""
    groups = KVGroup("full", (), 0, kv_tokens // PAGE_SIZE), KVGroup("states", (), 0, rows)
    return ScheduledCache(groups, MAX_CONTEXT_TOKENS, interval)


class WindowSizes(NamedTuple):
    """The pages of a model with windows, in the memory in which all layers keep `all_tokens` tokens. `part`: of a
    token's bytes, those of layers that see all."""

    kv_tokens: int
    window_tokens: int
    window: int
    all_tokens: int
    part: float

    @classmethod
    def of(cls, name: str, kv_tokens: int, budget: int) -> "WindowSizes":
        """The sizes of a model of `bench.replica.dummy_models`, as a replica chooses them. `budget`: `token_budget`."""
        with written(name) as folder:
            whole = decoder_config(read_config(folder))
        config = WorkerConfig.model_validate({"page_size": PAGE_SIZE, "token_budget": budget})
        divided = KVBudget(whole, whole, torch.bfloat16, config, whole.context_length)
        window = divided.window
        assert window is not None, f"{name} has no pages of windows"
        in_all = token_bytes(whole, torch.bfloat16)
        layout = divided.layout((kv_tokens * in_all - divided.fixed_bytes) // divided.bytes_per_token)
        of_windows = layout.paged[1].num_units * PAGE_SIZE
        part = whole.windows.count(None) / len(whole.windows)
        return cls(layout.num_pages * PAGE_SIZE, of_windows, window, kv_tokens, part)

    def tokens_of(self, length: int) -> int:
        """Tokens of running sequences of this length for which there is room, parts of sequences included."""
        return min(self.kv_tokens, self.window_tokens * length // self._own(length))

    def fitted_tokens_of(self, length: int) -> int:
        """The same, with the memory divided as sequences of this length need it (`window_kv_tokens`)."""
        return int(self.all_tokens * length / (self.part * length + (1 - self.part) * self._own(length)))

    def _own(self, length: int) -> int:
        return min(length, self.window + 2 * PAGE_SIZE)

    def cache(self, budget: int, interval: int) -> ScheduledCache:
        """An empty cache of these sizes."""
        of_all, of_windows = self.kv_tokens // PAGE_SIZE, self.window_tokens // PAGE_SIZE
        groups = KVGroup("full", (), 0, of_all), KVGroup("window", (), 0, of_windows, self.window)
        return ScheduledCache(groups, budget, interval)


def in_turns(requests: list[FleetRequest]) -> list[FleetRequest]:
    """All requests with their follow-ups, as if each took five seconds."""
    begins = [(request.at_s, list(chain([request]))) for request in requests]
    timed = [(at_s + 5.0 * turn, one) for at_s, each in begins for turn, one in enumerate(each)]
    return [one for _, one in sorted(timed, key=lambda pair: pair[0])]


def hit_rates(load: str, count: int, full_tokens: Sequence[int], cache: ScheduledCache) -> list[float]:
    """Hit rates of full caches that hold `full_tokens` tokens, and of `cache`."""
    caches = [OneCache(tokens // PAGE_SIZE, PAGE_SIZE) for tokens in full_tokens]
    prompt, hits = 0, [0] * (len(caches) + 1)
    for request in in_turns(MADE[load](np.random.default_rng(0), count, 8)):
        tokens = token_ids(request.spans)
        prompt += len(tokens)
        for number, full in enumerate(caches):
            hits[number] += full.use(tokens)
            full.use(token_ids((*request.spans, request.answer)))
        hits[-1] += cache.use(tokens)
    cache.tree.check_integrity()
    return [found / prompt for found in hits]


def compare_windows(name: str, count: int, kv_tokens: int, interval: int) -> list[Figure]:
    """Prints the tables of a model with windows. Returns their figures."""
    sizes, figure = WindowSizes.of(name, kv_tokens, CHUNK), f"models.{SHAPES[name].label}.windows"
    made = []
    print(f"{name}: {sizes.kv_tokens} tokens and {sizes.window_tokens} of windows, instead of {kv_tokens} of both")
    print(f"{'sequences of':<16}{'all':>10}{'windows':>10}{'ratio':>8}{'fitted':>8}")
    for length in LENGTHS:
        held, fitted = sizes.tokens_of(length), sizes.fitted_tokens_of(length)
        print(f"{length:<16}{kv_tokens:>10}{held:>10}{held / kv_tokens:>8.2f}{fitted / kv_tokens:>8.2f}")
        made.append(Figure(f"{figure}.tokens_of_{length}_vs_all", held / kv_tokens, "ratio", True))
        made.append(Figure(f"{figure}.fitted_tokens_of_{length}_vs_all", fitted / kv_tokens, "ratio", True))
    print(f"{'load':<12}{'full':>8}{'as long':>9}{'windows':>9}{'of full':>9}{'of as long':>12}")
    for load in LOADS:
        full, as_long, found = hit_rates(load, count, (kv_tokens, sizes.kv_tokens), sizes.cache(CHUNK, interval))
        print(f"{load:<12}{full:>8.3f}{as_long:>9.3f}{found:>9.3f}{found / full:>9.3f}{found / as_long:>12.3f}")
        made.append(Figure(f"{figure}.{load}.hits_vs_full", found / full, "ratio", True))
        made.append(Figure(f"{figure}.{load}.hits_vs_as_long", found / as_long, "ratio", True))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="requests of each load")
    parser.add_argument("--kv-tokens", type=int, default=1_000_000, help="tokens that each cache holds")
    parser.add_argument("--interval", type=int, default=2048, help="checkpoint_interval")
    parser.add_argument("--windows", default="", help=f"models with windows, of {', '.join(SHAPES)}")
    parser.add_argument("--name", default="", help="of the result that is written; by default none is")
    options = parser.parse_args()
    if options.windows:
        each = [
            compare_windows(name, options.count, options.kv_tokens, options.interval)
            for name in options.windows.split(",")
        ]
        if options.name:
            print(f"written: {write_result(options.name, [figure for some in each for figure in some]).name}")
        return
    print(f"{'load':<12}{'full':>8}{'checkpoints':>13}{'ratio':>8}{'evicted':>9}")
    for load in LOADS:
        cache = with_checkpoints(options.kv_tokens, options.kv_tokens // ROW_TOKENS, options.interval)
        full, found = hit_rates(load, options.count, (options.kv_tokens,), cache)
        print(f"{load:<12}{full:>8.3f}{found:>13.3f}{found / full:>8.3f}{cache.tree.num_points_evicted:>9}")


if __name__ == "__main__":
    main()
