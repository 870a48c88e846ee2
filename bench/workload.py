"""What is asked of a server: sessions of turns, with prompts that can be rebuilt from a seed.

A prompt is a row of spans, each a key and a length: the same key is the same tokens, so spans say what requests share
and cost nothing until a prompt is sent. Nothing here knows time but the arrivals; `bench.load` sends.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bench.trace import Row

# The first number of a key, so that spans of different purpose never coincide.
UNIQUE, SHARED, BLOCK, TURN = range(4)


@dataclass(frozen=True, slots=True)
class Span:
    """`tokens` tokens drawn from the stream that `key` names; two spans of one key begin alike."""

    key: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. Its prompt is the session so far (with the real answers) and then `spans`; it is sent `think_s`
    after the answer before it ended."""

    spans: tuple[Span, ...]
    output_tokens: int
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Length of what this turn adds to the session's prompt."""
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Session:
    """Turns that follow one another. `arrival_s` is when the first is due; None leaves that to the load."""

    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True)
class Vocabulary:
    """Turns spans into token ids (or words) that depend on the seed, the key and the position alone.

    Ids lie in [low, high): a range that the models in use have as ordinary tokens, special ones lie outside.
    """

    seed: int = 0
    low: int = 1000
    high: int = 30000

    def ids(self, spans: Sequence[Span]) -> list[int]:
        """The spans' tokens one after another."""
        parts = [self._draw(span, self.low, self.high) for span in spans]
        return np.concatenate(parts).tolist() if parts else []

    def text(self, spans: Sequence[Span]) -> str:
        """The spans as short English words, about a token each in any current tokeniser, each after a space."""
        words = [WORDS[i] for span in spans for i in self._draw(span, 0, len(WORDS))]
        return "".join(f" {word}" for word in words)

    def _draw(self, span: Span, low: int, high: int) -> np.ndarray:
        # One generator a key, read from its beginning: a shorter span is a prefix of a longer one.
        return np.random.default_rng([self.seed, *span.key]).integers(low, high, span.tokens)


COMMON = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name team minute idea body back parent face others level "
    "office door health person art war history party result change morning reason research girl guy moment air teacher "
    "force education foot boy age policy music market sense nation plan college interest death course someone"
)
WORDS = tuple(COMMON.split())

# ---------------------------------------------------------------- lengths and arrivals


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens, never below 1: `fixed:N` (or `N`), `uniform:A:B` (both ends may come), or
    `lognormal:MEDIAN:SIGMA[:MAX]`."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    b: float = 0.0
    most: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Raises ValueError that says what is right."""
        kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
        try:
            values = [float(number) for number in numbers]
        except ValueError:
            values = []
        match kind, values:
            case "fixed", [n] if n >= 1 and n.is_integer():
                return cls("fixed", n)
            case "uniform", [a, b] if 1 <= a <= b < math.inf and a.is_integer() and b.is_integer():
                return cls("uniform", a, b)
            case "lognormal", [median, sigma, *most] if (
                1 <= median < math.inf and 0 <= sigma < math.inf and len(most) < 2 and all(m >= 1 for m in most)
            ):
                return cls("lognormal", median, sigma, *most)
        raise ValueError(
            f"{text!r} is no length: use N, uniform:A:B or lognormal:MEDIAN:SIGMA[:MAX], in tokens, N >= 1"
        )

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` lengths, independent of one another."""
        if self.kind == "fixed":
            return [int(self.a)] * count
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b) + 1, count).tolist()
        drawn = np.exp(rng.normal(math.log(self.a), self.b, count))
        return np.clip(np.rint(drawn), 1, self.most).astype(int).tolist()


