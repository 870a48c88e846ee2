"""The accuracy of the order of output lengths that a probe reads from the model's hidden states after the prompt.

    python -m bench.lengths.probe --outputs outputs.jsonl

The method is that of TRAIL ("Don't Stop Me Now: Embedding Based Scheduling for LLMs", arXiv 2410.01035): a small model
reads a middle layer. Nothing of it is part of Shoal; this command tells what it could give.

1. Prompts and outputs are those of `bench.lengths.accuracy`, with two answers to each prompt.
2. The states of some layers at the prompt's last token, and their mean over the prompt, are computed in float32, and
   kept in --states.
3. A probe sees the states of one layer and what is predicted at arrival. Probes are a linear regression of the
   logarithm, and a network of one hidden layer, trained on pairs (RankNet, Burges et al., ICML 2005). The second half
   of the outputs comes in four parts, and probes are trained before each, on all that came before it.
4. Layer, states and probe of `ranks.tau.after_prompt` are those that were best on the last fifth of the first half,
   having learned the rest of it.

An output is drawn at random, so no probe can be right about all pairs. Let d(i, j) be the probability that the output
of prompt i is longer than that of j, less that of the contrary. An estimate without ties gets a tau of at most
sum |d| / sqrt(P U), with P pairs and U pairs of unequal outputs, and the tau of two independent outputs of each prompt
is sum d^2 / U. By Cauchy and Schwarz, the first is at most the square root of the second: the bound. If the logarithms
of the lengths were normal, the best estimate would have the tau of `bound.normal`,
2 / pi arcsin(sqrt(sin(pi / 2 tau))), with the tau of two outputs.

| figure | meaning |
| --- | --- |
| `ranks.tau.after_prompt` | Kendall's tau between the probe's order and the real lengths, of the second half |
| `ranks.tau.after_prompt.linear`, `.network` | the best linear probe, the best network, each chosen as above |
| `ranks.tau.after_embedding` | the best probe of the embeddings alone, which a replica could read at arrival |
| `ranks.tau.of_another_output` | the same between two outputs of each prompt |
| `ranks.tau.bound`, `ranks.tau.bound.normal` | see above |
| `ranks.probe.us_per_request` | CPU time of the chosen probe, once the states are there |
"""

import math
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.lengths.accuracy import answer, predictions, tokenized
from bench.lengths.prompts import fetch, prompts
from bench.load.options import count
from bench.results import FOLDER, Figure, write
from shoal.help import Parser
from worker.lengths import kendall_tau

LAYERS = (0, 0.25, 0.5, 0.75, 1.0)  # as parts of all layers; 0 are the embeddings
STATES = ("last", "mean", "both")
PARTS = 4  # of the second half
RIDGES = (3.0, 30.0, 300.0, 3000.0)  # penalties of the weights' squares
HIDDEN, ROUNDS, DROPOUT, DECAY = 64, 40, 0.3, 0.03  # of the network
BATCH = 128  # outputs of which all pairs are compared

Scores = Callable[[np.ndarray], np.ndarray]  # from states [n, d] to scores [n], the longest output's the highest


@dataclass(frozen=True)
class Probe:
    """A way to read states.

    | field | meaning |
    | --- | --- |
    | `layer` | index in `LAYERS` |
    | `states` | one of `STATES` |
    | `kind` | `linear` or `network` |
    | `ridge` | penalty of a linear one |
    """

    layer: int
    states: str
    kind: str
    ridge: float = 0.0


def all_probes() -> Iterator[Probe]:
    for layer in range(len(LAYERS)):
        for states in STATES:
            yield from (Probe(layer, states, "linear", ridge) for ridge in RIDGES)
            yield Probe(layer, states, "network")


def hidden_states(prompt_ids: Sequence[list[int]], model: str) -> np.ndarray:
    """States of the prompts, float32 [n, layers, 2, d]: at the last token, and the mean."""
    from transformers import AutoModel

    from cluster.models import resolve

    network = AutoModel.from_pretrained(resolve(model, dequantize=True), dtype=torch.float32).eval()
    layers = [round(part * network.config.num_hidden_layers) for part in LAYERS]
    made = []
    for number, ids in enumerate(prompt_ids):
        with torch.inference_mode():
            states = network(torch.tensor([ids]), output_hidden_states=True).hidden_states
        made.append(torch.stack([torch.stack((states[at][0, -1], states[at][0].mean(0))) for at in layers]).numpy())
        if number % 256 == 255:
            print(f"states of {number + 1} of {len(prompt_ids)} prompts", flush=True)
    return np.stack(made)


