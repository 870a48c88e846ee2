"""The speed that no engine can pass: what reading weights and keys, and multiplying, take at a GPU's measured rates.

    python -m bench.replica.floors --model gpt-oss-20b

A step reads the weights of its layers once, of experts those that some token is likely to use, and the keys and values
that its tokens see; meanwhile it multiplies. It takes the longer of both times. Nothing else takes time, and prompts
are only multiplied. Weights have two bytes each.
"""

import argparse
import math
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from bench.replica import dummy_models
from bench.replica.offline_workloads import JOBS, Job
from pipeline.roofline import DEVICES, DeviceSpec
from shoal.help import Parser
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.parameters import parameter_shapes

_BYTES = 2  # of a weight, a key's or a value's element


@dataclass(frozen=True)
class Floor:
    """The least time of offline workloads of a model on one device."""

    config: DecoderConfig
    device: DeviceSpec

    def decode_tok_s(self, job: Job) -> float:
        """Most output tokens a second after the first token, of a job with one prompt."""
        (prompt,), (length,) = job
        steps = range(len(prompt) + 1, len(prompt) + length)
        return len(steps) / sum(self._step_s(np.array([context])) for context in steps)

    def output_tok_s(self, job: Job) -> float:
        """Most output tokens a second of a job whose prompts come at once."""
        lengths, outputs = np.array([len(prompt) for prompt in job[0]]), np.array(job[1])
        seconds = self._prompts_s(lengths)
        for step in range(1, int(outputs.max())):
            seconds += self._step_s(lengths[outputs > step] + step)
        return int(outputs.sum()) / seconds

    def _step_s(self, contexts: np.ndarray) -> float:
        """Seconds of a step that adds a token to each of these contexts."""
        tokens = len(contexts)
        elements = self._layers(self._experts_used(tokens)) + self._head()
        memory_s = _BYTES * elements / self.device.bytes_per_s
        arithmetic_s = 2 * tokens * (self._layers(self._chosen()) + self._head()) / self.device.sustained_flops
        config = self.config
        seen = sum(int(np.minimum(contexts, window or contexts).sum()) for window in config.windows)
        keys_s = seen * 2 * config.num_kv_heads * config.head_dim * _BYTES / self.device.attention_bytes_per_s
        return max(memory_s, arithmetic_s) + keys_s

    def _prompts_s(self, lengths: np.ndarray) -> float:
        """Seconds of the products and the attention of prompts."""
        config = self.config
        pairs = 0.0
        for window in config.windows:
            first = lengths if window is None else np.minimum(lengths, window)
            pairs += float((first * (first + 1) / 2 + (lengths - first) * first).sum())
        attention_s = 4 * pairs * config.num_heads * config.head_dim / self.device.attention_flops
        return 2 * int(lengths.sum()) * self._layers(self._chosen()) / self.device.sustained_flops + attention_s

    def _layers(self, experts: float) -> float:
        """Elements of the layers' weights, with that part of the experts."""
        always, of_experts = self._sizes
        return always + experts * of_experts

    @cached_property
    def _sizes(self) -> tuple[int, int]:
        """Elements of the layers' weights: of all but the experts, and of these."""
        shapes = {name: math.prod(shape) for name, shape in parameter_shapes(self.config).items()}
        layers = {name: size for name, size in shapes.items() if name.startswith("layers.")}
        experts = sum(size for name, size in layers.items() if ".experts_" in name)
        return sum(layers.values()) - experts, experts

    def _head(self) -> int:
        return self.config.vocab_rows * self.config.hidden_size

    def _chosen(self) -> float:
        experts = self.config.experts
        return 1.0 if experts is None else experts.routing.top_k / experts.count

    def _experts_used(self, tokens: int) -> float:
        """Part of a layer's experts that some of the tokens use, if all experts are as likely."""
        return 1.0 - (1.0 - self._chosen()) ** tokens


def of_shape(name: str, device: str = "h200") -> Floor:
    """The floor of a model of `bench.replica.dummy_models.SHAPES` on a device of `pipeline.roofline.DEVICES`."""
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as scratch:
        config = decoder_config(read_config(dummy_models.write(name, Path(scratch))))
    return Floor(config, DEVICES[device])


def main(argv: list[str] | None = None) -> int:
    """Prints the floors of `mini` and `bs1`. Returns the exit code."""
    p: argparse.ArgumentParser = Parser("python -m bench.replica.floors", __doc__)
    p.add_argument("--model", choices=sorted(dummy_models.SHAPES), default="llama-8b", help="default: %(default)s")
    p.add_argument("--device", choices=sorted(DEVICES), default="h200", help="default: %(default)s")
    args = p.parse_args(argv)
    floor = of_shape(args.model, args.device)
    print(f"mini {floor.output_tok_s(JOBS['mini'](1.0)):,.0f} output tokens/s")
    print(f"bs1 {floor.decode_tok_s(JOBS['bs1'](1.0)):,.0f} tokens/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
