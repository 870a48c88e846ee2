"""A backend whose answers follow from the text, for tests of the interpreter."""

import asyncio
import re
import zlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from shoal.lang.backend import Backend, Call, Generated, OutputPiece, RoleFormat
from shoal.lang.choices import ChoiceScore
from shoal.lang.ir import GenParams


class ScriptedBackend(Backend):
    """Answers a call with `answer(call)`; by default with eight hexadecimal digits made of the text. Records the calls.
    A call runs until `gate` lets it go, if there is one. `stop` is honoured."""

    name = "a scripted backend"
    params = frozenset(GenParams.__dataclass_fields__)
    features = frozenset({"select", "stream", "prefill", "images", "video"})

    def __init__(self, answer: Callable[[Call], str] | None = None, gate: asyncio.Event | None = None) -> None:
        super().__init__()
        self.answer = answer or (lambda call: f"{zlib.crc32(call.text.encode()):08x}")
        self.gate = gate
        self.calls: list[Call] = []
        self.ended: list[str] = []
        self.at_once = self.most_at_once = 0

    async def roles(self) -> RoleFormat:
        roles = ("system", "user", "assistant")
        return RoleFormat(
            {role: f"<{role}>" for role in roles}, {role: f"</{role}>" for role in roles}, "<system>Be kind.</system>"
        )

    async def generate(self, call: Call) -> Generated:
        await self._turn(call)
        texts = [self._text(call) + str(i or "") for i in range(call.params.n or 1)]
        return Generated(texts, [{"finish_reason": "stop"} for _ in texts])

    async def stream(self, call: Call) -> AsyncGenerator[OutputPiece, None]:
        await self._turn(call)
        for character in self._text(call):
            await asyncio.sleep(0)
            yield OutputPiece(character, {"finish_reason": None, "output_token_logprobs": [(-1.0, None, character)]})
        yield OutputPiece("", {"finish_reason": "stop"})

    async def score(self, call: Call, choices: Sequence[str], unconditional: bool) -> list[ChoiceScore]:
        self.calls.append(call)
        return [ChoiceScore((len(choice),), (-float(len(choice)),), (0.0,)) for choice in choices]

    async def end_program(self, program: str) -> None:
        self.ended.append(program)

    async def _turn(self, call: Call) -> None:
        self.calls.append(call)
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await (asyncio.sleep(0) if self.gate is None else self.gate.wait())
        finally:
            self.at_once -= 1

    def _text(self, call: Call) -> str:
        text = self.answer(call)
        for stop in call.params.stop or ():
            text = text.partition(stop)[0]
        return text


def texts_of(backend: ScriptedBackend) -> list[str]:
    return [call.text for call in backend.calls]


def looks_like_hex(value: Any) -> bool:
    return re.fullmatch("[0-9a-f]{8}", value) is not None
