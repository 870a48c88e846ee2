"""Drawings of a program's graph: as text, and as SVG with a column for each branch."""

from html import escape
from os.path import basename

from shoal.lang.ir import (
    ConstantText,
    Expr,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    Select,
    SeparateReasoning,
    VarScopeBegin,
    VarScopeEnd,
    Video,
)
from shoal.lang.tracer import Placeholder, ProgramGraph, TracedFork, TracedJoin, TracedStatement, flat

WIDTH, GAP, LINE, PAD = 300, 40, 16, 8  # of a column, between columns, of a line of text, within a box: pixels


def graph_text(name: str, graph: ProgramGraph) -> str:
    """The statements in order, each with its branch, what it reads, and what is known of it."""
    lines = [f"{name}: {len(graph.nodes)} statements on {len(graph.parents)} branches"]
    prefix = graph.prefix()
    if prefix:
        lines.append(f"  shared by all runs: the first {len(prefix)} characters")
    for node in graph.nodes:
        parent = graph.parents[node.branch]
        origin = "" if parent is None else f" (fork of {parent})"
        reads = [f"branch {read.branch}: {read.name}" for read in node.reads if read.branch is not None]
        waits = f"  waits for {', '.join(reads)}" if reads else ""
        lines.append(f"  branch {node.branch}{origin}  {' '.join(_labels(node.expr))}{waits}")
    lines.append(f"  then the interpreter goes on: {graph.stop}" if graph.stop else "  the graph is whole")
    return "\n".join(lines)


def graph_svg(name: str, graph: ProgramGraph) -> str:
    """A column for each branch, statements from top to bottom in order, and arrows for forks, joins and reads."""
    boxes: list[str] = []
    arrows: list[str] = []
    bottoms: dict[int, tuple[float, float]] = {}  # of each branch's last box
    setters: dict[tuple[int, str], tuple[float, float]] = {}
    y = 40.0
    for node in graph.nodes:
        labels = _labels(node.expr) or [""]
        x = 10.0 + node.branch * (WIDTH + GAP)
        height = LINE * len(labels) + 2 * PAD
        top = (x + WIDTH / 2, y)
        if node.branch in bottoms:
            arrows.append(_arrow(bottoms[node.branch], top, "#888"))
        for read in node.reads:
            if read.branch is not None and (read.branch, read.name) in setters:
                arrows.append(_arrow(setters[read.branch, read.name], top, "#c60"))
        if isinstance(node.expr, TracedJoin):
            arrows += [_arrow(bottoms[b], top, "#06c") for b in node.expr.branches if b in bottoms]
        boxes.append(_box(x, y, height, labels, _is_call(node)))
        bottom = (x + WIDTH / 2, y + height)
        bottoms[node.branch] = bottom
        if isinstance(node.expr, TracedFork):
            bottoms |= dict.fromkeys(node.expr.children, bottom)
        for part in flat(node.expr):
            if isinstance(part, Gen | Select | VarScopeEnd) and part.name is not None:
                setters[node.branch, part.name] = bottom
        y += height + 24
    if graph.stop:
        boxes.append(f'<text x="10" y="{y:.0f}" fill="#a00">the interpreter goes on: {escape(graph.stop)}</text>')
        y += 24
    width = 20 + len(graph.parents) * (WIDTH + GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{y:.0f}" font-family="monospace" '
        f'font-size="12"><defs><marker id="a" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" markerHeight="7" '
        f'orient="auto"><path d="M0,0L6,3L0,6z" fill="#555"/></marker></defs><text x="10" y="20" font-weight="bold">'
        f"{escape(name)}</text>{''.join(arrows)}{''.join(boxes)}</svg>"
    )


def _box(x: float, y: float, height: float, labels: list[str], is_call: bool) -> str:
    fill = "#fff3d6" if is_call else "#f4f4f4"
    rows = "".join(
        f'<text x="{x + PAD:.0f}" y="{y + PAD + LINE * (i + 0.8):.0f}">{escape(label[:40])}</text>'
        for i, label in enumerate(labels)
    )
    size = f'width="{WIDTH}" height="{height:.0f}"'
    return f'<rect x="{x:.0f}" y="{y:.0f}" {size} rx="4" fill="{fill}" stroke="#999"/>{rows}'


def _arrow(start: tuple[float, float], end: tuple[float, float], color: str) -> str:
    middle = (start[1] + end[1]) / 2
    return (
        f'<path d="M{start[0]:.0f},{start[1]:.0f}C{start[0]:.0f},{middle:.0f} {end[0]:.0f},{middle:.0f} '
        f'{end[0]:.0f},{end[1]:.0f}" fill="none" stroke="{color}" marker-end="url(#a)"/>'
    )


def _is_call(node: TracedStatement) -> bool:
    return any(isinstance(part, Gen | Select) for part in flat(node.expr))


def _labels(expr: Expr) -> list[str]:
    """A short text for each part of a statement."""
    return [label for part in flat(expr) if (label := _label(part))]


def _label(part: Expr) -> str:
    match part:
        case ConstantText(value):
            return repr(value if len(value) <= 32 else f"{value[:20]}...{value[-8:]}")
        case Placeholder():
            return part.label
        case Gen(name, params):
            used = ", ".join(sorted(params.used()))
            return f"gen({name or ''}{': ' if used else ''}{used})"
        case Select(name, choices):
            return f"select({name or ''}: {len(choices)} choices)"
        case RoleBegin(role):
            return f"{role}("
        case RoleEnd():
            return ")"
        case VarScopeBegin(name):
            return f"{name}=["
        case VarScopeEnd():
            return "]"
        case Image(source) | Video(source, _):
            return f"{type(part).__name__.lower()}({basename(str(source))[:20]})"
        case SeparateReasoning(names):
            return f"separate_reasoning({', '.join(names)})"
        case TracedFork(children):
            return f"fork({len(children)})"
        case TracedJoin(branches, append):
            return f"{'append' if append else 'gather'} branches {', '.join(map(str, branches))}"
    return type(part).__name__
