"""Compiled programs: `program.compile()` runs a program by its graph (`tracer.py`) instead of statement by statement.

| known from the graph | effect |
| --- | --- |
| which branch needs a variable | only that branch waits for it: independent calls after a read start at once |
| the constant prefix of a batch | it is computed once, as the first of all |
| the text before each program's first call | programs that share most of it start next to each other |
| parts of `unordered(...)` | those that most programs of a batch share go first: shared prefixes are longer |
| texts before the first call | a model may propose an order, which the author accepts (`propose_order`) |

Where tracing ended, the function itself goes on: it is run from its beginning, and its statements up to that point are
those that run already. A function that takes another way than it did when it was traced is refused.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from shoal.lang.backend import Backend
from shoal.lang.branch import Branch, ProgramRun
from shoal.lang.drawing import graph_svg, graph_text
from shoal.lang.errors import BackendError, ProgramError
from shoal.lang.ir import ConstantText, Expr, ExprList, Unordered
from shoal.lang.program import BatchPlan, Program, resolved_backend, waited
from shoal.lang.reordering import Reordering, proposal, reordered
from shoal.lang.state import ProgramState
from shoal.lang.statements import ForkPoint, JoinPoint, VariableRef
from shoal.lang.tracer import Placeholder, ProgramGraph, TracedFork, TracedJoin, TracedStatement, flat, trace

MIN_PREFIX = 64  # characters; a shorter prefix is computed with the first program


class Explanation:
    """The graph of a compiled program: `str` draws it as text, `svg()` as a picture, which notebooks show."""

    def __init__(self, name: str, graph: ProgramGraph) -> None:
        self.name = name
        self.graph = graph

    def __str__(self) -> str:
        return graph_text(self.name, self.graph)

    __repr__ = __str__

    def svg(self) -> str:
        """The picture, as SVG."""
        return graph_svg(self.name, self.graph)

    _repr_svg_ = svg


class CompiledProgram(Program):
    """A program that runs by its graph. It is run, batched and bound as any other."""

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
        order: Sequence[int] | None = None,
    ) -> None:
        """`order`: that of the program's first texts, by their numbers from 0; None: as they are written."""
        super().__init__(func, num_api_spec_tokens, bound)
        self.graph = trace(func, self.bound)
        self._order = order
        if order is not None:
            self.graph.nodes = reordered(self.graph, order)
        self._prefetching: asyncio.Future[None] | None = None

    def explain(self) -> Explanation:
        """The graph: what depends on what, what is shared, and where the function itself goes on."""
        return Explanation(self.__name__, self.graph)

    def bind(self, **arguments: Any) -> Self:
        bound = super().bind(**arguments).bound
        return type(self)(self.func, self.num_api_spec_tokens, bound, self._order)

    def propose_order(self, backend: Any = None) -> Reordering:
        """Asks a model in which order the texts that the program begins with share the longest prefixes. Nothing
        changes: print the answer, and call its `accept()` for the program in that order. Raises ValueError if the
        program does not begin with several texts, and ProgramError if the model gives no order."""
        return waited(self.propose_order_async(backend))

    async def propose_order_async(self, backend: Any = None) -> Reordering:
        """As `propose_order`, in the caller's event loop."""
        written = trace(self.func, self.bound)
        return await proposal(
            written,
            resolved_backend(backend),
            lambda order: type(self)(self.func, self.num_api_spec_tokens, self.bound, order),
        )

    async def _plan_batch(self, calls: Sequence[Mapping[str, Any]], backend: Backend) -> BatchPlan:
        shared: Counter[tuple[int, str]] = Counter()
        for arguments in calls:
            for node in self.graph.nodes:
                for part in _unordered_parts(node.expr):
                    shared[node.number, _text(part, arguments)] += 1
        prefix = self.graph.prefix()
        if len(calls) > 1 and len(prefix) >= MIN_PREFIX:
            # The programs need not wait for it: a server computes a prefix once that several calls begin with.
            self._prefetching = asyncio.ensure_future(_prefetch(backend, prefix))
            await asyncio.sleep(0)  # it is sent before they are
        texts = [self._first_text(arguments, shared) for arguments in calls]
        return BatchPlan(sorted(range(len(calls)), key=texts.__getitem__), shared)

    def _first_text(self, arguments: Mapping[str, Any], shared: Counter[tuple[int, str]]) -> str:
        """The text before the first call of a program."""
        texts: list[str] = []
        for node in self.graph.nodes:
            if node.branch == 0:
                for part in flat(_ordered(node, arguments, shared)):
                    known = isinstance(part, ConstantText) or (isinstance(part, Placeholder) and part.branch is None)
                    if not known:
                        return "".join(texts)
                    texts.append(_text(part, arguments))
        return "".join(texts)

    async def _run_function(self, run: ProgramRun, state: ProgramState, plan: BatchPlan | None) -> None:
        if any(run.arguments.get(name, value) is not value for name, value in self.graph.assumed.items()):
            await super()._run_function(run, state, plan)  # the graph is that of other values
            return
        shared = Counter() if plan is None else plan.shared
        branches = _submitted(self.graph, state._branch, run.arguments, shared)
        if self.graph.stop or self.graph.returns:
            replay = _Replay(self.graph, branches)
            replayed = ProgramState(_ReplayedBranch(replay, 0))  # type: ignore[arg-type]
            await super()._run_function(run, replayed, plan)
            state.ret_value = replayed.ret_value