def kept_states(prompt_ids: Sequence[list[int]], model: str, path: Path | None) -> np.ndarray:
    """The states in the file, or the model's, which are then kept in it."""
    if path is not None and path.exists():
        states = np.load(path)
        if len(states) >= len(prompt_ids):
            return states[: len(prompt_ids)]
    states = hidden_states(prompt_ids, model)
    if path is not None:
        np.save(path, states)
    return states


def linear(states: np.ndarray, logs: np.ndarray, ridge: float) -> Scores:
    """A regression of `logs` [n] on `states` [n, d], with a penalty."""
    mean, deviation = states.mean(0), states.std(0) + 1e-6
    scaled = (states - mean) / deviation
    weights = np.linalg.solve(scaled.T @ scaled + ridge * np.eye(scaled.shape[1]), scaled.T @ (logs - logs.mean()))
    weights /= deviation
    return lambda new: (new - mean) @ weights


def network(states: np.ndarray, logs: np.ndarray) -> Scores:
    """A network of one hidden layer whose order of `states` [n, d] is that of `logs` [n]: trained on all pairs of small
    batches, with the logistic loss of the scores' difference."""
    torch.manual_seed(0)
    mean, deviation = states.mean(0), states.std(0) + 1e-6
    inputs = torch.from_numpy((states - mean) / deviation).float()
    wanted = torch.from_numpy(logs).float()
    layers = torch.nn.Sequential(
        torch.nn.Dropout(DROPOUT), torch.nn.Linear(inputs.shape[1], HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, 1)
    )
    steps = ROUNDS * math.ceil(len(inputs) / BATCH)
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-3, weight_decay=DECAY)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        batch = torch.randint(len(inputs), (BATCH,))
        scores, real = layers(inputs[batch])[:, 0], wanted[batch]
        longer = real[:, None] > real[None, :]
        loss = torch.nn.functional.softplus(scores[None, :] - scores[:, None])[longer].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        slower.step()
    learned = layers.state_dict()
    a, b, c = (learned[name].numpy() for name in ("1.weight", "1.bias", "3.weight"))
    return lambda new: np.maximum((new - mean) / deviation @ a.T + b, 0.0) @ c[0]


def inputs(probe: Probe, states: np.ndarray, at_arrival: np.ndarray) -> np.ndarray:
    """Features of all outputs, as the probe reads them, float64 [n, d]."""
    layer = states[:, probe.layer].astype(np.float64)
    seen = {"last": layer[:, 0], "mean": layer[:, 1], "both": layer.reshape(len(layer), -1)}[probe.states]
    return np.concatenate([seen, at_arrival[:, None]], axis=1)


def trained(probe: Probe, states: np.ndarray, logs: np.ndarray) -> Scores:
    return linear(states, logs, probe.ridge) if probe.kind == "linear" else network(states, logs)


def validated(probes: Sequence[Probe], states: np.ndarray, at_arrival: np.ndarray, real: np.ndarray) -> list[float]:
    """The tau of each probe on the last fifth of these outputs, having learned the others."""
    learned = len(real) * 4 // 5
    found = []
    for probe in probes:
        seen = inputs(probe, states, at_arrival)
        scores = trained(probe, seen[:learned], np.log(real[:learned]))
        found.append(kendall_tau(scores(seen[learned:]), real[learned:]))
    return found


def replayed(probe: Probe, states: np.ndarray, at_arrival: np.ndarray, real: np.ndarray) -> tuple[float, float]:
    """The tau of a probe on the second half, which comes in `PARTS`, and the CPU time of a score in microseconds."""
    seen, half = inputs(probe, states, at_arrival), len(real) // 2
    ends = np.linspace(half, len(real), PARTS + 1).astype(int)
    made, spent_s = [], 0.0
    for begin, end in pairwise(ends):
        scores = trained(probe, seen[:begin], np.log(real[:begin]))
        began_s = time.thread_time()
        parts = [scores(row[None]) for row in seen[begin:end]]
        spent_s += time.thread_time() - began_s
        # Scores of different trainings differ in scale; only their order in the part is the probe's own.
        of_part = np.concatenate(parts)
        made.append((of_part - scores(seen[:begin]).mean()) / scores(seen[:begin]).std())
    return kendall_tau(np.concatenate(made), real[half:]), 1e6 * spent_s / (len(real) - half)


