"""The messages between routers and replicas over ZeroMQ: msgspec structs in MessagePack.

A replica's scheduler binds one ROUTER socket. Every router process connects a DEALER socket to it. One frame is one
message (`encode`, `decode_from_router`, `decode_from_replica`). Delivery is ordered and reliable while both sides live.
When the connection breaks, the replica aborts the requests of that router, and the router resumes them elsewhere.

| direction | messages |
| --- | --- |
| router to replica | `Generate`, `Abort`, `Release`, `Flush`, `Subscribe` |
| replica to router | `Hello`, `Outputs`, `CacheEvents`, `ReplicaLoad`, `Routers`, `Leaving`, `Farewell` |
| a router to the others, through a replica | `UsageReport`, `AdapterChange` |

Both sides tell their `PROTOCOL` as they meet: the router in `Subscribe`, the replica in `Hello`. Neighbouring numbers
work together, so routers and replicas may be upgraded one after the other; others refuse each other. `Subscribe` and
`Hello` themselves are understood for ever. The rules for a change of the messages:

1. A new field has a default, and a decoder passes over fields that it does not know. This needs no new number.
2. Anything else, such as a new message or another meaning, raises `PROTOCOL`. A side that meets the previous number
   sends only what that number has.
3. What only the number before the previous one needed can be removed.

Adapters need no number: a router sends them to replicas that tell `ReplicaLoad.max_loras`, and a replica tells of them
to routers whose `Subscribe` has `adapters`. So does `Flush`: it goes to replicas that tell `ReplicaLoad.flushed`.

| number | what it added |
| --- | --- |
| 1 | peers that tell no number |
| 2 | `Hello`, `Leaving`, and `Farewell` with reason "drained" |
"""

from collections.abc import Iterable, Iterator
from typing import Literal, Self

import msgspec

from radix.events import CheckpointEvent, Event, NodeEvent
from radix.salt import adapter_salt

PROTOCOL = 2

# ZeroMQ heartbeats: a ping every half second; a side that does not answer within 2 s counts as gone. So a vanished host
# is noticed within 2.5 s, and its streams go on elsewhere within 3 s. ZeroMQ's I/O thread answers pings even while
# Python is busy, so only a machine on which nothing runs for 2 s is declared gone by mistake. Within 2 s TCP sends a
# lost packet again three times.
HEARTBEAT_MS = 500
HEARTBEAT_TIMEOUT_MS = 2000
# A replica says something to every router that has subscribed at least this often: its load while it is idle, empty
# `Outputs` in the middle of a step.
BEAT_S = 1.0
# Of a frame that a replica takes from a router: several times what a body of 8 MiB becomes.
MAX_FRAME_BYTES = 1 << 26


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """A constraint on the output.

    | `kind` | `text` |
    | --- | --- |
    | json_schema | a JSON schema |
    | json_object | empty: any JSON object |
    | regex | a regular expression |
    | choice | a JSON list of strings |
    | ebnf | a grammar in GBNF or in Lark |
    | structural_tag | JSON: a structural tag as xgrammar has it |
    | tool_calls | JSON as `worker.structured_output.tool_calls.tool_calls.ToolCalls` has it |

    `after`: free text comes first, up to this marker and with it, such as `</think>`. Then the grammar applies.
    `begin`: the marker that begins this text, such as `<think>`. The output may leave both out. None: the prompt has
    begun the text.

    `strict`: of a JSON schema. A keyword that no grammar enforces is refused; otherwise it is left out, and the whole
    output is judged when it ends (`SchemaCheck`).
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "structural_tag", "tool_calls"]
    text: str = ""
    after: str | None = None
    begin: str | None = None
    strict: bool = True


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Sampling parameters and stop conditions of a request, already validated by the router.

    - `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off.
    - `seed` None: a random seed is drawn.
    - `logprobs` None: no log probabilities. k >= 0: those of the chosen token and of the k likeliest tokens.
    - `prompt_logprobs`: the same for the prompt's tokens (for `echo`), from position `prompt_logprobs_start` on. Tokens
      before the one that precedes it may come from the cache.
    - `allowed_token_ids`: the only tokens of the output; empty for all. `bad_words`: sequences of tokens that it does
      not have.
    - `pooling`: the request wants the embedding of its prompt, and no tokens. last: the hidden state of the last token,
      after the final norm. mean: the average over all tokens; nothing of the prompt may come from the cache. Of the
      other parameters, only `max_tokens` 1 goes with it.

    Stop strings are not here: the router matches them, since it has the text.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    pooling: Literal["last", "mean"] | None = None


# ---------------------------------------------------------------- router to replica


class Lease(msgspec.Struct, frozen=True, array_like=True):
    """A wish to keep a request's KV: for `seconds` after its end, it is evicted last.

    `owner` has one lease of each `name`; a request without seconds ends it. Every request with a lease renews all
    leases of its owner. Leases hold at most half of the pages. Then the client that has most of them gives up those of
    its newest owner.
    """

    owner: str
    name: str
    seconds: float = 0.0


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter: its name in the API, the folder that replicas read it from, and which loading of that it is,
    empty for those of the configuration. Adapters that differ in any of these have caches of their own."""

    name: str
    path: str
    version: str = ""

    @property
    def key(self) -> str:
        """All three, for `radix.salt.adapter_salt`."""
        return "\0".join((self.name, self.path, self.version))