async def _prefetch(backend: Backend, prefix: str) -> None:
    with contextlib.suppress(BackendError):  # the programs will meet it, too
        await backend.prefetch("", prefix)


def _submitted(
    graph: ProgramGraph, root: Branch, arguments: Mapping[str, Any], shared: Counter[tuple[int, str]]
) -> list[Branch]:
    """Submits all statements of a graph. Returns the branches by their numbers."""
    branches: dict[int, Branch] = {0: root}
    for node in graph.nodes:
        branch = branches[node.branch]
        if isinstance(node.expr, TracedFork):
            branches |= dict(zip(node.expr.children, branch.fork(len(node.expr.children)), strict=True))
        elif isinstance(node.expr, TracedJoin):
            joined = tuple(branches[number] for number in node.expr.branches)
            branch.submit(JoinPoint(joined, node.expr.append), node.place)
        else:
            branch.submit(_bound(_ordered(node, arguments, shared), arguments, branches), node.place)
    return [branches[number] for number in range(len(graph.parents))]


def _bound(expr: Expr, arguments: Mapping[str, Any], branches: Mapping[int, Branch]) -> Expr:
    """The expression with arguments put in, and references to branches' variables."""
    if isinstance(expr, ExprList):
        return ExprList(tuple(_bound(part, arguments, branches) for part in expr.parts))
    if isinstance(expr, Placeholder):
        if expr.branch is None:
            return ConstantText(_text(expr, arguments))
        return VariableRef(branches[expr.branch], expr.name)
    return expr


def _text(expr: Expr, arguments: Mapping[str, Any]) -> str:
    """The text of an expression, as far as it is constant or made of arguments."""
    parts = []
    for part in flat(expr):
        if isinstance(part, ConstantText):
            parts.append(part.value)
        elif isinstance(part, Placeholder) and part.branch is None:
            value = arguments[part.name]
            if not isinstance(value, str | int | float):
                raise ProgramError(f"the argument {part.name!r} is not a text: {value!r}")
            parts.append(str(value))
    return "".join(parts)


def _unordered_parts(expr: Expr) -> list[Expr]:
    if isinstance(expr, Unordered):
        return list(expr.parts)
    return [found for part in expr.parts for found in _unordered_parts(part)] if isinstance(expr, ExprList) else []


def _ordered(node: TracedStatement, arguments: Mapping[str, Any], shared: Counter[tuple[int, str]]) -> Expr:
    """A statement whose unordered parts stand so that shared prefixes are long: what needs no variable first, and of
    that what most programs of the batch have in common. Parts that are equally common stay as they are written."""

    def rank(part: Expr) -> tuple[bool, int]:
        needs_variable = not all(
            isinstance(leaf, ConstantText) or (isinstance(leaf, Placeholder) and leaf.branch is None)
            for leaf in flat(part)
        )
        is_constant = all(isinstance(leaf, ConstantText) for leaf in flat(part))
        common = shared[node.number, _text(part, arguments)] or int(is_constant)
        return needs_variable, -common

    def ordered(expr: Expr) -> Expr:
        if isinstance(expr, Unordered):
            return ExprList(tuple(sorted(expr.parts, key=rank)))
        if isinstance(expr, ExprList):
            return ExprList(tuple(ordered(part) for part in expr.parts))
        return expr

    return ordered(node.expr)


class _Replay:
    """The statements of a graph that the function makes again, and that run already."""

    def __init__(self, graph: ProgramGraph, branches: list[Branch]) -> None:
        self.graph = graph
        self.branches = branches
        self._next = 0

    def next(self, branch: int, shape: list[str]) -> TracedStatement | None:
        """The next statement of the graph, which must be one like this; None after the last."""
        if self._next == len(self.graph.nodes):
            return None
        node = self.graph.nodes[self._next]
        if node.branch != branch or _shape(node.expr) != shape:
            raise ProgramError(
                f"the program took another way than when it was compiled, at {node.place}: compile it with the "
                "arguments bound that decide its way, or run it as it is"
            )
        self._next += 1
        return node


class _ReplayedBranch:
    """A branch on which the statements of a graph are not run again."""

    def __init__(self, replay: _Replay, number: int) -> None:
        self._replay = replay
        self._number = number
        self._branch = replay.branches[number]

    def submit(self, expr: Expr) -> None:
        if isinstance(expr, JoinPoint):
            own = tuple(getattr(branch, "_branch", branch) for branch in expr.branches)
            expr = JoinPoint(own, expr.append)
        if self._replay.next(self._number, _shape(expr)) is None:
            self._branch.submit(expr)

    def fork(self, size: int) -> list[Any]:
        node = self._replay.next(self._number, ["fork", str(size)])
        if node is None:
            return list(self._branch.fork(size))
        assert isinstance(node.expr, TracedFork)
        return [_ReplayedBranch(self._replay, number) for number in node.expr.children]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._branch, name)


def _shape(expr: Expr) -> list[str]:
    """The kinds of an expression's parts, with the names that they set; texts next to each other are one."""
    if isinstance(expr, TracedFork | ForkPoint):
        return ["fork", str(len(expr.children))]
    if isinstance(expr, TracedJoin | JoinPoint):
        return ["join", str(len(expr.branches))]
    shape: list[str] = []
    for part in flat(expr):
        if isinstance(part, ConstantText | Placeholder):
            if shape[-1:] != ["text"]:
                shape.append("text")
        else:
            shape.append(f"{type(part).__name__} {getattr(part, 'name', '')}")
    return shape
