"""What a router and a replica say to each other over ZeroMQ, as msgspec structs in MessagePack.

A replica's scheduler binds one ROUTER socket; every router process connects a DEALER socket to it. One frame is one
message (`encode`, `decode_from_router`, `decode_from_replica`). Delivery is ordered and reliable while both live; when
the connection breaks, the replica aborts what that router had asked for, and the router resumes it elsewhere.
"""

from typing import Literal

import msgspec

from radix.events import Event


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the output must match. `text` is a JSON schema, a regular expression, a GBNF grammar, a JSON list of
    strings (`choice`), or empty (`json_object`)."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf"]
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """How the next token is chosen and when a request ends. Already validated by the router.

    Temperature 0 is greedy. `top_k` 0 and `top_p` 1 switch those filters off. `seed` None draws one at random.
    `logprobs` None: none; k >= 0: that of the chosen token and of the k likeliest. `prompt_logprobs` likewise for the
    prompt's tokens (for `echo`). Stop strings are the router's: it sees text.
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
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None


# ---------------------------------------------------------------- router to replica


class Generate(msgspec.Struct, tag=True, kw_only=True, omit_defaults=True):
    """Run one sequence. `output_ids` are tokens that another replica already produced for it: they count as output
    (penalties, `max_tokens`, seeds, grammar), are not sent again, and the sequence goes on after them.

    Higher `priority` runs first. `booking` numbers this router's requests to this replica from 1 without gaps: the
    replica reports the highest one seen in `Load`, so the router knows which of its bookings a load already counts.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: list[int] = []
    priority: int = 0
    booking: int = 0


class Abort(msgspec.Struct, tag=True):
    """Stop these requests and free their pages at once. Unknown ids are ignored. No answer follows."""

    request_ids: list[str]


class Subscribe(msgspec.Struct, tag=True):
    """Send me `CacheEvents` and `Load` from now on, beginning with a snapshot of the tree. Also sent again by a
    router that saw a gap in the sequence numbers."""


FromRouter = Generate | Abort | Subscribe

# ---------------------------------------------------------------- replica to router


class TokenLogprobs(msgspec.Struct, omit_defaults=True):
    """Natural logs of probabilities of one position: the chosen (or given) token's, and the likeliest, best first.
    They are of the model's distribution before temperature, penalties and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class Failure(msgspec.Struct):
    """Why a request failed. `param` names the parameter at fault; `kind` decides the HTTP status: invalid is 400,
    overloaded 429, internal 500."""

    kind: Literal["invalid", "overloaded", "internal"]
    message: str
    param: str | None = None


class Output(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """New tokens of one request, in order. The last one of a request has a `finish_reason`.

    A stop token (EOS or of `stop_token_ids`) is in `token_ids` as the last one, with finish reason "stop" and
    `stop_token_id` set. `cached_tokens`, `queue_s` and `prompt_logprobs` (None for the first position) come with the
    first output.
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


class Outputs(msgspec.Struct, tag=True):
    """What one step produced for this router's requests."""

    outputs: list[Output]


class CacheEvents(msgspec.Struct, tag=True):
    """Changes of the radix tree in order. `first_seq` numbers the first of `events`, the next has one more, and so on;
    a snapshot replaces all that was known and `first_seq` is the number of the next event to come.

    `incarnation` is new with every start of the scheduler: numbers of different incarnations do not compare.
    """

    incarnation: str
    first_seq: int
    events: list[Event]
    page_size: int
    snapshot: bool = False


class Load(msgspec.Struct, tag=True, kw_only=True):
    """What the replica carries now, in tokens, and its counters since start.

    `waiting_tokens`: prompt tokens not yet computed and not in the cache, of waiting and running requests.
    `context_tokens`: KV tokens that running requests hold. `stage_seconds`: of each pipeline stage, what it spent its
    time on, as `pipeline.meter` names it. `bookings_seen`: the highest `Generate.booking` received
    from the router that gets this message.
    """

    incarnation: str
    bookings_seen: int = 0
    waiting_tokens: int = 0
    context_tokens: int = 0
    running: int = 0
    waiting: int = 0
    kv_tokens_total: int = 0
    kv_tokens_used: int = 0  # held by running requests
    kv_tokens_cached: int = 0  # in the tree, evictable
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    aborts: int = 0
    finished: int = 0
    failed: int = 0
    stage_seconds: list[dict[str, float]] = []


FromReplica = Outputs | CacheEvents | Load

_encoder = msgspec.msgpack.Encoder()
_from_router = msgspec.msgpack.Decoder(FromRouter)
_from_replica = msgspec.msgpack.Decoder(FromReplica)


def encode(message: FromRouter | FromReplica) -> bytes:
    """One ZeroMQ frame."""
    return _encoder.encode(message)


def decode_from_router(frame: bytes) -> FromRouter:
    """Raises msgspec.DecodeError (or ValidationError) on a frame that is no message."""
    return _from_router.decode(frame)


def decode_from_replica(frame: bytes) -> FromReplica:
    """Raises msgspec.DecodeError (or ValidationError) on a frame that is no message."""
    return _from_replica.decode(frame)
