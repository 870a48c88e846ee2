"""Loads for a fleet. A prompt is a sequence of spans (`bench.load.workload`): equal spans in equal places are a shared
prefix."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.load.trace import TraceRequest
from bench.load.workload import BLOCK, SHARED, TURN, UNIQUE, TokenSpan, poisson

LOADS = ("mooncake", "zipf", "hot_prefix", "bursts", "agents")
MAX_TOKEN_ID = 1 << 30
# Of a burst: requests for each replica, tokens that they share, and tokens of each one's own.
BURST_SIZE, BURST_SHARED, BURST_OWN = 2, 3072, 512
FLOOD, QUIET = "flood", "quiet"


@dataclass(frozen=True, slots=True, eq=False)
class FleetRequest:
    """A request.

    | field | meaning |
    | --- | --- |
    | `number` | index in the list of all requests, follow-ups included |
    | `at_s` | arrival; for a follow-up, seconds after the end of the request before it |
    | `spans` | the prompt |
    | `output_tokens` | length of the answer, which ends with span (TURN, number) |
    | `then` | the next request of the same client |
    | `client` | the client's name, for fairness |
    """

    number: int
    at_s: float
    spans: tuple[TokenSpan, ...]
    output_tokens: int
    then: "FleetRequest | None" = None
    client: str = ""

    @property
    def prompt_tokens(self) -> int:
        return sum(span.tokens for span in self.spans)

    @property
    def answer(self) -> TokenSpan:
        return TokenSpan((TURN, self.number), self.output_tokens)


def token_ids(spans: Sequence[TokenSpan]) -> np.ndarray:
    """The tokens of spans, int32 [n]. Spans of equal keys begin with equal tokens; others differ from the first on."""
    parts = []
    for span in spans:
        begin = 0
        for number in span.key:
            begin = (begin * 1_000_003 + number * 7919 + 12_345) % MAX_TOKEN_ID
        parts.append((np.arange(begin, begin + span.tokens, dtype=np.int64) % MAX_TOKEN_ID).astype(np.int32))
    return np.concatenate(parts)


def chain(requests: Sequence[FleetRequest]) -> Iterator[FleetRequest]:
    """All requests with their follow-ups, each client's in order."""
    for request in requests:
        following: FleetRequest | None = request
        while following is not None:
            yield following
            following = following.then


def common_tokens(one: FleetRequest, other: FleetRequest) -> int:
    """Length of the common prefix of two prompts."""
    common = 0
    for span, its in zip(one.spans, other.spans, strict=False):
        if span.key != its.key:
            break
        common += min(span.tokens, its.tokens)
        if span.tokens != its.tokens:
            break
    return common


def at_rate(requests: Sequence[FleetRequest], rate_s: float) -> list[FleetRequest]:
    """The same requests, with arrivals sped up or slowed down to `rate_s` first requests a second on average."""
    last_s = requests[-1].at_s
    factor = len(requests) / rate_s / last_s
    return [replace(request, at_s=request.at_s * factor) for request in requests]


def from_trace(rows: Sequence[TraceRequest]) -> list[FleetRequest]:
    """The requests of a trace with block ids, such as Mooncake's. Raises ValueError for a trace without them."""
    if not rows[0].blocks or rows[0].arrival_s is None:
        raise ValueError("the trace has no hash_ids and times: use one such as Mooncake's conversations")
    requests = []
    for number, row in enumerate(rows):
        lengths = [row.block_tokens] * (len(row.blocks) - 1)
        lengths.append(row.prompt_tokens - sum(lengths))
        spans = tuple(TokenSpan((BLOCK, block), n) for block, n in zip(row.blocks, lengths, strict=True))
        # Many requests of a trace have the same time stamp; they would arrive in the order of its file otherwise.
        requests.append(FleetRequest(number, row.arrival_s or 0.0, spans, row.output_tokens))
    return requests


def zipf(rng: np.random.Generator, count: int, num_replicas: int) -> list[FleetRequest]:
    """Prefixes of 4,096 tokens by Zipf's law, about 31 a replica, and 1,024 tokens of each request's own."""
    num_prefixes = 2000 * num_replicas // 64
    shares = 1 / np.arange(1, num_prefixes + 1)
    prefixes = rng.choice(num_prefixes, size=count, p=shares / shares.sum())
    return _shared_prefixes(rng, prefixes, 4096, 1024)


def two_clients(rng: np.random.Generator, count: int, num_replicas: int) -> list[FleetRequest]:
    """The requests of `zipf` by two clients with prefixes of their own: of every 11 requests `FLOOD` sends 10 and
    `QUIET` one."""
    requests = zipf(rng, count, num_replicas)
    is_quiet = (rng.random(count) < 1 / 11).tolist()
    return [_of_client(request, quiet) for request, quiet in zip(requests, is_quiet, strict=True)]


