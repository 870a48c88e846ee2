import random
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from radix.events import Dropped, Event, Removed, Saved, Stored
from radix.node import pack
from radix.pages import PagePool
from radix.snapshot import SnapshotWalk
from radix.tree import Tree
from router.fleet.fleet import LENGTH_SAMPLES, PLACEMENTS, Fleet
from router.fleet.known_replica import PACE_S
from router.fleet.optimistic_prefixes import EXPIRES_S
from router.fleet.placement import rank
from router.programs import Home
from router.wire.errors import NoReplica
from tests.clock import Clock
from worker.messages import CacheEvents, LengthSample, ReplicaLoad, decode_from_replica, encode

PROMPT = list(range(100, 164))


class Publisher:
    """A replica's tree and what it tells of it."""

    def __init__(self, incarnation: str = "first", page_size: int = 4) -> None:
        self.incarnation = incarnation
        self.pool = PagePool(256, page_size)
        self.pending: list[Event] = []
        self.next_seq = 1
        self.tree = Tree(page_size, self.pool, on_event=self.pending.append)

    def store(self, tokens: list[int]) -> None:
        match = self.tree.match(tokens)
        fresh = self.pool.allocate(len(tokens) // self.tree.page_size - len(match.pages))
        self.tree.insert(tokens, np.concatenate([match.pages, fresh]))

    def events(self) -> CacheEvents:
        events, self.pending[:] = list(self.pending), []
        first, self.next_seq = self.next_seq, self.next_seq + len(events)
        return CacheEvents(self.incarnation, first, events, self.tree.page_size)

    def snapshot(self) -> CacheEvents:
        self.events()
        return CacheEvents(self.incarnation, self.next_seq, self.tree.snapshot(), self.tree.page_size, piece=0)


def load(bookings_seen: int = 0, **figures: Any) -> ReplicaLoad:
    return ReplicaLoad(incarnation="first", bookings_seen=bookings_seen, **figures)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def fleet(clock):
    fleet = Fleet("cache_aware", clock, turn=0)
    for replica_id in ("a", "b", "c"):
        fleet.join(replica_id)
    return fleet


def view(fleet: Fleet, replica_id: str):
    return next(view for view in fleet.snapshot() if view.replica_id == replica_id)


# ---------------------------------------------------------------- caches


def test_goes_where_the_prompt_is_cached_and_says_how_much(fleet):
    publisher = Publisher()
    publisher.store(PROMPT[:40])
    assert fleet.apply_events("b", publisher.snapshot())
    booking = fleet.place("r", PROMPT, ["a", "b", "c"])
    assert (booking.replica_id, booking.cached_tokens, booking.number) == ("b", 40, 1)
    assert fleet.booking("r") == booking
    assert view(fleet, "b").indexed_tokens == 40
    assert view(fleet, "a").indexed_tokens is None


def test_the_last_token_of_a_prompt_is_never_counted_as_cached(fleet):
    publisher = Publisher()
    publisher.store(PROMPT)
    fleet.apply_events("b", publisher.snapshot())
    assert fleet.place("r", PROMPT, ["b"]).cached_tokens == 63


def test_follows_events_after_a_snapshot(fleet):
    publisher = Publisher()
    assert fleet.apply_events("b", publisher.snapshot())
    publisher.store(PROMPT)
    publisher.store([*PROMPT[:32], *PROMPT[:32]])
    assert fleet.apply_events("b", publisher.events())
    assert view(fleet, "b").indexed_tokens == 96
    publisher.tree.evict(2)
    assert fleet.apply_events("b", publisher.events())
    assert view(fleet, "b").indexed_tokens == 88


def spoil_by_gap(publisher: Publisher) -> CacheEvents:
    publisher.store(PROMPT[:4])
    publisher.events()
    publisher.store(PROMPT)
    return publisher.events()


def spoil_by_restart(publisher: Publisher) -> CacheEvents:
    return CacheEvents("second", publisher.next_seq, [Stored(1, 0, pack(PROMPT))], 4)


def spoil_by_another_page_size(publisher: Publisher) -> CacheEvents:
    return CacheEvents("first", publisher.next_seq, [Stored(1, 0, pack(PROMPT))], 8)


def spoil_by_nonsense(publisher: Publisher) -> CacheEvents:
    return CacheEvents("first", publisher.next_seq, [Removed(77)], 4)


@pytest.mark.parametrize("spoil", [spoil_by_gap, spoil_by_restart, spoil_by_another_page_size, spoil_by_nonsense])
def test_what_does_not_follow_drops_the_cache_and_asks_once_for_a_snapshot(fleet, spoil):
    publisher = Publisher()
    fleet.apply_events("b", publisher.snapshot())
    assert not fleet.apply_events("b", spoil(publisher))
    assert view(fleet, "b").indexed_tokens is None
    publisher.store([1, 2, 3, 4])
    assert fleet.apply_events("b", publisher.events()), "a snapshot is on its way: do not ask again"
    assert view(fleet, "b").indexed_tokens is None
    assert fleet.apply_events("b", publisher.snapshot())
    assert view(fleet, "b").indexed_tokens == publisher.tree.num_cached * 4


def test_a_snapshot_of_a_new_incarnation_replaces_the_old(fleet):
    old, new = Publisher(), Publisher("second")
    old.store(PROMPT)
    fleet.apply_events("b", old.snapshot())
    fleet.apply_events("b", new.snapshot())
    assert view(fleet, "b").indexed_tokens == 0
    new.store(PROMPT[:8])
    assert fleet.apply_events("b", new.events())
    assert view(fleet, "b").indexed_tokens == 8


def test_a_snapshot_that_contradicts_itself_counts_as_no_cache(fleet, caplog):
    assert fleet.apply_events("b", CacheEvents("first", 5, [Stored(2, 1, pack(PROMPT))], 4, piece=0))
    assert view(fleet, "b").indexed_tokens is None
    assert [(record.levelname, record.replica) for record in caplog.records] == [("ERROR", "b")]
    assert fleet.place("r", PROMPT, ["b"]).cached_tokens == 0


def test_a_snapshot_in_pieces_counts_as_it_comes_while_the_tree_changes(fleet):
    publisher = Publisher()
    publisher.store(PROMPT)
    publisher.store([7] * 32)
    publisher.tree.match([7] * 16)  # splits
    publisher.events()
    walk = SnapshotWalk(publisher.tree.root)

    def piece(number: int, most_nodes: int) -> CacheEvents:
        events = [event for event in publisher.events().events if walk.follows(event)]
        events += walk.piece(most_nodes, 10**6)
        return CacheEvents("first", publisher.next_seq, events, 4, piece=number, complete=walk.is_done)

    assert fleet.apply_events("b", piece(0, 1))
    known = view(fleet, "b").indexed_tokens
    assert 0 < known < 96
    publisher.store([*PROMPT[:32], *range(32)])
    publisher.tree.evict(1)
    last = piece(1, 10)
    assert last.complete and fleet.apply_events("b", last)
    assert view(fleet, "b").indexed_tokens == publisher.tree.num_cached * 4
    publisher.store([8] * 8)
    assert fleet.apply_events("b", publisher.events())
    assert view(fleet, "b").indexed_tokens == publisher.tree.num_cached * 4
    assert fleet.place("r", [7] * 32, ["b"]).cached_tokens in (28, 31)


def test_a_lost_piece_or_events_between_pieces_are_a_gap(fleet):
    begin = CacheEvents("first", 5, [Stored(1, 0, pack(PROMPT))], 4, piece=0, complete=False)
    for wrong in (CacheEvents("first", 5, [], 4, piece=2), CacheEvents("first", 5, [], 4)):
        assert fleet.apply_events("b", begin)
        assert not fleet.apply_events("b", wrong)
        assert view(fleet, "b").indexed_tokens is None
    assert fleet.apply_events("b", CacheEvents("first", 5, [], 4, piece=1)), "a snapshot is on its way"
    assert fleet.apply_events("b", begin)
    assert fleet.apply_events("b", CacheEvents("first", 5, [], 4, piece=1))
    assert view(fleet, "b").indexed_tokens == 64


def test_replicas_with_pages_of_other_sizes_are_placed_side_by_side(fleet):
    small, large = Publisher(page_size=4), Publisher(page_size=16)
    small.store(PROMPT[:20])
    large.store(PROMPT[:32])
    fleet.apply_events("a", small.snapshot())
    fleet.apply_events("b", large.snapshot())
    fleet.apply_events("c", CacheEvents("first", 1, [], 100, piece=0))  # no page has that size
    assert [fleet.place("r", PROMPT[:40], name).cached_tokens for name in "ab"] == [20, 32]
    assert [view.indexed_tokens for view in fleet.snapshot()] == [20, 32, None]


def test_a_cache_that_is_gone_does_not_take_memory_for_ever(fleet):
    publisher = Publisher()
    for token in range(40):
        publisher.store([token] * 4)
    for _ in range(30):
        fleet.apply_events("b", publisher.snapshot())
    (index,) = fleet._indexes.values()
    assert index.num_slots <= 3
    fleet.leave("b")
    for _ in range(3):
        fleet.apply_events("a", CacheEvents("first", 1, [], 4))
    assert index.num_nodes == 0


def test_a_burst_with_one_new_prefix_stays_together_for_a_while(fleet, clock):
    first = fleet.place("r0", [*PROMPT * 8, 1], "abc")
    fleet.release("r0")
    for number in range(1, 4):
        booking = fleet.place(f"r{number}", [*PROMPT * 8, number * 7], "abc")
        fleet.release(f"r{number}")
        assert (booking.replica_id, booking.cached_tokens) == (first.replica_id, 512)
    clock.now_s = EXPIRES_S
    assert fleet.place("late", [*PROMPT * 8, 99], "abc").cached_tokens == 0


def test_events_confirm_what_was_expected(fleet, clock):
    publisher = Publisher()
    fleet.apply_events("a", publisher.snapshot())
    assert fleet.place("r0", PROMPT, "a").cached_tokens == 0
    publisher.store(PROMPT[:60])
    fleet.apply_events("a", publisher.events())
    clock.now_s = 10 * EXPIRES_S
    assert fleet.place("r1", PROMPT, "a").cached_tokens == 60


# ---------------------------------------------------------------- load and bookings


def test_a_booking_counts_from_the_moment_it_is_made_until_the_replica_counts_it(fleet):
    fleet.apply_load("a", load(waiting_tokens=10, context_tokens=7))
    fleet.place("r", PROMPT, ["a"])
    assert (view(fleet, "a").waiting_tokens, view(fleet, "a").context_tokens) == (74, 7)
    fleet.first_token("r")
    assert (view(fleet, "a").waiting_tokens, view(fleet, "a").context_tokens) == (10, 71)
    fleet.apply_load("a", load(bookings_seen=1, context_tokens=80))
    assert (view(fleet, "a").waiting_tokens, view(fleet, "a").context_tokens) == (0, 80)
    assert view(fleet, "a").bookings == 1
    fleet.release("r")
    assert view(fleet, "a").bookings == 0


def test_a_load_that_does_not_count_the_youngest_bookings_leaves_them_added(fleet):
    for number in range(1, 4):
        assert fleet.place(f"r{number}", [number] * 10, ["a"]).number == number
    fleet.apply_load("a", load(bookings_seen=2, waiting_tokens=20))
    assert view(fleet, "a").waiting_tokens == 30
    fleet.release("r3")
    assert view(fleet, "a").waiting_tokens == 20


def test_the_newest_outputs_of_all_replicas_are_kept_for_one_that_comes(fleet):
    for number in range(LENGTH_SAMPLES + 1):
        fleet.apply_load("ab"[number % 2], load(length_sample=LengthSample(b"ab", number, False)))
    fleet.apply_load("a", load())
    assert [sample.tokens for sample in fleet.length_samples()] == list(range(1, LENGTH_SAMPLES + 1))


def test_a_burst_of_different_prompts_spreads_before_any_load_is_published(fleet):
    placed = [fleet.place(f"r{n}", [n] * 100, "abc").replica_id for n in range(30)]
    assert [placed.count(name) for name in "abc"] == [10, 10, 10]


def test_routers_that_know_nothing_of_each_other_begin_with_different_replicas():
    random.seed(2)
    names = [f"{i:02d}" for i in range(64)]
    placed: Counter[str] = Counter()
    for router in range(32):
        fleet = Fleet()
        for name in names:
            fleet.join(name)
        placed.update(fleet.place(str(n), [router, n], names).replica_id for n in range(16))
    assert max(placed.values()) <= 2 * placed.total() / len(names) and len(placed) == len(names)


def test_placing_again_replaces_the_booking(fleet):
    fleet.place("r", PROMPT, ["a"])
    assert fleet.place("r", PROMPT, ["b"]).replica_id == "b"
    assert [view.bookings for view in fleet.snapshot()] == [0, 1, 0]
    assert [view.waiting_tokens for view in fleet.snapshot()] == [0, 64, 0]


def test_only_known_candidates_are_chosen(fleet):
    assert fleet.place("r", PROMPT, ["x", "b"]).replica_id == "b"
    with pytest.raises(NoReplica):
        fleet.place("r", PROMPT, ["x"])
    assert fleet.booking("r") is None
    with pytest.raises(NoReplica):
        fleet.place("r", PROMPT, [])
    with pytest.raises(ValueError, match="token ids"):
        fleet.place("r", [2**40], ["a"])


def test_a_replica_that_left_leaves_no_ghost(fleet):
    publisher = Publisher()
    publisher.store(PROMPT)
    fleet.apply_events("a", publisher.snapshot())
    fleet.place("r", PROMPT, ["a"])
    fleet.leave("a")
    fleet.leave("a")
    assert [view.replica_id for view in fleet.snapshot()] == ["b", "c"]
    assert fleet.booking("r") is None
    fleet.first_token("r")
    fleet.release("r")
    assert fleet.apply_events("a", publisher.events()), "nothing to subscribe to"
    fleet.apply_load("a", load(waiting_tokens=5))
    fleet.join("a")
    assert view(fleet, "a") == type(view(fleet, "a"))("a", None, 0, 0, None, 0, 0.0)
    assert fleet.place("r", PROMPT, ["a"]).number == 1


def test_requests_that_the_replica_does_not_count_yet_are_counted_too(fleet):
    fleet.apply_load("b", load(waiting_tokens=400, waiting=1))
    fleet.place("r", [1] * 500, ["a"])
    assert fleet.place("s", [2] * 10, ["a", "b"]).replica_id == "b"
    fleet.release("s")
    fleet.first_token("r")
    assert fleet.place("t", [3] * 10, ["a", "b"]).replica_id == "a", "a decode is less than a prompt that waits"
    fleet.release("t")
    fleet.apply_load("b", load())
    assert fleet.place("u", [4] * 10, ["a", "b"]).replica_id == "b"


def test_a_newcomer_is_not_flooded(fleet):
    def place(name: str, token: int, candidates: str) -> str:
        fleet.release(name)
        return fleet.place(name, [token] * 1000, candidates).replica_id

    for token in range(60):
        place("r", token, "abc")
    fleet.release("r")
    fleet.join("d")
    placed = [place("r", 100 + token, "abcd") for token in range(12)]
    assert 1 <= placed.count("d") <= 4


def test_what_a_replica_was_given_fades_while_it_tells_nothing(clock, monkeypatch):
    """Its tokens as its requests."""
    seen = []

    def noted(candidates, *others):
        seen.append(candidates[0])
        return rank(candidates, *others)

    monkeypatch.setitem(PLACEMENTS, "cache_aware", noted)
    fleet = Fleet("cache_aware", clock, turn=0)
    fleet.join("a")
    for second in range(2):
        clock.now_s = second
        fleet.apply_load("a", load(finished=10 * second, prompt_tokens=3000 * second, cached_tokens=1000 * second))
    for second in (1, 1 + PACE_S, 1 + 9 * PACE_S):
        clock.now_s = second
        fleet.place("r", PROMPT, "a")
    requests_s, tokens_s = ([candidate[name] for candidate in seen] for name in ("requests_s", "tokens_s"))
    assert requests_s[0] == pytest.approx(10) and 0 < requests_s[1] < 2 and requests_s[2] < 0.01
    assert tokens_s == pytest.approx([200 * pace for pace in requests_s])


def test_round_robin_and_least_load(clock):
    fleet = Fleet("round_robin", clock, turn=0)
    blind = Fleet("least_load", clock, turn=0)
    for one in (fleet, blind):
        one.join("a")
        one.join("b")
        one.apply_load("a", load(waiting_tokens=500))
    assert [fleet.place(f"r{n}", PROMPT, "ab").replica_id for n in range(4)] == ["a", "b", "a", "b"]
    assert [blind.place(f"r{n}", PROMPT, "ab").replica_id for n in range(3)] == ["b", "b", "b"]


def test_many_threads_keep_the_books_straight(fleet):
    errors = []

    def work(worker: int) -> None:
        try:
            for n in range(60):
                booking = fleet.place(f"{worker}-{n}", [worker, n] * 20, "abc")
                fleet.apply_load(booking.replica_id, load(bookings_seen=n % 7, waiting_tokens=n))
                fleet.first_token(booking.request_id)
                fleet.snapshot()
                if n % 3:
                    fleet.release(booking.request_id)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sum(view.bookings for view in fleet.snapshot()) == 6 * 20
    for worker in range(6):
        for n in range(0, 60, 3):
            fleet.release(f"{worker}-{n}")
    assert sum(view.bookings for view in fleet.snapshot()) == 0


class Books(RuleBasedStateMachine):
    """Any order of placing, first tokens, loads, releases, joins and leaves, against sums over a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.fleet = Fleet("least_load", Clock())
        self.joined: set[str] = set()
        self.loads: dict[str, ReplicaLoad] = {}
        self.books: dict[str, dict] = {}

    @rule(name=st.sampled_from("ab"))
    def join(self, name: str) -> None:
        self.fleet.join(name)
        self._forget(name)
        self.joined.add(name)

    @rule(name=st.sampled_from("ab"))
    def leave(self, name: str) -> None:
        self.fleet.leave(name)
        self._forget(name)
        self.joined.discard(name)

    def _forget(self, name: str) -> None:
        self.loads.pop(name, None)
        self.books = {key: book for key, book in self.books.items() if book["booking"].replica_id != name}

    @rule(request=st.integers(0, 8), tokens=st.integers(1, 15))
    def place(self, request: int, tokens: int) -> None:
        self.books.pop(str(request), None)
        if not self.joined:
            with pytest.raises(NoReplica):
                self.fleet.place(str(request), [1] * tokens, "ab")
            return
        booking = self.fleet.place(str(request), [1] * tokens, "ab")
        self.books[str(request)] = {"booking": booking, "tokens": tokens, "first": False, "seen": False}

    @rule(request=st.integers(0, 8))
    def first_token(self, request: int) -> None:
        self.fleet.first_token(str(request))
        if str(request) in self.books:
            self.books[str(request)]["first"] = True

    @rule(request=st.integers(0, 8))
    def release(self, request: int) -> None:
        self.fleet.release(str(request))
        self.books.pop(str(request), None)

    @rule(name=st.sampled_from("ab"), seen=st.integers(0, 12), waiting=st.integers(0, 50), context=st.integers(0, 50))
    def publish(self, name: str, seen: int, waiting: int, context: int) -> None:
        published = load(bookings_seen=seen, waiting_tokens=waiting, context_tokens=context)
        self.fleet.apply_load(name, published)
        if name in self.joined:
            self.loads[name] = published
            for book in self.books.values():
                if book["booking"].replica_id == name and book["booking"].number <= seen:
                    book["seen"] = True

    @invariant()
    def agrees(self) -> None:
        views = self.fleet.snapshot()
        assert [view.replica_id for view in views] == sorted(self.joined)
        for view in views:
            mine = [book for book in self.books.values() if book["booking"].replica_id == view.replica_id]
            published = self.loads.get(view.replica_id, load())
            added = [book for book in mine if not book["seen"]]
            assert view.bookings == len(mine)
            waiting = sum(book["tokens"] for book in added if not book["first"])
            assert view.waiting_tokens == published.waiting_tokens + waiting
            context = sum(book["tokens"] for book in added if book["first"])
            assert view.context_tokens == published.context_tokens + context
        assert all(self.fleet.booking(key) == book["booking"] for key, book in self.books.items())


TestBooks = Books.TestCase
TestBooks.settings = settings(deadline=None, max_examples=60, stateful_step_count=30)


def test_what_goes_on_from_checkpoints_only_counts_up_to_the_deepest(fleet):
    """Prompts, and branches at home."""
    told = [Saved(0), Stored(1, 0, pack(PROMPT[:32])), Saved(1), Stored(2, 1, pack(PROMPT[32:])), Saved(2)]
    for events in (CacheEvents.of("first", 0, told, 4, piece=0), CacheEvents.of("first", 0, [Dropped(2)], 4)):
        received = decode_from_replica(encode(events))
        assert isinstance(received, CacheEvents) and fleet.apply_events("b", received)
    assert fleet.place("r", [*PROMPT, 1], "b", Home("b", 60)).cached_tokens == 32


def test_a_home_counts_as_having_the_whole_branch(fleet):
    """It is preferred to replicas that are idle too, until its load outweighs what it saves; and it may be gone."""
    home = Home("b", 60)
    for token in range(3):
        booking = fleet.place("r", [token] * 64, "abc", home)
        assert (booking.replica_id, booking.cached_tokens) == ("b", 60)
        fleet.release("r")
    assert fleet.place("r", [5] * 64, "ac", home).replica_id in "ac"
    fleet.release("r")
    fleet.apply_load("b", load(waiting_tokens=5000))
    assert fleet.place("s", [6] * 64, "abc", home).replica_id in "ac"
    fleet.release("s")
    assert fleet.place("t", [7] * 10, "b", home).cached_tokens == 9  # the last token is always computed
