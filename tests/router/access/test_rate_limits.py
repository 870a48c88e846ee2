"""Limits of clients: what is refused, for how long, and over several routers."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from radix.salt import salted
from router.access.key_file import ANYBODY, ApiClient
from router.access.rate_limits import REPEAT_S, TRUST_S, Kind, RateLimits, Ticket, duration
from router.config import RouterConfig
from router.metrics.metrics import Metrics
from router.models import Models
from router.wire.errors import ApiError
from tests.clock import Clock


class Router:
    """The limits of a router, on a clock that tests share."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.metrics = Metrics()
        self.limits = RateLimits(self.metrics, clock)

    def enter(self, client: ApiClient) -> Ticket:
        return self.limits.enter(client)

    def refusal(self, client: ApiClient) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.limits.enter(client)
        assert caught.value.status == 429 and caught.value.code == "rate_limit_exceeded"
        assert client.name in caught.value.message
        return caught.value

    def count(self, name: str) -> float:
        lines = self.metrics.page().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


@pytest.fixture
def router(clock: Clock) -> Router:
    return Router(clock)


def test_a_client_without_limits_is_counted_and_never_refused(router: Router) -> None:
    for client in (ANYBODY, ApiClient("t", "free")):
        for _ in range(100):
            ticket = router.enter(client)
            ticket.add_tokens(prompt=1000)
        assert ticket.headers() == {}
    assert router.count('shoal_client_requests_total{client="free",result="admitted"}') == 100
    assert router.limits.report() is None


def test_requests_flow_off_evenly(router: Router, clock: Clock) -> None:
    client = ApiClient("t", "a", requests_per_minute=6)
    for left in range(5, -1, -1):
        headers = router.enter(client).headers()
        assert headers["x-ratelimit-remaining-requests"] == str(left)
    assert headers["x-ratelimit-limit-requests"] == "6" and headers["x-ratelimit-reset-requests"] == "1m0s"
    refused = router.refusal(client)
    assert refused.headers is not None and refused.headers["Retry-After"] == "10"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0" and "6 requests" in refused.message
    clock.now_s += 10
    router.enter(client)
    assert router.refusal(client).headers["Retry-After"] == "10"  # type: ignore[index]
    assert router.count('shoal_client_requests_total{client="a",result="requests"}') == 2
    clock.now_s += 60
    assert router.enter(client).headers()["x-ratelimit-remaining-requests"] == "5"


def test_tokens_count_when_they_are_used(router: Router, clock: Clock) -> None:
    """A prompt longer than the limit is answered, and paid for by those after it."""
    client = ApiClient("t", "a", tokens_per_minute=60)
    ticket = router.enter(client)
    ticket.add_tokens(prompt=80)
    ticket.add_tokens(output=10)
    assert ticket.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert router.refusal(client).headers["Retry-After"] == "30"  # type: ignore[index]
    ticket.end()
    ticket.end()
    assert router.count('shoal_client_tokens_total{client="a",kind="prompt"}') == 80
    assert router.count('shoal_client_tokens_total{client="a",kind="output"}') == 10
    clock.now_s += 40
    assert router.limits.report() is not None
    clock.now_s += 49
    assert router.limits.report() is None
    assert router.enter(client).headers()["x-ratelimit-remaining-tokens"] == "59"  # a debt outlives a minute


def test_requests_at_once(router: Router) -> None:
    client = ApiClient("t", "a", concurrent_requests=2)
    first, second = router.enter(client), router.enter(client)
    assert "2 requests" in router.refusal(client).message and second.headers() == {}
    first.end()
    first.end()  # counts once
    router.enter(client)
    router.refusal(client)
    router.enter(ApiClient("other", "b", concurrent_requests=2))


def test_the_limit_that_takes_longest_is_told(router: Router) -> None:
    client = ApiClient("t", "a", requests_per_minute=1, tokens_per_minute=60, concurrent_requests=1)
    router.enter(client).add_tokens(prompt=180)
    assert router.refusal(client).headers["Retry-After"] == "120"  # type: ignore[index]