def bounds(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """The tau of two outputs of each prompt, both [n], and what it allows any estimate."""
    between = kendall_tau(first, second)
    known = max(0.0, between)
    return {
        "tau.of_another_output": between,
        "tau.bound": math.sqrt(known),
        "tau.bound.normal": 2 / math.pi * math.asin(math.sqrt(math.sin(math.pi / 2 * known))),
    }


def evaluated(states: np.ndarray, at_arrival: np.ndarray, real: np.ndarray) -> tuple[dict[str, float], dict[str, Any]]:
    """The figures of probes, and how each chosen one was chosen."""
    half, probes = len(real) // 2, list(all_probes())
    of_validation = validated(probes, states[:half], at_arrival[:half], real[:half])
    ranked = [probe for _, probe in sorted(zip(of_validation, probes, strict=True), key=lambda pair: -pair[0])]
    chosen = {
        "after_prompt": ranked[0],
        "after_prompt.linear": next(probe for probe in ranked if probe.kind == "linear"),
        "after_prompt.network": next(probe for probe in ranked if probe.kind == "network"),
        "after_embedding": next(probe for probe in ranked if LAYERS[probe.layer] == 0),
    }
    figures, about, spent_us = dict[str, float](), dict[str, Any](), 0.0
    for name, probe in chosen.items():
        figures[f"tau.{name}"], us = replayed(probe, states, at_arrival, real)
        spent_us = us if name == "after_prompt" else spent_us
        about[name] = {
            "layer": LAYERS[probe.layer],
            "states": probe.states,
            "kind": probe.kind,
            "ridge": probe.ridge,
            "validation": of_validation[probes.index(probe)],
        }
    return figures | {"probe.us_per_request": spent_us}, about


def parser() -> Parser:
    p = Parser("python -m bench.lengths.probe", __doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="default: %(default)s")
    p.add_argument("--outputs", type=Path, required=True, metavar="FILE", help="lengths of the outputs, JSON lines")
    p.add_argument("--states", type=Path, metavar="FILE", help=".npy file that keeps the hidden states")
    p.add_argument("--packages", type=Path, metavar="DIR", help="folder for the packages; default: a new one")
    p.add_argument("--prompts", type=count, metavar="N", help="number of prompts; default: all, about 2,150")
    p.add_argument("--max-tokens", type=count, default=384, help="limit of an output; default: %(default)s")
    p.add_argument("--name", default="ranks.probe", help="of the result; default: %(default)s")
    p.add_argument("--out", type=Path, default=FOLDER, metavar="DIR", help="default: bench/results")
    return p


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result."""
    args = parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        packages = args.packages or Path(scratch)
        packages.mkdir(parents=True, exist_ok=True)
        fetch(packages)
        asked = prompts(packages)[: args.prompts]
    outputs = answer(asked, args.outputs, args.model, args.max_tokens, answers=2)
    prompt_ids = tokenized(asked, args.model)
    states = kept_states(prompt_ids, args.model, args.states)
    real, other = np.maximum(1, np.array([output["produced"] for output in outputs])).T
    at_arrival, _ = predictions(prompt_ids, outputs, args.max_tokens)
    at_arrival[at_arrival == 0.0] = at_arrival[at_arrival != 0.0].mean()  # the first, of which nothing was known
    found, about = evaluated(states, at_arrival, real)
    half = len(real) // 2
    found |= bounds(real[half:], other[half:])
    units = {"probe.us_per_request": "us"}
    figures = [
        Figure(f"ranks.{name}", value, units.get(name, "tau"), name not in units) for name, value in found.items()
    ]
    for figure in figures:
        print(f"{figure.name:32} {figure.value:.3f} {figure.unit}")
    raw = {
        "model": args.model,
        "prompts": len(asked),
        "max_tokens": args.max_tokens,
        "probes": about,
        "at_arrival_of_the_same_outputs": kendall_tau(at_arrival[half:], real[half:]),
    }
    print(f"written: {write(args.name, figures, raw, folder=args.out)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
