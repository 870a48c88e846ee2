"""Limits of clients: requests and tokens in a minute, requests at once.

    Keys.check ──▶ RateLimits.enter: 429, or a Ticket ──▶ tokens are counted as they are used ──▶ Ticket.end

Routers share the counts. Each tells the others what its clients have used (`report`, `hear`), several times a second,
by way of a replica that is connected to all of them (`UsageExchange`). So a limit holds over all routers, but for what
was used in the last fraction of a second.

A limit in a minute is a leaky bucket: what was used flows off evenly, the whole limit within a minute. Tokens are
counted after the fact. A prompt counts as soon as it is tokenised, an answer as it is made, and the next requests wait
until the bucket is no longer full.

Requests that generate nothing cost a router something, too. What they count against depends on their `Kind`.
"""

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto

from fastapi import Request

from router.access.auth import client_of
from router.access.key_file import ApiClient
from router.metrics.metrics import Metrics
from router.replicas.replicas import Replicas
from router.streaming.aborts import Aborts
from router.wire.errors import ApiError
from worker.messages import ClientUsage, UsageReport

MINUTE_S = 60.0
REPORT_EVERY_S = 0.1
# Running requests are told again so often, and count for so long at the other routers: a router may have gone.
REPEAT_S, TRUST_S = 1.0, 5.0
BUSY_RETRY_S = 1  # when a client with too many requests at once may try again: when one of them ends is not known
# Tokens of a text that is only tokenised, for each that counts: what a router does with a text costs about so much less
# than what a replica does.
READ_TOKENS_FOR_ONE = 16


class Kind(Enum):
    """Kinds of requests, as limits see them.

    | kind | requests in a minute | tokens in a minute | at once |
    | --- | --- | --- | --- |
    | `GENERATES` | counts | counts | counts |
    | `TOKENISES` | counts | a part counts (`READ_TOKENS_FOR_ONE`) | counts |
    | `READS` what is stored | counts | | |
    | `FOLLOWS` a stored response | counts | | among those that follow, at each router |
    | `ENDS` another request, or what is stored | counts, and is never refused | | |
    """

    GENERATES = auto()
    TOKENISES = auto()
    READS = auto()
    FOLLOWS = auto()
    ENDS = auto()


@dataclass(slots=True)
class Bucket:
    """A leaky bucket. `level`: what was used and has not flowed off yet, at `at_s` (seconds). `per_minute`: what flows
    off."""

    level: float = 0.0
    per_minute: int = 0
    at_s: float = 0.0

    def leak(self, per_minute: int, now_s: float) -> float:
        """The level now, with a limit that may be new."""
        self.level = max(0.0, self.level - (now_s - self.at_s) * per_minute / MINUTE_S)
        self.per_minute, self.at_s = per_minute, now_s
        return self.level

    def add(self, amount: int, per_minute: int, now_s: float) -> None:
        """Counts a use."""
        if per_minute:
            self.level = self.leak(per_minute, now_s) + amount

    def is_empty(self, now_s: float) -> bool:
        return self.level <= (now_s - self.at_s) * self.per_minute / MINUTE_S


@dataclass(slots=True)
class _Used:
    """A client's use: `requests` and `tokens` of all routers, `running` and `following` of this one, what runs at
    `others` by name, with the time when they were told. `new_requests`, `new_tokens`: those of which the other routers
    have not been told."""

    requests: Bucket = field(default_factory=Bucket)
    tokens: Bucket = field(default_factory=Bucket)
    running: int = 0
    following: int = 0
    others: dict[str, tuple[int, float]] = field(default_factory=dict)
    told_s: float = -math.inf
    told_running: int = 0
    new_requests: int = 0
    new_tokens: int = 0

    def at_once(self, now_s: float) -> int:
        """Requests that run now, on all routers."""
        self.others = {router: told for router, told in self.others.items() if now_s - told[1] < TRUST_S}
        return self.running + sum(running for running, _ in self.others.values())

    def is_needed(self, now_s: float) -> bool:
        """Whether any of it counts still."""
        buckets = self.requests, self.tokens
        return bool(self.following or self.at_once(now_s)) or not all(bucket.is_empty(now_s) for bucket in buckets)