class Generate(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Run one sequence.

    | field | meaning |
    | --- | --- |
    | `output_ids` | tokens that another replica already produced: generation continues after them |
    | `prediction_ids` | the client's guess at the output: drafts may come from it |
    | `resumed` | a replica accepted the request before and its client waits, so a full queue does not refuse it |
    | `priority` | higher runs first |
    | `booking` | number of this request among the router's requests to this replica, from 1 without gaps |
    | `head_start_s` | seconds by which it counts as having arrived earlier, where shorter prompts go first |
    | `client`, `user` | opaque names for fairness: whose request it is, and which of the client's users' |
    | `weight` | the client's share of the service, relative to others |
    | `cache_salt` | its prefixes are shared with requests of the same salt only (`radix.salt`) |
    | `lease` | what becomes of the KV after the request; None: it is cached as any other |
    | `adapter` | the adapter that it runs with; None: the base model |

    `output_ids` count as output (penalties, `max_tokens`, seeds, grammar) and are not sent again.

    The replica reports the highest `booking` received in `ReplicaLoad.bookings_seen`. From that the router knows which
    of its bookings the load already counts.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = []
    prediction_ids: list[int] = []
    resumed: bool = False
    priority: int = 0
    booking: int = 0
    head_start_s: float = 0.0
    client: str = ""
    user: str = ""
    weight: float = 1.0
    cache_salt: str = ""
    lease: Lease | None = None
    adapter: Adapter | None = None

    @property
    def prefix_salt(self) -> str:
        """The salt of its prefixes in trees: KV under an adapter is another's."""
        return self.cache_salt if self.adapter is None else adapter_salt(self.cache_salt, self.adapter.key)


class Abort(msgspec.Struct, tag=True):
    """Stop these requests and free their pages immediately. Unknown ids are ignored. There is no reply."""

    request_ids: list[str]


class Release(msgspec.Struct, tag=True):
    """End all leases of these owners. Unknown owners are ignored. There is no reply."""

    owners: list[str]


class Flush(msgspec.Struct, tag=True):
    """Empty the cache of prefixes, but for what running requests hold. `ReplicaLoad.flushed` has the id afterwards."""

    id: str


class LengthSample(msgspec.Struct, frozen=True, array_like=True):
    """An output that has ended, as `worker.lengths` learns from it: its request's `features`, little-endian uint16 [n];
    its `tokens`; whether its limit has cut it. About 1 kB."""

    features: bytes
    tokens: int
    was_cut: bool


class Subscribe(msgspec.Struct, tag=True, omit_defaults=True):
    """Send `CacheEvents` and `ReplicaLoad` to this router from now on, starting with a snapshot of the tree. A router
    sends it again after a gap in the sequence numbers of the events.

    `router`: the router's name, unique. `address`: where it publishes its bookings to other routers (ZeroMQ). A router
    without these has no others. `protocol`: the router's `PROTOCOL`. `length_samples`: newest outputs of all replicas,
    from which a replica learns that knows too little to predict any. `adapters`: whether the router understands
    `AdapterChange`.
    """

    router: str = ""
    address: str = ""
    protocol: int = 1
    length_samples: list[LengthSample] = []
    adapters: bool = False


class ClientUsage(msgspec.Struct, frozen=True, array_like=True):
    """The use of one router by a client: `requests` and `tokens` since the router's last report, and how many
    requests are `running`. The limits in a minute, 0 for none, tell how fast it is forgotten."""

    requests: int
    tokens: int
    running: int
    requests_per_minute: int
    tokens_per_minute: int


class UsageReport(msgspec.Struct, tag=True, omit_defaults=True):
    """News about clients with limits, for all other routers: the replica passes the message on to those that have
    subscribed. `router`: a unique name of the sender. `clients`: by the tenant of `router.access.key_file.ApiClient`;
    `aborts`, likewise: names of requests that their clients want to end, empty for all of them."""

    router: str
    clients: dict[str, ClientUsage]
    aborts: dict[str, list[str]] = {}


class AdapterChange(msgspec.Struct, tag=True):
    """Adapters that clients have loaded at a router, or unloaded, by name: the replica passes the message on to all
    other routers, and tells those that come later what is loaded."""

    loaded: list[Adapter]
    unloaded: list[str] = []


FromRouter = Generate | Abort | Release | Flush | Subscribe | UsageReport | AdapterChange

# ---------------------------------------------------------------- replica to router


class Hello(msgspec.Struct, tag=True):
    """The first answer to each `Subscribe` of a router from number 2 on: the replica's `PROTOCOL`. Nothing else follows
    if the numbers do not work together."""

    protocol: int


class TokenLogprobs(msgspec.Struct, omit_defaults=True):
    """Natural log probabilities at one position: of the sampled (or prompt) token, and in `top` of the likeliest
    tokens, best first. The distribution is the model's, before temperature, penalties and filters. `rank`, of a
    prompt's token: 1 for the likeliest of all."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    rank: int = 0


class Failure(msgspec.Struct):
    """Why a request failed. `param` names the parameter at fault.

    | `kind` | HTTP status | meaning |
    | --- | --- | --- |
    | invalid | 400 | the request is wrong |
    | overloaded | 429 | the queue is full; `retry_after_s` says when another try may succeed |
    | internal | 500 | the replica failed |
    | unavailable | 503 | the machine has no memory or time for the request now |
    """

    kind: Literal["invalid", "overloaded", "internal", "unavailable"]
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class SchemaCheck(msgspec.Struct, omit_defaults=True, frozen=True):
    """How an output keeps to a schema that its grammar enforces in part.

    | field | meaning |
    | --- | --- |
    | `not_enforced` | keywords that the grammar leaves out, with their places |
    | `valid` | whether the whole output validates; None if it is not whole, or could not be judged |
    | `violation` | what is wrong, or why the output could not be judged |
    | `kept_tokens` | number of its tokens before the value that is wrong |
    | `narrowed` | keywords, with their places, of which the grammar does not have all values |
    """

    not_enforced: list[str]
    valid: bool | None = None
    violation: str | None = None
    kept_tokens: int = 0
    narrowed: list[str] = []


class Output(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """New tokens of one request, in order. The last output of a request has a `finish_reason`.

    A stop token (EOS or one of `stop_token_ids`) is the last of `token_ids`, with finish reason "stop" and
    `stop_token_id` set. The first output carries `cached_tokens`, `queue_s` (seconds) and `prompt_logprobs`, one
    for each position from `prompt_logprobs_start` on; that of position 0 is None.

    With drafts, an output may have several tokens: `num_accepted` of the `num_drafted` drafts were right.

    A pooled request has one output, with its `embedding` (little-endian float32) and finish reason "stop".

    Where a grammar enforces a part of its schema only, the first and the last output have a `check`.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: Literal["stop", "length", "error"] | None = None
    stop_token_id: int | None = None
    failure: Failure | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    embedding: bytes | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    check: SchemaCheck | None = None


class Outputs(msgspec.Struct, tag=True):
    """The outputs of one step for this router's requests; none of them says that the replica lives."""

    outputs: list[Output]


class CacheEvents(msgspec.Struct, tag=True, omit_defaults=True):
    """Changes of the radix tree, in order. `checkpoints` has those of checkpoints, each with the number of `events`
    before it. Only models with recurrent states have any. A router that does not know the field counts every prefix
    that is in the tree as cached.

    `first_seq` is the sequence number of the first of `events`; numbers ascend by one. `incarnation` identifies one
    start of the scheduler. Numbers of different incarnations cannot be compared.

    A snapshot comes in pieces, numbered by `piece` from 0, and no other events come between them. Piece 0 replaces all
    that the receiver knows of the tree. Each piece has changes of nodes that were told before, and more nodes. The last
    piece is `complete`; its `first_seq` is the number of the first event after the snapshot.
    """

    incarnation: str
    first_seq: int
    events: list[NodeEvent]
    page_size: int
    piece: int | None = None
    complete: bool = True
    checkpoints: list[tuple[int, CheckpointEvent]] = []

    @classmethod
    def of(
        cls,
        incarnation: str,
        first_seq: int,
        changes: Iterable[Event],
        page_size: int,
        piece: int | None = None,
        complete: bool = True,
    ) -> Self:
        """The message of `changes`, of nodes and of checkpoints."""
        events = list[NodeEvent]()
        checkpoints = list[tuple[int, CheckpointEvent]]()
        for change in changes:
            if isinstance(change, CheckpointEvent):
                checkpoints.append((len(events), change))
            else:
                events.append(change)
        return cls(incarnation, first_seq, events, page_size, piece, complete, checkpoints)

    def changes(self) -> Iterator[Event]:
        """All changes in their order."""
        told = 0
        for before, event in self.checkpoints:
            yield from self.events[told:before]
            yield event
            told = before
        yield from self.events[told:]


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Seconds that a replica takes for its work, linear in what a step holds. The defaults, an 8B model on an H200,
    stand for a replica that tells none: relative costs are what matters.

    | field | seconds of |
    | --- | --- |
    | `step_s` | a step, whatever it holds: each sequence that decodes gets one token in it |
    | `token_s` | a prompt token that is computed |
    | `product_s` | a prompt token's attention to one token before it |
    | `decode_s` | a decode |
    | `context_s` | a decode's attention to one token |
    | `full_s` | the longest step, with prompts and decodes |

    With a pipeline of n stages, a step is a round: as many micro-batches as there are stages.
    """

    step_s: float = 5e-3
    token_s: float = 2.4e-5
    product_s: float = 1e-9
    decode_s: float = 6e-6
    context_s: float = 3.5e-8
    full_s: float = 0.046


MAX_COUNTED_STEP_TOKENS = 1 << 14


class ReplicaLoad(msgspec.Struct, tag=True, kw_only=True):
    """The replica's current load, in tokens, and its counters since start.

    | field | meaning |
    | --- | --- |
    | `bookings_seen` | the highest `Generate.booking` received from the router that gets this message |
    | `peers_seen` | the same of all routers, by the names of their `Subscribe` |
    | `waiting_tokens` | prompt tokens of waiting and running requests that are neither computed nor cached |
    | `waiting_products` | for each of these tokens, the tokens before it in its prompt; their sum |
    | `context_tokens` | KV tokens that running requests hold |
    | `proposals` | how often drafts of one sequence were verified in a step, by drafter |
    | `drafted`, `accepted` | drafts that were verified, and those that were right, by drafter |
    | `length_tau` | Kendall's tau between predicted and real lengths of the newest outputs; None while unknown |
    | `length_ratio` | tokens of the newest outputs over those that were predicted; None while unknown |
    | `length_sample` | one of the outputs that have ended since the last load |
    | `stage_seconds` | for each pipeline stage, seconds by cause, with the names of `pipeline.meter` |
    | `expert_tokens` | with expert parallelism: pairs of a token and an expert that each rank has computed so far |
    | `expert_imbalance` | of the newest steps: pairs of the rank with the most, over the mean of the ranks |
    | `page_size` | tokens of a page of the cache; 0: the replica does not tell |
    | `kv_tokens_evicted` | cached tokens that gave their place to others, or were flushed |
    | `step_tokens` | steps by their tokens: at most 1, 2, 4 and so on up to `MAX_COUNTED_STEP_TOKENS`, then more |
    | `computed_tokens` | tokens of all steps, those of prompts that were computed again with them |
    | `checkpoints_total`, `checkpoints` | of recurrent states: how many there may be, and how many are cached |
    | `checkpoints_evicted` | those that gave their place to others |
    | `window_tokens_total`, `window_tokens_used` | tokens that layers with a window can hold in pages of their own, and
    those that running requests hold |
    | `max_loras` | adapters that may be on the device at once; None: the replica knows of no adapters |
    | `adapters_resident` | names of the adapters on the device |
    | `adapters_running`, `adapters_waiting` | names of the adapters of running and of waiting requests |
    | `adapter_loads` | adapters that were copied to the device |
    | `refused_routers` | routers that subscribed with a protocol number that does not work together with this one's |
    | `flushed` | ids of the `Flush` messages since the last load; None: the replica does not know them |
    | `costs` | as the replica's fitted cost models predict them now |
    """

    incarnation: str
    bookings_seen: int = 0
    peers_seen: dict[str, int] = {}
    waiting_tokens: int = 0
    waiting_products: int = 0
    context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0  # held by running requests
    kv_tokens_cached: int = 0  # in the tree, evictable
    kv_tokens_leased: int = 0  # in the tree, evicted last
    kv_tokens_evicted: int = 0
    page_size: int = 0
    checkpoints_total: int = 0
    checkpoints: int = 0
    checkpoints_evicted: int = 0
    window_tokens_total: int = 0
    window_tokens_used: int = 0
    max_loras: int | None = None
    adapters_resident: list[str] = []
    adapters_running: list[str] = []
    adapters_waiting: list[str] = []
    adapter_loads: int = 0
    steps: int = 0
    step_tokens: list[int] = []
    computed_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0
    failed: int = 0
    proposals: dict[str, int] = {}
    drafted: dict[str, int] = {}
    accepted: dict[str, int] = {}
    length_tau: float | None = None
    length_ratio: float | None = None
    length_sample: LengthSample | None = None
    stage_seconds: list[dict[str, float]] = []
    expert_tokens: list[int] = []
    expert_imbalance: float | None = None
    refused_routers: int = 0
    flushed: list[str] | None = None
    costs: StepCosts = StepCosts()


class Routers(msgspec.Struct, tag=True):
    """The routers that have subscribed to this replica, by name, with their addresses. A replica sends it to all of
    them when one comes or goes."""

    addresses: dict[str, str]


class Leaving(msgspec.Struct, tag=True):
    """The replica is being taken away, and wants no new requests. Those that it has go on, for `within_s` seconds at
    most; then a `Farewell` comes."""

    within_s: float


class Farewell(msgspec.Struct, tag=True):
    """The replica's last message: it ends now, and its streams are to go on elsewhere. `message` is for people.

    | `reason` | meaning |
    | --- | --- |
    | hung | work did not get on; `message` says which rank hangs |
    | drained | it was taken away, and its streams have ended or took too long |
    """

    reason: Literal["hung", "drained"]
    message: str


FromReplica = Hello | Outputs | CacheEvents | ReplicaLoad | UsageReport | Routers | Leaving | Farewell | AdapterChange

_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_replica = msgspec.msgpack.Decoder(FromReplica)


def work_together(one: int, other: int) -> bool:
    """Whether a router and a replica with these protocol numbers understand each other: the same, or neighbours."""
    return abs(one - other) <= 1


def encode(message: FromRouter | FromReplica) -> bytes:
    """The message as one ZeroMQ frame."""
    return _encoder.encode(message)


def decode_from_router(frame: bytes) -> FromRouter:
    """The message in a frame. Raises msgspec.DecodeError (or ValidationError) for a frame that is not a message."""
    return _from_router.decode(frame)


def decode_from_replica(frame: bytes) -> FromReplica:
    """The message in a frame. Raises msgspec.DecodeError (or ValidationError) for a frame that is not a message."""
    return _from_replica.decode(frame)
