"""Workloads: sessions of turns, with prompts that are rebuilt from a seed.

A prompt is a sequence of spans, each with a key and a length. Equal keys stand for equal tokens, so spans show what
requests share, and no tokens are made until a prompt is sent. `bench.load.load` sends the requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from bench.load.trace import TraceRequest

# The first number of a key: spans of different purposes never have equal keys.
UNIQUE, SHARED, BLOCK, TURN = range(4)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """The first `tokens` tokens of the random stream that `key` names. Of two spans with the same key, the shorter is a
    prefix of the longer."""

    key: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """A request of a session. The prompt consists of the conversation so far, with the server's answers, followed by
    `spans`. The request is sent `think_s` seconds after the end of the previous answer."""

    spans: tuple[TokenSpan, ...]
    output_tokens: int
    think_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens that this turn adds to the session's prompt."""
        return sum(span.tokens for span in self.spans)


@dataclass(frozen=True, slots=True)
class Session:
    """A sequence of turns. `arrival_s` is when the first turn is due, None if the load decides."""

    turns: tuple[ConversationTurn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True)
class Vocabulary:
    """A generator of token ids or words for spans, which depend on the seed, the key and the position alone.

    Ids lie in [low, high). In the models in use, these are ordinary tokens; special tokens lie outside the range.
    """

    seed: int = 0
    low: int = 1000
    high: int = 30000

    def ids(self, spans: Sequence[TokenSpan]) -> list[int]:
        """The token ids of all spans, concatenated."""
        parts = [self._draw(span, self.low, self.high) for span in spans]
        return np.concatenate(parts).tolist() if parts else []

    def text(self, spans: Sequence[TokenSpan]) -> str:
        """The spans as short English words, each after a space: about one token per word in current tokenisers."""
        words = [WORDS[i] for span in spans for i in self._draw(span, 0, len(WORDS))]
        return "".join(f" {word}" for word in words)

    def _draw(self, span: TokenSpan, low: int, high: int) -> np.ndarray:
        # Every span reads its key's generator from the beginning: a shorter span is a prefix of a longer one.
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
    """A distribution of lengths in tokens, never below 1: `fixed:N` (or `N`), `uniform:A:B` (both ends included), or
    `lognormal:MEDIAN:SIGMA[:MAX]`."""

    kind: Literal["fixed", "uniform", "lognormal"]
    a: float
    b: float = 0.0
    most: float = math.inf

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Parses one of these forms. Raises ValueError, whose message names them, for any other text."""
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
            f"{text!r} is not a length: use N, uniform:A:B or lognormal:MEDIAN:SIGMA[:MAX], in tokens, N >= 1"
        )

    def sample(self, rng: np.random.Generator, count: int) -> list[int]:
        """`count` independent lengths."""
        if self.kind == "fixed":
            return [int(self.a)] * count
        if self.kind == "uniform":
            return rng.integers(int(self.a), int(self.b) + 1, count).tolist()
        drawn = np.exp(rng.normal(math.log(self.a), self.b, count))
        return np.clip(np.rint(drawn), 1, self.most).astype(int).tolist()


def poisson(rng: np.random.Generator, rate: float, count: int) -> list[float]:
    """`count` arrival times in seconds of a Poisson process with `rate` arrivals per second. The first is 0. Raises
    ValueError if `rate` is not positive."""
    if not 0 < rate < math.inf:
        raise ValueError(f"a rate of {rate} requests/s: it must be above 0")
    gaps = rng.exponential(1 / rate, max(0, count - 1))
    return [0.0, *np.cumsum(gaps).tolist()][:count]


def arriving(sessions: Sequence[Session], arrivals: Sequence[float | None]) -> list[Session]:
    """Copies of the sessions with these arrival times."""
    return [replace(session, arrival_s=when) for session, when in zip(sessions, arrivals, strict=True)]


# ---------------------------------------------------------------- workloads


def unrelated(rng: np.random.Generator, count: int, prompt: Lengths, output: Lengths) -> list[Session]:
    """The `random` workload: prompts that share nothing."""
    lengths = zip(prompt.sample(rng, count), output.sample(rng, count), strict=True)
    return [Session((ConversationTurn((TokenSpan((UNIQUE, i), n),), out),)) for i, (n, out) in enumerate(lengths)]


def shared_prefix(
    rng: np.random.Generator, groups: int, members: int, prefix: Lengths, prompt: Lengths, output: Lengths
) -> list[Session]:
    """The `shared-prefix` workload: `groups` prefixes, each shared by `members` prompts, in random order."""
    prefixes = prefix.sample(rng, groups)
    order = rng.permutation(np.repeat(np.arange(groups), members)).tolist()
    lengths = zip(prompt.sample(rng, len(order)), output.sample(rng, len(order)), strict=True)
    return [
        Session((ConversationTurn((TokenSpan((SHARED, group), prefixes[group]), TokenSpan((UNIQUE, i), n)), out),))
        for i, (group, (n, out)) in enumerate(zip(order, lengths, strict=True))
    ]


def multi_turn(
    rng: np.random.Generator, sessions: int, turns: int, prompt: Lengths, output: Lengths, think_s: float
) -> list[Session]:
    """The `multi-turn` workload: conversations. Every turn adds a question of `prompt` tokens to the conversation so
    far. Before each turn except the first, the user thinks for `think_s` seconds on average (exponential)."""
    made = []
    for session in range(sessions):
        thinks = [0.0, *rng.exponential(think_s, turns - 1).tolist()] if think_s else [0.0] * turns
        lengths = zip(prompt.sample(rng, turns), output.sample(rng, turns), thinks, strict=True)
        made.append(
            Session(
                tuple(
                    ConversationTurn((TokenSpan((TURN, session, i), n),), o, t) for i, (n, o, t) in enumerate(lengths)
                )
            )
        )
    return made


def from_trace(rows: Sequence[TraceRequest], time_scale: float | None) -> list[Session]:
    """Makes a session of one turn per row. Rows with equal blocks share these tokens. Arrival times are multiplied by
    `time_scale`, or left out if it is None."""
    sessions = []
    for i, row in enumerate(rows):
        arrival = row.arrival_s * time_scale if row.arrival_s is not None and time_scale is not None else None
        sessions.append(Session((ConversationTurn(_spans(i, row), row.output_tokens),), arrival))
    return sessions


def _spans(index: int, row: TraceRequest) -> tuple[TokenSpan, ...]:
    if not row.blocks:
        return (TokenSpan((UNIQUE, index), row.prompt_tokens),)
    left = row.prompt_tokens
    spans = []
    for block in row.blocks:
        spans.append(TokenSpan((BLOCK, block), min(left, row.block_tokens)))
        left -= row.block_tokens
    return tuple(spans)


# ---------------------------------------------------------------- shared tokens


def sharing(sessions: Sequence[Session]) -> tuple[int, int]:
    """Returns the number of prompt tokens that an unlimited cache would hit if the sessions ran one after another, and
    the number of all prompt tokens. Their ratio is the ceiling of the hit rate. Answers are taken to have the requested
    lengths."""
    seen: dict[Any, tuple[int, int]] = {}
    shared = total = 0
    for session in sessions:
        said = 0  # tokens of earlier turns and answers, all computed in this session
        for number, turn in enumerate(session.turns):
            found = _seen_before(turn.spans, seen) if number == 0 else 0
            shared += said + found
            total += said + turn.prompt_tokens
            said += turn.prompt_tokens + turn.output_tokens
    return shared, total


def _seen_before(spans: Sequence[TokenSpan], seen: dict[Any, tuple[int, int]]) -> int:
    """The number of tokens at the front of `spans` that earlier calls have seen. Adds `spans` to `seen`.

    `seen` is a tree: it maps a node and the key of a span to the next node and the longest span of this key there.
    """
    found, node, along = 0, 0, True
    for span in spans:
        child, longest = seen.get((node, span.key), (len(seen) + 1, 0))
        seen[node, span.key] = child, max(longest, span.tokens)
        if along:
            found += min(longest, span.tokens)
            along = longest >= span.tokens
        node = child
    return found