def _of_client(request: FleetRequest, is_quiet: bool) -> FleetRequest:
    if not is_quiet:
        return replace(request, client=FLOOD)
    shared, own = request.spans
    return replace(request, client=QUIET, spans=(TokenSpan((*shared.key, 1), shared.tokens), own))


def hot_prefix(rng: np.random.Generator, count: int, num_replicas: int) -> list[FleetRequest]:
    """A single prefix of 8,192 tokens that all requests share, and 2,048 tokens of each request's own."""
    return _shared_prefixes(rng, np.zeros(count, dtype=np.int64), 8192, 2048)


def _shared_prefixes(rng: np.random.Generator, prefixes: np.ndarray, shared: int, own: int) -> list[FleetRequest]:
    arrivals, outputs = poisson(rng, 1.0, len(prefixes)), _outputs(rng, len(prefixes), 200)
    return [
        FleetRequest(n, at_s, (TokenSpan((SHARED, int(prefix)), shared), TokenSpan((UNIQUE, n), own)), output)
        for n, (at_s, prefix, output) in enumerate(zip(arrivals, prefixes, outputs, strict=True))
    ]


def bursts(rng: np.random.Generator, count: int, num_replicas: int) -> list[FleetRequest]:
    """Half of the requests arrive one by one, with prompts of 512 to 8,192 tokens that share nothing. The other half
    arrives in bursts of two requests a replica at the same moment, with one new prefix of 3,072 tokens for each burst
    and 512 tokens of each request's own."""
    size = BURST_SIZE * num_replicas
    times = np.array(poisson(rng, 1.0, count // 2))
    num_bursts = max(1, count // 2 // size)
    begins = (np.arange(num_bursts) + rng.random(num_bursts)) * times[-1] / num_bursts
    lengths = np.exp(rng.uniform(np.log(512), np.log(8192), size=len(times))).astype(int)
    rows: list[tuple[float, tuple[TokenSpan, ...]]] = [
        (at_s, (TokenSpan((UNIQUE, n), int(length)),))
        for n, (at_s, length) in enumerate(zip(times.tolist(), lengths, strict=True))
    ]
    for burst, at_s in enumerate(begins.tolist()):
        rows += [
            (
                at_s,
                (
                    TokenSpan((SHARED, burst), BURST_SHARED),
                    TokenSpan((UNIQUE, count + burst * size + n), BURST_OWN),
                ),
            )
            for n in range(size)
        ]
    rows.sort(key=lambda row: row[0])
    outputs = _outputs(rng, len(rows), 200)
    return [FleetRequest(n, at_s, spans, outputs[n]) for n, (at_s, spans) in enumerate(rows)]


def agents(rng: np.random.Generator, count: int, num_replicas: int) -> list[FleetRequest]:
    """Agents with one of 16 system prompts of 6,144 tokens, 6 to 14 turns each. A turn adds 256 to 2,048 tokens of a
    tool's result 0.1 to 1.5 s after the answer before it. All earlier answers are part of the prompt."""
    mean_turns = 10
    num_agents = max(1, count // mean_turns)
    shares = 1 / np.arange(1, 17)
    systems = rng.choice(16, size=num_agents, p=shares / shares.sum())
    arrivals = poisson(rng, 1.0, num_agents)
    requests, number = [], 0
    for at_s, system in zip(arrivals, systems.tolist(), strict=True):
        turns = int(rng.integers(6, 15))
        added = np.exp(rng.uniform(np.log(256), np.log(2048), size=turns)).astype(int).tolist()
        outputs, thinks = _outputs(rng, turns, 120), rng.uniform(0.1, 1.5, size=turns).tolist()
        spans: tuple[TokenSpan, ...] = (TokenSpan((SHARED, system), 6144),)
        session: list[FleetRequest] = []
        for turn in range(turns):
            spans += (TokenSpan((UNIQUE, number), added[turn]),)
            session.append(FleetRequest(number, thinks[turn] if turn else at_s, spans, outputs[turn]))
            spans += (session[-1].answer,)
            number += 1
        following: FleetRequest | None = None
        for request in reversed(session):
            following = replace(request, then=following)
        assert following is not None
        requests.append(following)
    return requests


def _outputs(rng: np.random.Generator, count: int, mean: float) -> list[int]:
    return (1 + rng.exponential(mean, size=count)).astype(int).tolist()


MADE: dict[str, Callable[[np.random.Generator, int, int], list[FleetRequest]]] = {
    "zipf": zipf,
    "hot_prefix": hot_prefix,
    "bursts": bursts,
    "agents": agents,
}