class RateLimits:
    """The use of all clients, against their limits. For one event loop."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self.router = secrets.token_hex(8)
        self._metrics = metrics
        self._clock = clock
        self._used: dict[str, _Used] = {}  # by tenant; clients with limits only

    async def admit(self, request: Request) -> None:
        """Sets `request.state.ticket`; the middleware ends it after the answer. A dependency of the routes that
        generate, after `Keys.check`. Raises ApiError (429)."""
        request.state.ticket = self.enter(client_of(request))

    def admit_as(self, kind: Kind) -> Callable[[Request], Awaitable[None]]:
        """A dependency as `admit`, of routes that do something else."""

        async def admit(request: Request) -> None:
            request.state.ticket = self.enter(client_of(request), kind)

        return admit

    def enter(self, client: ApiClient, kind: Kind = Kind.GENERATES) -> "Ticket":
        """Admits a request, which runs until its ticket ends. Raises ApiError (429) if that would break a limit."""
        ticket = Ticket(self, client, kind)
        if ticket.is_limited:
            used, now_s = self.used(client), self._clock()
            refused = [refusal for refusal in _refusals(client, used, now_s, kind) if refusal is not None]
            if refused:
                limit, wait_s, message = max(refused, key=lambda refusal: refusal[1])
                self._metrics.client_requests.labels(client.name, limit).inc()
                headers = {"Retry-After": str(max(1, math.ceil(wait_s)))} | ticket.headers()
                raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
            used.requests.add(1, client.requests_per_minute or 0, now_s)
            used.new_requests += 1
            used.running += ticket.runs
            used.following += kind is Kind.FOLLOWS
        self._metrics.client_requests.labels(client.name, "admitted").inc()
        return ticket

    def used(self, client: ApiClient) -> _Used:
        """The client's use so far."""
        return self._used.setdefault(client.tenant, _Used())

    def now_s(self) -> float:
        return self._clock()

    def count(self, client: ApiClient, prompt: int, output: int) -> None:
        """Counts tokens in the metrics."""
        self._metrics.client_tokens.labels(client.name, "prompt").inc(prompt)
        self._metrics.client_tokens.labels(client.name, "output").inc(output)

    # ------------------------------------------------------------ the other routers

    def report(self) -> UsageReport | None:
        """The news that the others have not been told yet; None if there are none."""
        now_s, clients = self._clock(), {}
        for tenant, used in list(self._used.items()):
            due = used.running and now_s - used.told_s >= REPEAT_S
            if due or used.new_requests or used.new_tokens or used.running != used.told_running:
                clients[tenant] = ClientUsage(
                    used.new_requests,
                    used.new_tokens,
                    used.running,
                    used.requests.per_minute,
                    used.tokens.per_minute,
                )
                used.new_requests = used.new_tokens = 0
                used.told_s, used.told_running = now_s, used.running
            elif not used.is_needed(now_s):
                del self._used[tenant]
        return UsageReport(self.router, clients) if clients else None

    def hear(self, report: UsageReport) -> None:
        """Counts what another router tells."""
        now_s = self._clock()
        for tenant, told in report.clients.items():
            used = self._used.setdefault(tenant, _Used())
            used.requests.add(told.requests, told.requests_per_minute, now_s)
            used.tokens.add(told.tokens, told.tokens_per_minute, now_s)
            used.others[report.router] = told.running, now_s


