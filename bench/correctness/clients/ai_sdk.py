"""Vercel's AI SDK, with its provider for servers that are compatible with OpenAI's: `ai_sdk.mjs`."""

from bench.correctness.clients import javascript
from bench.correctness.clients.checks import Checks

FEATURES = {
    "text": "generateText and streamText, with usage",
    "tools": "a tool is called and its result sent back, whole and streamed",
    "turns": "a second turn, with the messages of the first one",
    "objects": "generateObject and streamObject",
    "full": "a full context: an error that is not tried again",
}

checks = Checks()
javascript.add(checks, "ai_sdk.mjs", FEATURES)