def poisson(rng: np.random.Generator, rate: float, count: int) -> list[float]:
    """`count` arrival times in seconds of a Poisson process with `rate` arrivals a second, the first at 0."""
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate} requests/s: it must be above 0")
    gaps = rng.exponential(1 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def arriving(sessions: Sequence[Session], arrivals: Sequence[float | None]) -> list[Session]:
    """The sessions with these arrival times."""
    return [replace(session, arrival_s=when) for session, when in zip(sessions, arrivals, strict=True)]


# ---------------------------------------------------------------- workloads


def unrelated(rng: np.random.Generator, count: int, prompt: Lengths, output: Lengths) -> list[Session]:
    """`random`: prompts that share nothing."""
    lengths = zip(prompt.sample(rng, count), output.sample(rng, count), strict=True)
    return [Session((Turn((Span((UNIQUE, i), n),), out),)) for i, (n, out) in enumerate(lengths)]


def shared_prefix(
    rng: np.random.Generator, groups: int, members: int, prefix: Lengths, prompt: Lengths, output: Lengths
) -> list[Session]:
    """`shared-prefix`: `groups` prefixes, each in front of `members` prompts of their own, in random order."""
    prefixes = prefix.sample(rng, groups)
    order = rng.permutation(np.repeat(np.arange(groups), members)).tolist()
    lengths = zip(prompt.sample(rng, len(order)), output.sample(rng, len(order)), strict=True)
    return [
        Session((Turn((Span((SHARED, group), prefixes[group]), Span((UNIQUE, i), n)), out),))
        for i, (group, (n, out)) in enumerate(zip(order, lengths, strict=True))
    ]


def multi_turn(
    rng: np.random.Generator, sessions: int, turns: int, prompt: Lengths, output: Lengths, think_s: float
) -> list[Session]:
    """`multi-turn`: conversations. Every turn adds a question of `prompt` tokens to all that was said before it.
    Before each but the first the user thinks, `think_s` seconds on average (exponential)."""
    made = []
    for session in range(sessions):
        thinks = [0.0, *rng.exponential(think_s, turns - 1).tolist()] if think_s else [0.0] * turns
        lengths = zip(prompt.sample(rng, turns), output.sample(rng, turns), thinks, strict=True)
        made.append(Session(tuple(Turn((Span((TURN, session, i), n),), o, t) for i, (n, o, t) in enumerate(lengths))))
    return made


def from_trace(rows: Sequence[Row], time_scale: float | None) -> list[Session]:
    """A session of one turn a row; rows with blocks share what the trace shared. Times are multiplied by `time_scale`,
    or left out when that is None."""
    sessions = []
    for i, row in enumerate(rows):
        arrival = row.arrival_s * time_scale if row.arrival_s is not None and time_scale is not None else None
        sessions.append(Session((Turn(_spans(i, row), row.output_tokens),), arrival))
    return sessions


def _spans(index: int, row: Row) -> tuple[Span, ...]:
    if not row.blocks:
        return (Span((UNIQUE, index), row.prompt_tokens),)
    left = row.prompt_tokens
    spans = []
    for block in row.blocks:
        spans.append(Span((BLOCK, block), min(left, row.block_tokens)))
        left -= row.block_tokens
    return tuple(spans)


# ---------------------------------------------------------------- what there is to share


def sharing(sessions: Sequence[Session]) -> tuple[int, int]:
    """Prompt tokens that a cache of any size would have seen before, and all prompt tokens, when the sessions run one
    after another: the ceiling of the hit rate. Answers count as long as they are asked for."""
    seen: dict[Any, tuple[int, int]] = {}
    shared = total = 0
    for session in sessions:
        said = 0  # tokens of the turns before and their answers: all of them were computed in this session
        for number, turn in enumerate(session.turns):
            found = _seen_before(turn.spans, seen) if number == 0 else 0
            shared += said + found
            total += said + turn.prompt_tokens
            said += turn.prompt_tokens + turn.output_tokens
    return shared, total


def _seen_before(spans: Sequence[Span], seen: dict[Any, tuple[int, int]]) -> int:
    """Tokens at the front of `spans` that earlier calls have shown, and shows these. `seen` is a tree: from a node and
    a span's key to the node after it and how many of the key's tokens were there."""
    found, node, along = 0, 0, True
    for span in spans:
        child, longest = seen.get((node, span.key), (len(seen) + 1, 0))
        seen[node, span.key] = child, max(longest, span.tokens)
        if along:
            found += min(longest, span.tokens)
            along = longest >= span.tokens
        node = child
    return found
