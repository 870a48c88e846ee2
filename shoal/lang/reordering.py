"""A model's proposal for the order of a program's first texts, so that the runs of a batch share longer prefixes.

A model may be wrong about what may be exchanged. So the order is only shown: `print` it, and `accept()` it or not.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from shoal.lang.backend import Backend
from shoal.lang.errors import ProgramError
from shoal.lang.ir import ConstantText, Gen, GenParams
from shoal.lang.program import Program
from shoal.lang.tracer import Placeholder, ProgramGraph, TracedStatement, flat

RULES = """A prompt is put together from the numbered parts below. Words in {braces} differ from request to request; \
all other words are the same in all requests. Parts that are the same should come first, because their beginning is \
then computed once for all requests. The prompt must keep its meaning: a part that refers to an earlier one stays \
after it. Which order of the parts is best? Answer with their numbers only, separated by commas."""
ANSWER_TOKENS = 256


@dataclass(frozen=True)
class Reordering:
    """A proposed order. `texts` are the parts as they are written, with arguments in braces; `order` has their numbers
    from 0, in the proposed order. `accept` returns the compiled program with that order."""

    texts: Sequence[str]
    order: Sequence[int]
    _apply: Callable[[Sequence[int]], Any]

    def accept(self) -> Any:
        """The compiled program, in the proposed order."""
        return self._apply(self.order)

    def __str__(self) -> str:
        lines = ["as written:"]
        lines += [f"  {number + 1}  {text!r}" for number, text in enumerate(self.texts)]
        if list(self.order) == sorted(self.order):
            return "\n".join([*lines, "proposed: as written"])
        lines.append("proposed:")
        lines += [f"  {number + 1}  {self.texts[number]!r}" for number in self.order]
        return "\n".join(lines)

    __repr__ = __str__


def leading_texts(graph: ProgramGraph) -> list[TracedStatement]:
    """The statements before the first that is more than constant text and arguments."""
    return list(takewhile(_is_text, graph.nodes))


def reordered(graph: ProgramGraph, order: Sequence[int]) -> list[TracedStatement]:
    """The statements of a graph, with its first texts in another order. Raises ValueError if it has others."""
    leading = leading_texts(graph)
    if sorted(order) != list(range(len(leading))):
        raise ValueError(f"the program begins with {len(leading)} texts now, and the order is that of {len(order)}")
    return [*(leading[number] for number in order), *graph.nodes[len(leading) :]]


async def proposal(graph: ProgramGraph, backend: Backend, apply: Callable[[Sequence[int]], Any]) -> Reordering:
    """Asks the model for an order. Raises ValueError if there is nothing to exchange, and ProgramError for an answer
    that is no order."""
    texts = ["".join(map(_shown, flat(node.expr))) for node in leading_texts(graph)]
    if len(texts) < 2:
        raise ValueError("the program does not begin with several texts: there is nothing to put in another order")
    state = await Program(_question).run_async(texts, backend=backend, temperature=0, max_new_tokens=ANSWER_TOKENS)
    answer = state["answer"]
    order = [int(number) - 1 for number in re.findall(r"\d+", answer)]
    if sorted(order) != list(range(len(texts))):
        raise ProgramError(f"the model's answer is not an order of {len(texts)} parts: {answer!r}")
    return Reordering(texts, order, apply)


def _question(s: Any, texts: Sequence[str]) -> None:
    parts = "\n\n".join(f"Part {number}:\n{text}" for number, text in enumerate(texts, 1))
    s.user(f"{RULES}\n\n{parts}")
    s.assistant(Gen("answer", GenParams()))


def _is_text(node: TracedStatement) -> bool:
    return node.branch == 0 and all(
        isinstance(part, ConstantText) or (isinstance(part, Placeholder) and part.branch is None)
        for part in flat(node.expr)
    )


def _shown(part: Any) -> str:
    return part.value if isinstance(part, ConstantText) else part.label