def test_a_lower_limit_holds_at_once(router: Router) -> None:
    for _ in range(5):
        router.enter(ApiClient("t", "a", requests_per_minute=100))
    router.refusal(ApiClient("t", "a", requests_per_minute=5))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0ms"), (0.0121, "13ms"), (0.9999, "1000ms"), (1, "1s"), (2.41, "2.5s"), (59.99, "1m0s"), (90, "1m30s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- over several routers


def tell(source: Router, *others: Router) -> None:
    report = source.limits.report()
    assert report is not None
    for other in others:
        other.limits.hear(report)


def test_limits_hold_over_all_routers(clock: Clock) -> None:
    one, other = Router(clock), Router(clock)
    client = ApiClient("t", "a", requests_per_minute=6, tokens_per_minute=60)
    clock.now_s += 1000
    for _ in range(3):
        one.enter(client).add_tokens(prompt=10)
    tell(one, other)
    headers = other.enter(client).headers()
    assert headers["x-ratelimit-remaining-requests"] == "2" and headers["x-ratelimit-remaining-tokens"] == "30"
    tell(other, one)
    assert one.enter(client).headers()["x-ratelimit-remaining-requests"] == "1"
    clock.now_s += 1000  # what was heard long ago is forgotten, what is heard now is not
    for _ in range(6):
        one.enter(client)
    tell(one, other)
    other.refusal(client)


def test_requests_at_once_are_counted_over_all_routers(clock: Clock) -> None:
    one, other = Router(clock), Router(clock)
    client = ApiClient("t", "a", concurrent_requests=2)
    tickets = [one.enter(client), one.enter(client)]
    tell(one, other)
    other.refusal(client)
    for _ in range(10):  # those that run are told again and again
        clock.now_s += REPEAT_S
        tell(one, other)
    other.refusal(client)
    tickets[0].end()
    tell(one, other)
    other.enter(client)
    clock.now_s += TRUST_S  # the router is gone, and with it its requests
    other.enter(client)


def test_nothing_is_told_twice(router: Router, clock: Clock) -> None:
    client = ApiClient("t", "a", requests_per_minute=6)
    ticket = router.enter(client)
    report = router.limits.report()
    assert report is not None and report.clients["t"].requests == 1 and report.clients["t"].running == 1
    assert router.limits.report() is None
    ticket.end()
    report = router.limits.report()
    assert report is not None and report.clients["t"].requests == 0 and report.clients["t"].running == 0
    clock.now_s += 100
    assert router.limits.report() is None and not router.limits._used


# ---------------------------------------------------------------- through the server


@pytest.fixture
def keys(tmp_path: Path) -> RouterConfig:
    (tmp_path / "keys").write_text(
        "keys:\n"
        "- {name: batch, key: sk-batch, max_priority: -2, concurrent_requests: 1}\n"
        "- {name: chat, key: sk-chat, max_priority: 5, requests_per_minute: 3, tokens_per_minute: 1000}\n"
        "- {name: free, key: sk-free}\n"
    )
    return RouterConfig(api_key_file=tmp_path / "keys")


def ask(client: OpenAI, **fields: Any) -> Any:
    return client.completions.with_raw_response.create(**{"model": "tiny", "prompt": "x", "max_tokens": 3} | fields)


def test_priorities_end_where_the_key_says(make_stack: Any, make_replica: Any, keys: RouterConfig) -> None:
    fake = make_replica()
    stack = make_stack(fake, config=keys)
    batch, chat, free = (stack.client.with_options(api_key=f"sk-{name}") for name in ("batch", "chat", "free"))
    for client, priority, sent in ((batch, None, -2), (batch, -7, -7), (chat, 5, 5), (chat, None, 0), (free, 0, 0)):
        ask(client, extra_body={} if priority is None else {"priority": priority})
        assert fake.requests()[-1].priority == sent
    for client, priority in ((batch, 0), (chat, 6), (free, 1)):
        with pytest.raises(openai.BadRequestError) as refused:
            ask(client, extra_body={"priority": priority})
        assert refused.value.param == "priority"
    batch.embeddings.create(model="tiny", input="x")
    assert fake.requests()[-1].priority == -2
    page = httpx.get(f"{stack.url}/openapi.json").json()
    assert page["components"]["schemas"]["ChatRequest"]["properties"]["priority"]["anyOf"][0]["maximum"] == 5


