"""The clients that `shoal bench clients` tries: the module of each one's checks, and the packages that its environment
gets, with their versions. The client itself is the first package."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

TORCH = "torch==2.13.0", "transformers==5.23.0"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@dataclass(frozen=True)
class ShippedClient:
    """A client as its authors ship it. `program`: a command that prints its version, if pip does not install it."""

    module: str
    requirements: tuple[str, ...] = ()
    program: tuple[str, ...] = ()


CLIENTS: Mapping[str, ShippedClient] = {
    "openai": ShippedClient("openai_client", ("openai==3.54.0",)),
    "anthropic": ShippedClient("anthropic_client", ("anthropic==2.12.0",)),
    "langchain": ShippedClient("langchain_chats", ("langchain-openai==1.7.3",)),
    "litellm": ShippedClient("litellm_calls", ("litellm==1.106.2", "mcp==2.3.0")),
    "instructor": ShippedClient("instructor_models", ("instructor==1.17.0",)),
    "pydantic-ai": ShippedClient("pydantic_agents", ("pydantic-ai-slim[openai,anthropic]==2.68.0",)),
    "llama-index": ShippedClient("llama_index_models", ("llama-index-llms-openai-like==0.8.1",)),
    "outlines": ShippedClient("outlines_vllm", ("outlines==1.3.3", "openai==3.54.0")),
    "guidellm": ShippedClient("guidellm_runs", ("guidellm==0.8.1", *TORCH)),
    "lm-eval": ShippedClient("lm_eval_tasks", ("lm-eval[api,hf]==0.4.13", *TORCH, "accelerate==1.15.0")),
    "browser": ShippedClient("browser", program=() if BROWSER is None else (BROWSER, "--version")),
}
