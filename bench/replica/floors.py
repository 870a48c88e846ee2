"""The speed that no engine can pass: what reading weights and keys, and multiplying, take at a GPU's measured rates.

    python -m bench.replica.floors --model gpt-oss-20b

A step reads the weights of its layers once, of experts those that some token is likely to use, and the keys and values
that its tokens see, and it reads and writes the recurrent states of its sequences; meanwhile it multiplies. It takes
the longer of both times. Nothing else takes time, and prompts are only multiplied. Weights have two bytes each, those
of experts in MXFP4 0.53.

`mini` has 1,023 steps after the prompts, because the longest output has as many tokens, and 131 sequences a step on
average. A mixture of experts reads nearly all of them long before the batch is full: of 128 with 8 a token, 64
sequences use 98% and 16 use 64%. So for Qwen3-30B-A3B at 3.6 TB/s the last third of the steps takes 5.0 s of 20.3 for
10% of the tokens, and a floor that counts a full batch in every step (10,000 tokens/s) cannot be reached:

| steps | sequences a step | s | of it keys and values |
| --- | --- | --- | --- |
| prompts | | 1.24 | |
| 1 to 100 | 256 | 2.04 | 0.36 |
| 101 to 399 | 202 | 6.15 | 1.13 |
| 400 to 699 | 114 | 5.91 | 0.88 |
| 700 to 1,023 | 42 | 4.99 | 0.45 |

Prompts that overlap decodes without any cost would save 1.24 s of 20.3. `--bytes-per-s` takes the rate of a copy as
measured on the machine in place of the rate at which products read weights.
"""

import argparse
import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from bench.replica import dummy_models
from bench.replica.offline_workloads import JOBS, Job
from pipeline.roofline import DEVICES, DeviceSpec, LayerSpec
from shoal.help import Parser
from worker.executor.memory_budget import row_bytes
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.layer_specs import layer_specs
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

    def input_tok_s(self, job: Job) -> float:
        """Most input tokens a second of a job with one output token for each prompt."""
        lengths = np.array([len(prompt) for prompt in job[0]])
        return int(lengths.sum()) / self._prompts_s(lengths)

    def _step_s(self, contexts: np.ndarray) -> float:
        """Seconds of a step that adds a token to each of these contexts."""
        tokens = len(contexts)
        experts = self._experts_used(tokens)
        if self.config.experts is not None:
            experts *= self.config.experts.weight_bytes / _BYTES
        memory_s = _BYTES * (self._layers(experts) + self._head()) / self.device.bytes_per_s
        arithmetic_s = 2 * tokens * (self._layers(self._chosen()) + self._head()) / self.device.sustained_flops
        config = self.config
        keys = sum(int(np.minimum(contexts, layer.window or contexts).sum()) * layer.read_kv for layer in self._specs)
        keys_s = _BYTES * keys / self.device.attention_bytes_per_s
        states_s = 2 * tokens * row_bytes(config, torch.bfloat16) / self.device.bytes_per_s
        return max(memory_s, arithmetic_s) + keys_s + states_s

    def _prompts_s(self, lengths: np.ndarray) -> float:
        """Seconds of the products and the attention of prompts."""
        products = 0.0
        for layer in self._specs:
            first = lengths if layer.window is None else np.minimum(lengths, layer.window)
            products += float((first * (first + 1) / 2 + (lengths - first) * first).sum()) * layer.attended
        attention_s = 4 * products / self.device.attention_flops
        return 2 * int(lengths.sum()) * self._layers(self._chosen()) / self.device.sustained_flops + attention_s

    @cached_property
    def _specs(self) -> tuple[LayerSpec, ...]:
        return layer_specs(self.config)

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
    with dummy_models.written(name) as folder:
        config = decoder_config(read_config(folder))
    return Floor(config, DEVICES[device])


def main(argv: list[str] | None = None) -> int:
    """Prints the floors of `mini` and `bs1`. Returns the exit code."""
    p: argparse.ArgumentParser = Parser("python -m bench.replica.floors", __doc__)
    p.add_argument("--model", choices=sorted(dummy_models.SHAPES), default="llama-8b", help="default: %(default)s")
    p.add_argument("--device", choices=sorted(DEVICES), default="h200", help="default: %(default)s")
    p.add_argument("--bytes-per-s", type=float, help="rate of reading weights and keys (default: the device's)")
    args = p.parse_args(argv)
    floor = of_shape(args.model, args.device)
    if (rate := args.bytes_per_s) is not None:
        floor = replace(floor, device=replace(floor.device, bytes_per_s=rate, attention_bytes_per_s=rate))
    print(f"mini {floor.output_tok_s(JOBS['mini'](1.0)):,.0f} output tokens/s")
    print(f"bs1 {floor.decode_tok_s(JOBS['bs1'](1.0)):,.0f} tokens/s")
    print(f"prefill {floor.input_tok_s(JOBS['prefill'](1.0)):,.0f} input tokens/s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
