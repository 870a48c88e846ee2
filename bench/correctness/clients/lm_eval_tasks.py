"""lm-eval through `local-completions`, with the tokenizer of the server: each log-likelihood and each text is compared
with what lm-eval gets from `transformers`, on the same small tasks."""

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.correctness.clients import programs
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()
TOLERANCE = 1e-3  # of a log-likelihood: float32, in other orders of addition
DOCUMENTS = [
    ("The capital of France is", ["Paris", "a banana", "seven"], 0),
    ("Two plus two is", ["purple", "four", "yesterday"], 1),
    ("The sun rises in the", ["east", "fridge", "spoon"], 0),
    ("Water freezes at zero degrees", ["Celsius", "potato", "violin"], 0),
    ("The opposite of hot is", ["table", "cold", "running"], 1),
    ("A dog is an", ["idea", "animal", "ocean"], 1),
]
_TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {data}}}}}
validation_split: validation
doc_to_text: "{{{{q}}}}"
"""
TASKS = {
    "choice": """
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "rolling": """
output_type: loglikelihood_rolling
doc_to_target: "{{q}} {{choices[label]}}."
metric_list: [{metric: word_perplexity}]
""",
    "generate": """
output_type: generate_until
doc_to_target: "{{choices[label]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


def _samples(task: str, model: str, arguments: str, *options: str) -> list[Any]:
    """The responses of a model to all documents of a task, in the documents' order."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        documents = [{"q": q, "choices": choices, "label": label} for q, choices, label in DOCUMENTS]
        (folder / "data.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / "tasks").mkdir()
        text = _TASK.format(name=task, data=folder / "data.jsonl") + TASKS[task]
        (folder / "tasks" / "task.yaml").write_text(text)
        where = ["--tasks", task, "--include_path", "tasks", "--output_path", "out", "--log_samples"]
        programs.run("lm_eval", "run", "--model", model, "--model_args", arguments, *where, *options, folder=folder)
        (path,) = (folder / "out").rglob("samples_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(samples) == len(DOCUMENTS)
    return [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]


def _both(at: ServedModel, task: str) -> list[tuple[Any, Any]]:
    """The responses of the server, each with that of `transformers`."""
    assert at.folder is not None, "lm-eval is compared with transformers: give --folder"
    server = f"model={at.model},base_url={at.v1}/completions,tokenizer_backend=remote,num_concurrent=2,max_retries=1"
    ours = _samples(task, "local-completions", server, "--batch_size", "4")
    theirs = _samples(task, "hf", f"pretrained={at.folder},dtype=float32", "--device", "cpu", "--batch_size", "1")
    return list(zip(ours, theirs, strict=True))


def _flat(responses: Any) -> list[float]:
    """The numbers in responses, however nested: log-likelihoods, and whether greedy decoding would say the same."""
    if isinstance(responses, list):
        return [number for each in responses for number in _flat(each)]
    return [float({"True": 1, "False": 0}.get(str(responses), responses))]


def _check_close(pairs: list[tuple[Any, Any]]) -> None:
    for ours, theirs in pairs:
        differences = [abs(a - b) for a, b in zip(_flat(ours), _flat(theirs), strict=True)]
        assert max(differences) < TOLERANCE, f"{ours} differs from transformers' {theirs}"


@checks("local-completions, multiple choice: log-likelihoods as transformers'")
def multiple_choice(at: ServedModel) -> None:
    _check_close(_both(at, "choice"))


@checks("local-completions, rolling: log-likelihoods as transformers'")
def rolling(at: ServedModel) -> None:
    _check_close(_both(at, "rolling"))


@checks("local-completions, generate_until: texts as transformers'")
def generate(at: ServedModel) -> None:
    for ours, theirs in _both(at, "generate"):
        assert ours == theirs, f"{ours} is not transformers' {theirs}"


@checks("local-chat-completions, generate_until")
def chat(at: ServedModel) -> None:
    server = f"model={at.model},base_url={at.v1}/chat/completions,num_concurrent=2,max_retries=1"
    assert _samples("generate", "local-chat-completions", server, "--apply_chat_template")
