"""Vercel's AI SDK, with its provider for servers that are compatible with OpenAI's: `ai_sdk.mjs`."""

from bench.correctness.clients import javascript
from bench.correctness.clients.checks import Checks, ServedModel

checks = Checks()


def _run(at: ServedModel, feature: str) -> None:
    javascript.run("ai_sdk.mjs", feature, at.url, at.model)


@checks("generateText and streamText, with usage")
def text(at: ServedModel) -> None:
    _run(at, "text")


@checks("a tool is called and its result sent back, whole and streamed")
def tools(at: ServedModel) -> None:
    _run(at, "tools")


@checks("a second turn, with the messages of the first one")
def turns(at: ServedModel) -> None:
    _run(at, "turns")


@checks("generateObject and streamObject")
def objects(at: ServedModel) -> None:
    _run(at, "objects")


@checks("a full context: an error that is not tried again")
def full(at: ServedModel) -> None:
    _run(at, "full")