class Ticket:
    """A request that was admitted. `kept`: the request goes on after its HTTP answer, and its runner ends the
    ticket."""

    def __init__(self, limits: RateLimits, client: ApiClient, kind: Kind = Kind.GENERATES) -> None:
        self.client = client
        self.kept = False
        self._kind = kind
        self.is_limited = any(
            limit is not None
            for limit in (client.requests_per_minute, client.tokens_per_minute, client.concurrent_requests)
        )
        self._limits = limits
        self._prompt = self._output = 0
        self._has_ended = False

    @property
    def generates(self) -> bool:
        """Whether the request is for tokens of a model."""
        return self._kind is Kind.GENERATES

    @property
    def runs(self) -> bool:
        """Whether it counts among the requests at once."""
        return self._kind in (Kind.GENERATES, Kind.TOKENISES)

    @property
    def has_tokens(self) -> bool:
        """Whether the client's limit allows more tokens now."""
        most = self.client.tokens_per_minute
        return most is None or self._limits.used(self.client).tokens.leak(most, self._limits.now_s()) < most

    def add_tokens(self, prompt: int = 0, output: int = 0) -> None:
        """Counts tokens that the request uses, also after its end."""
        self._prompt += prompt
        self._output += output
        if self._has_ended:
            self._limits.count(self.client, prompt, output)
        self._use(prompt + output)

    def add_again(self, tokens: int) -> None:
        """Counts tokens that the answer's usage has already, as those of a prompt with several choices."""
        self._use(tokens)

    def add_read(self, tokens: int) -> None:
        """Counts tokens of a text that no model computes."""
        self._use(-(-tokens // READ_TOKENS_FOR_ONE))

    def _use(self, tokens: int) -> None:
        if self.client.tokens_per_minute is not None:
            used = self._limits.used(self.client)
            used.tokens.add(tokens, self.client.tokens_per_minute, self._limits.now_s())
            used.new_tokens += tokens

    def end(self) -> None:
        """Ends the request. Does nothing the second time."""
        if self._has_ended:
            return
        self._has_ended = True
        self._limits.count(self.client, self._prompt, self._output)
        if self.is_limited:
            used = self._limits.used(self.client)
            used.running -= self.runs
            used.following -= self._kind is Kind.FOLLOWS

    def headers(self) -> dict[str, str]:
        """OpenAI's headers: of each limit in a minute the limit, what remains of it, and when all of it will again."""
        headers: dict[str, str] = {}
        client = self.client
        if not self.is_limited:
            return headers
        used, now_s = self._limits.used(client), self._limits.now_s()
        for what, bucket, most in (
            ("requests", used.requests, client.requests_per_minute),
            ("tokens", used.tokens, client.tokens_per_minute),
        ):
            if most is not None:
                level = bucket.leak(most, now_s)
                headers[f"x-ratelimit-limit-{what}"] = str(most)
                headers[f"x-ratelimit-remaining-{what}"] = str(max(0, math.floor(most - level)))
                headers[f"x-ratelimit-reset-{what}"] = duration(level * MINUTE_S / most)
        return headers


HEADERS = [
    f"x-ratelimit-{which}-{what}" for which in ("limit", "remaining", "reset") for what in ("requests", "tokens")
]


class UsageExchange:
    """Lets the routers hear of each other's clients: sends this router's reports to one replica, which passes them on
    to all others."""

    def __init__(self, limits: RateLimits, connections: Iterable[Replicas], aborts: Aborts) -> None:
        """`connections`: those of each model. `aborts`: requests that clients of other routers may end."""
        self._limits, self._aborts = limits, aborts
        aborts.on_abort = self._tell_aborts
        self._connections = list(connections)
        self._task: asyncio.Task[None] | None = None
        for replicas in self._connections:
            replicas.on_usage = self._hear

    def start(self) -> None:
        """Begins, in the running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            self.tell()

    def tell(self) -> None:
        """Sends what the other routers have not been told yet, if a replica is connected."""
        if any(replicas.ready for replicas in self._connections):
            report = self._limits.report()
            if report is not None:
                self._send(report)

    def _tell_aborts(self, tenant: str, names: list[str]) -> None:
        self._send(UsageReport(self._limits.router, {}, {tenant: names}))

    def _send(self, report: UsageReport) -> None:
        connected = [replicas for replicas in self._connections if replicas.ready]
        if connected:
            connected[0].tell_one(report, turn=int(self._limits.router, 16))

    def _hear(self, report: UsageReport) -> None:
        self._limits.hear(report)
        for tenant, names in report.aborts.items():
            self._aborts.heard(tenant, names)


def duration(seconds: float) -> str:
    """A time in the form of OpenAI's headers: 1m30s, 2.5s, 120ms."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, seconds = divmod(math.ceil(10 * seconds) / 10, 60)
    text = f"{seconds:.1f}".removesuffix(".0") + "s"
    return f"{minutes:.0f}m{text}" if minutes else text


Refusal = tuple[str, float, str]


def _refusals(client: ApiClient, used: _Used, now_s: float, kind: Kind) -> Iterable[Refusal | None]:
    """For each limit that is reached: its name, seconds until it may not be, and what the client is told."""
    if kind is Kind.ENDS:
        return
    at_once, follows = client.concurrent_requests, kind is Kind.FOLLOWS
    running = used.following if follows else used.at_once(now_s)
    if at_once is not None and running >= at_once and kind is not Kind.READS:
        what = f"follow {at_once} responses" if follows else f"have {at_once} requests"
        yield "concurrent", BUSY_RETRY_S, f"{client.name} may {what} at once; wait until one of them has ended."
    yield _refusal(client, "requests", used.requests, client.requests_per_minute, 1, now_s)
    if kind in (Kind.GENERATES, Kind.TOKENISES):
        yield _refusal(client, "tokens", used.tokens, client.tokens_per_minute, 0, now_s)


def _refusal(client: ApiClient, what: str, bucket: Bucket, most: int | None, more: int, now_s: float) -> Refusal | None:
    if most is None:
        return None
    over = bucket.leak(most, now_s) + more - most
    if over < 0 or (more and over <= 0):
        return None
    wait_s = over * MINUTE_S / most
    message = f"{client.name} may use {most} {what} a minute, and has used them; try again in {duration(wait_s)}."
    return what, wait_s, message