def test_replicas_hear_whose_request_it_is(make_stack: Any, make_replica: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        "keys:\n- {name: one, key: sk-one, weight: 2, by_user: true}\n- {name: other, key: sk-other}\n"
    )
    fake = make_replica()
    stack = make_stack(fake, config=RouterConfig(api_key_file=tmp_path / "keys"))
    one, other = (stack.client.with_options(api_key=f"sk-{name}") for name in ("one", "other"))
    ask(one)
    ask(one, user="ann")
    one.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], user="bob", extra_body={"safety_identifier": "ann"}
    )
    one.responses.create(model="tiny", input="x", safety_identifier="bob")
    said = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    sent = said | {"metadata": {"user_id": "bob"}}
    assert httpx.post(f"{stack.url}/v1/messages", json=sent, headers={"x-api-key": "sk-one"}).status_code == 200
    ask(other, user="ann")
    plain, ann, again, bob, also, last = fake.requests()
    assert plain.user == "" and plain.weight == 2 and plain.client == ann.client != last.client
    assert ann.user == again.user != bob.user == also.user and "ann" not in ann.user
    assert (last.user, last.weight) == ("", 1)


def test_caches_are_kept_apart(make_stack: Any, make_replica: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(
        "keys:\n- {name: one, key: sk-one, own_cache: true}\n- {name: two, key: sk-two, own_cache: true}\n"
        "- {name: three, key: sk-three}\n- {name: four, key: sk-four}\n"
    )
    fake = make_replica()
    stack = make_stack(fake, config=RouterConfig(api_key_file=tmp_path / "keys"))
    salts, keys = [], []
    for name, salt in (
        *(("one", None), ("one", None), ("two", None), ("one", "s"), ("two", "s")),
        *(("three", None), ("four", None), ("three", "s"), ("four", "s"), ("four", "t")),
    ):
        ask(stack.client.with_options(api_key=f"sk-{name}"), extra_body={} if salt is None else {"cache_salt": salt})
        request, (_, placed, _) = fake.requests()[-1], stack.placer.placed[-1]
        salts.append(request.cache_salt)
        keys.append(tuple(placed))
        # The router looks for the prefix where the replica keeps it, and the model gets the prompt itself.
        assert placed == salted(request.prompt_ids, request.cache_salt).tolist()
        assert request.prompt_ids == stack.tokenizer.encode("x")
    one, again, two, one_s, two_s, three, four, three_s, four_s, four_t = salts
    assert one == again and three == four == "" and three_s == four_s
    assert len({one, two, one_s, two_s, three, three_s, four_t}) == 7 == len(set(keys))
    stack.client.with_options(api_key="sk-one").embeddings.create(model="tiny", input="x")
    assert fake.requests()[-1].cache_salt == one
    with pytest.raises(openai.BadRequestError) as refused:
        ask(stack.client.with_options(api_key="sk-one"), extra_body={"cache_salt": ""})
    assert refused.value.param == "cache_salt"


def test_answers_and_refusals_tell_what_is_left(make_stack: Any, make_replica: Any, keys: RouterConfig) -> None:
    stack = make_stack(make_replica(), config=keys)
    chat = stack.client.with_options(api_key="sk-chat")
    first = ask(chat)
    assert first.headers["x-ratelimit-limit-requests"] == "3" and first.headers["x-ratelimit-remaining-requests"] == "2"
    used = first.parse().usage.total_tokens
    assert first.headers["x-ratelimit-remaining-tokens"] == str(1000 - used)
    with pytest.raises(openai.BadRequestError) as wrong:
        ask(chat, max_tokens=-1)
    assert wrong.value.response.headers["x-ratelimit-remaining-requests"] == "1"
    for event in chat.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True):
        assert event
    with pytest.raises(openai.RateLimitError) as refused:
        ask(chat)
    assert refused.value.code == "rate_limit_exceeded" and refused.value.type == "rate_limit_error"
    headers = refused.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 20 and headers["x-ratelimit-remaining-requests"] == "0"
    assert headers["x-request-id"]
    anthropic = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{stack.url}/v1/messages", json=anthropic, headers={"x-api-key": "sk-chat"})
    assert answer.status_code == 429 and answer.json()["error"]["type"] == "rate_limit_error"
    assert "x-ratelimit-limit-requests" not in ask(stack.client.with_options(api_key="sk-free")).headers
    assert chat.models.list().data  # lists are not limited
    assert stack.metric('shoal_client_requests_total{client="chat",result="requests"') == 2
    assert stack.metric('shoal_client_requests_total{client="chat",result="admitted"') == 3


