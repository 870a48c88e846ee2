"""The clients that `shoal bench clients` tries: the module of each one's checks, and the packages that its environment
gets, with their versions. The client itself is the first package."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass

TORCH = "torch==2.13.0", "transformers==5.23.0"
OPENAI = "openai==3.57.0"
ZOD = "zod@4.6.7"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


@dataclass(frozen=True)
class ShippedClient:
    """A client as its authors ship it.

    | field | meaning |
    | --- | --- |
    | `requirements` | packages that pip installs |
    | `packages` | packages that npm installs |
    | `setup` | scripts of these that make them ready: npm may leave them out |
    | `program` | a command that prints its version, if neither installs it |
    """

    module: str
    requirements: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
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
    "openai-agents": ShippedClient("openai_agents", ("openai-agents==0.24.0", OPENAI)),
    "openai-agents-js": ShippedClient("openai_agents_js", packages=("@openai/agents@0.20.0", "openai@7.59.0", ZOD)),
    "ai-sdk": ShippedClient("ai_sdk", packages=("ai@6.0.326", "@ai-sdk/openai-compatible@2.0.92", ZOD)),
    "langgraph": ShippedClient("langgraph_agents", ("langgraph==1.2.24", "langchain-openai==1.7.4", OPENAI)),
    "smolagents": ShippedClient("smolagents_runs", ("smolagents[openai]==1.26.0", OPENAI)),
    "dspy": ShippedClient("dspy_programs", ("dspy==3.4.1", OPENAI)),
    "codex": ShippedClient("codex_cli", packages=("@openai/codex@0.171.0",)),
    "claude-code": ShippedClient(
        "claude_code",
        packages=("@anthropic-ai/claude-code@2.1.197",),
        setup=("@anthropic-ai/claude-code/install.cjs",),
    ),
    "opencode": ShippedClient(
        "opencode_cli", packages=("opencode-ai@1.18.33",), setup=("opencode-ai/postinstall.mjs",)
    ),
    "aider": ShippedClient("aider_cli", ("aider-chat==0.86.2",)),
    "browser": ShippedClient("browser", program=() if BROWSER is None else (BROWSER, "--version")),
}
