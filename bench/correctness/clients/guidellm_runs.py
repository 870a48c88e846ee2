"""guidellm, vLLM's benchmark of servers: short runs, in which every request must succeed with its tokens counted."""

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.correctness.clients import programs
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()
REQUESTS, OUTPUT_TOKENS = 6, 16


def _requests(at: ServedModel, backend: str = "", profile: str = "kind=concurrent,streams=2") -> list[dict[str, Any]]:
    """The requests of one run, all of which have succeeded."""
    assert at.folder is not None, "guidellm counts tokens itself: give --folder"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        programs.run(
            "guidellm",
            "run",
            *("--backend", f"kind=openai_http,target={at.url},model={at.model}{backend}"),
            *("--profile", profile),
            *("--constraint", f"kind=max_requests,count={REQUESTS}"),
            *("--data", f"kind=synthetic_text,prompt_tokens=48,output_tokens={OUTPUT_TOKENS}"),
            *("--tokenizer", f"kind=huggingface_auto,model={at.folder}"),
            *("--output", "kind=json,path=result.json"),
            "--disable-console-interactive",
            folder=folder,
        )
        requests = json.loads((folder / "result.json").read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"] and not requests["incomplete"], requests["errored"] or requests["incomplete"]
    assert len(requests["successful"]) == REQUESTS
    return requests["successful"]


def _check_counts(requests: list[dict[str, Any]]) -> None:
    for request in requests:
        counted = request["output_metrics"]["text_tokens"]
        assert counted == OUTPUT_TOKENS, f"{counted} tokens of output, not {OUTPUT_TOKENS}"


@checks("chat completions, streamed")
def chat(at: ServedModel) -> None:
    _check_counts(_requests(at))


@checks("completions, streamed")
def completions(at: ServedModel) -> None:
    _check_counts(_requests(at, ",request_format=/v1/completions"))


@checks("responses, streamed")
def responses(at: ServedModel) -> None:
    _check_counts(_requests(at, ",request_format=/v1/responses"))


@checks("chat completions, whole")
def whole(at: ServedModel) -> None:
    _check_counts(_requests(at, ",stream=false", "kind=synchronous"))