def test_a_request_counts_until_its_last_token(make_stack: Any, make_replica: Any, keys: RouterConfig) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, config=keys)
    batch = stack.client.with_options(api_key="sk-batch")
    fake.allow(1)
    with batch.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="at once"):
            ask(batch)
    # Its client has gone:
    stack.until(lambda: stack.metric('shoal_client_tokens_total{client="batch",kind="prompt"') > 0)
    fake.allow(None)
    ask(batch)
    made = batch.responses.create(model="tiny", input="x", max_output_tokens=5)
    assert made.status == "incomplete"
    ask(batch)


def test_a_response_in_the_background_counts_while_it_runs(
    make_stack: Any, make_replica: Any, keys: RouterConfig, tmp_path: Path
) -> None:
    fake = make_replica().hold()
    stack = make_stack(fake, config=keys.model_copy(update={"response_store_dir": tmp_path / "responses"}))
    batch = stack.client.with_options(api_key="sk-batch")
    made = batch.responses.create(model="tiny", input="x", background=True)
    with pytest.raises(openai.RateLimitError, match="at once"):
        ask(batch)
    fake.allow(None)
    stack.idle()
    stack.until(lambda: stack.metric('shoal_client_tokens_total{client="batch",kind="output"') > 0)
    ask(batch)
    assert batch.responses.retrieve(made.id).status == "completed"


def test_routers_hear_of_each_other_through_a_replica(
    make_service: Any, serve: Any, make_replica: Any, keys: RouterConfig
) -> None:
    fake = make_replica().hold()
    doors = []
    for _ in range(2):
        metrics = Metrics()
        models = Models([make_service(metrics, fake, config=keys)], metrics, keys)
        doors.append((models, serve(models)))
    (_, first), (models, second) = doors
    one, other = (server.client().with_options(api_key="sk-batch") for server in (first, second))
    assert models._exchange is not None
    limits = models._exchange._limits

    async def heard(running: int) -> None:
        # A client whose counts are empty is forgotten, perhaps before the next look.
        while sum(told[0] for used in limits._used.values() for told in used.others.values()) != running:
            await asyncio.sleep(0.002)

    fake.allow(1)
    with one.completions.create(model="tiny", prompt="x", max_tokens=5, stream=True) as stream:
        next(iter(stream))
        second.do(heard(1))
        with pytest.raises(openai.RateLimitError, match="at once"):
            ask(other)
    second.do(heard(0))
    fake.allow(None)
    ask(other)


# ---------------------------------------------------------------- what generates nothing, or more than one sequence


@pytest.mark.parametrize("kind", Kind)
def test_what_requests_count_against(router: Router, kind: Kind) -> None:
    client = ApiClient("t", "a", requests_per_minute=3, tokens_per_minute=100, concurrent_requests=1)
    ticket = router.limits.enter(client, kind)
    assert ticket.headers()["x-ratelimit-remaining-requests"] == "2"
    ticket.add_read(33)
    assert ticket.headers()["x-ratelimit-remaining-tokens"] == "97"
    if kind in (Kind.GENERATES, Kind.TOKENISES, Kind.FOLLOWS):
        with pytest.raises(ApiError):
            router.limits.enter(client, kind)
    if kind not in (Kind.GENERATES, Kind.TOKENISES):
        router.enter(client).end()
    for _ in range(2):
        ticket.end()
    router.limits.enter(client, kind).end()
    router.limits.used(client).tokens.add(100, 100, 100.0)
    router.limits.used(client).requests.add(-1, 3, 100.0)
    for other in Kind:
        if other in (Kind.GENERATES, Kind.TOKENISES):
            with pytest.raises(ApiError):
                router.limits.enter(client, other)
    router.limits.used(client).requests.add(3, 3, 100.0)
    for other in Kind:
        if other is Kind.ENDS:
            router.limits.enter(client, other).end()
        else:
            with pytest.raises(ApiError):
                router.limits.enter(client, other)


