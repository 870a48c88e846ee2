"""Plain calls of OpenAI's protocol, as a program without the language makes them."""

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from typing import Any

import openai


class RawClient:
    """A client of one endpoint.

    - `cached` False: each prompt begins with a number of its own, so that the endpoint's cache of prefixes is of no
      use.
    - `serial`: independent calls of a program are made one after the other, as with a client that blocks.

    `prompt_tokens` and `cached_tokens` count what all calls sent, and what the endpoint had in its cache.
    """

    def __init__(self, client: openai.AsyncOpenAI, model: str, cached: bool = True, serial: bool = False) -> None:
        self._client = client
        self._model = model
        self._cached = cached
        self._serial = serial
        self._numbers = itertools.count()
        self.prompt_tokens = self.cached_tokens = 0

    async def all(self, *calls: Coroutine[Any, Any, Any]) -> list[Any]:
        """The results of independent calls."""
        return [await call for call in calls] if self._serial else await asyncio.gather(*calls)

    async def complete(self, prompt: str, max_tokens: int) -> str:
        """`max_tokens` greedy tokens after the prompt."""
        answer = await self._client.completions.create(
            model=self._model,
            prompt=self._fresh(prompt),
            max_tokens=max_tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        self._count(answer)
        return answer.choices[0].text

    async def select(self, prompt: str, choices: Sequence[str]) -> str:
        """The choice whose tokens have the highest mean log probability after the prompt: a call with `echo` for each
        choice, since the protocol has no other way to ask for it."""
        scores = await self.all(*(self._score(prompt, choice) for choice in choices))
        return choices[max(range(len(scores)), key=scores.__getitem__)]

    async def _score(self, prompt: str, choice: str) -> float:
        own = self._fresh(prompt)
        answer = await self._client.completions.create(
            model=self._model, prompt=own + choice, max_tokens=0, temperature=0, echo=True, logprobs=0
        )
        self._count(answer)
        logprobs: Any = answer.choices[0].logprobs
        ends = [*logprobs.text_offset[1:], len(own) + len(choice)]
        own_logprobs = [p for p, end in zip(logprobs.token_logprobs, ends, strict=True) if end > len(own)]
        return sum(own_logprobs) / len(own_logprobs)

    def _count(self, answer: Any) -> None:
        details = answer.usage.prompt_tokens_details
        self.prompt_tokens += answer.usage.prompt_tokens
        self.cached_tokens += (details and details.cached_tokens) or 0

    def _fresh(self, prompt: str) -> str:
        return prompt if self._cached else f"[{next(self._numbers):06}] {prompt}"