MESSAGES = [{"role": "user", "content": "x y z"}]
READS = {
    "/tokenize": {"model": "tiny", "prompt": "x " * 200},
    "/detokenize": {"model": "tiny", "tokens": [5] * 200},
    "/tokenizer_info": None,
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "x " * 200}]},
    "/v1/responses/unknown": None,
    "/v1/responses/unknown?stream=true": None,
    "/v1/responses/unknown/input_items": None,
}


@pytest.mark.parametrize("path", READS)
def test_a_request_without_a_replica_is_limited(
    make_stack: Any, make_replica: Any, keys: RouterConfig, path: str
) -> None:
    stack = make_stack(make_replica(), config=keys)
    body, headers = READS[path], {"x-api-key": "sk-chat"}

    def read() -> httpx.Response:
        url = f"{stack.url}{path}"
        return httpx.get(url, headers=headers) if body is None else httpx.post(url, json=body, headers=headers)

    answers = [read() for _ in range(4)]
    assert [answer.status_code == 429 for answer in answers] == [False, False, False, True]
    assert answers[-1].headers["retry-after"] and answers[2].headers["x-ratelimit-remaining-requests"] == "0"
    left = int(answers[2].headers["x-ratelimit-remaining-tokens"])
    assert left == 1000 if body is None else 800 < left < 1000
    gone = httpx.delete(f"{stack.url}/v1/responses/unknown", headers=headers)
    assert gone.status_code == 404  # what ends something is never refused


def test_text_that_is_computed_ahead_counts(make_stack: Any, make_replica: Any, keys: RouterConfig) -> None:
    fake = make_replica()
    stack = make_stack(fake, config=keys)
    headers, then = {"x-api-key": "sk-chat"}, " Next:" * 150
    body = {"model": "tiny", "prompt": "Hello", "max_tokens": 1, "user": "ann"}
    for number in range(2):
        program = {"id": f"p{number}", "branch": "b", "then": then}
        answer = httpx.post(f"{stack.url}/v1/completions", json=body | {"program": program}, headers=headers)
        assert answer.status_code == 200
        fake.wait_for(lambda number=number: len(fake.requests()) == 2 * number + 2)
    asked, ahead = fake.requests()[:2]
    assert ahead.client == asked.client != "" and ahead.weight == asked.weight
    length = len(stack.tokenizer.encode(then))
    assert length > 200
    used = 2 * (length + len(asked.prompt_ids) + 1)
    stack.until(lambda: stack.metric('shoal_client_tokens_total{client="chat",kind="prompt"') >= 2 * length)
    answer = httpx.post(f"{stack.url}/tokenize", json={"model": "tiny", "prompt": "x"}, headers=headers)
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) <= max(0, 1000 - used + 40)


def test_each_choice_counts_its_prompt(make_stack: Any, make_replica: Any, keys: RouterConfig) -> None:
    """As a request of its own would. The usage counts it once."""
    stack = make_stack(make_replica(), config=keys)
    answer = ask(stack.client.with_options(api_key="sk-chat"), prompt="x " * 40, n=4)
    usage = answer.parse().usage
    left = int(answer.headers.get("x-ratelimit-remaining-tokens"))
    used = 4 * usage.prompt_tokens + usage.completion_tokens
    assert used - 2 * usage.prompt_tokens < 1000 - left <= used  # 17 tokens flow off in a second meanwhile
