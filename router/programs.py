"""Programs: what the branches of a client's program hold, so that a request sends only the text that follows.

A program is many calls with a common state, as `docs/PROGRAMS_API.md` describes. Each of its branches is a text that
grows by constant text and by generated text, in turns:

    constant │ generated │ constant │ generated │ tail
    ├────────── token_ids ──────────────────────┤

- Generated text keeps the tokens that were generated. It is never tokenised again.
- Constant text between two generations is tokenised as one piece, however the client cut it. So the tail stays text
  until the next generation follows it.

The table is a cache: an entry may be dropped at any time, and the client then sends the whole text. It belongs to one
event loop.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from worker.messages import Lease

MAX_TOKENS = 16 << 20  # 64 MiB of token ids
MAX_BRANCHES = 1 << 16
TIMEOUT_S = 3600.0  # the longest lease
MAX_HOMES = 1 << 16
# The head start that calls of a program get in the waiting queue at most. So a single request waits as if it had come
# so much later, and no longer.
MAX_HEAD_START_S = 2.0


@dataclass(frozen=True, slots=True)
class Home:
    """The replica of a branch's last request, and how many tokens of the branch it had then."""

    replica_id: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BranchCall:
    """A request as a part of its program. `lease`: what becomes of its KV; its owner is the program, its name the
    branch. `then`: constant text that will follow the answer. `remaining`: calls that the program has after this one.
    `deadline_s`: seconds in which the program should end."""

    lease: Lease
    parent: str | None = None
    then: str | None = None
    remaining: int | None = None
    deadline_s: float | None = None

    def head_start_s(self, age_s: float) -> float:
        """The head start of the call in a waiting queue, in seconds. `age_s`: the age of the program. Programs that
        have run for long and end soon go first, and those whose deadline is near."""
        by_age = 0.0 if self.remaining is None else age_s / (1 + self.remaining)
        by_deadline = 0.0 if self.deadline_s is None else MAX_HEAD_START_S - self.deadline_s
        return min(MAX_HEAD_START_S, max(by_age, by_deadline, 0.0))


class BranchUnknown(Exception):
    """The branch is not known here, or no longer holds what it did a moment ago."""


@dataclass(frozen=True, slots=True)
class BranchText:
    """The text that a branch holds: tokens up to the end of its last generation, and the constant text after it.
    `num_chars`: characters of all prompts and answers together."""

    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    tail: str = ""
    num_chars: int = 0

    def prompt(self, text: str, encode: Callable[[str, bool], list[int]]) -> list[int]:
        """The tokens of the branch with `text` after it. `encode` takes a text and whether that text begins the prompt:
        only there may the tokenizer add its special tokens."""
        begins = not self.token_ids
        new = self.tail + text
        return self.token_ids.tolist() + (encode(new, begins) if new or begins else [])

    def extended(self, text: str, prompt_ids: list[int], answer: str, output_ids: list[int], rest: str) -> "BranchText":
        """The branch after a generation. `text` and `prompt_ids`: what was sent to `prompt`, and its result. `answer`:
        the text that was kept, which is that of the tokens `output_ids` and then `rest`."""
        num_chars = self.num_chars + len(text) + len(answer)
        if not output_ids:  # the constant text before and after is one piece
            return BranchText(self.token_ids, self.tail + text + rest, num_chars)
        return BranchText(array("i", prompt_ids + output_ids), rest, num_chars)

    @property
    def text_bytes(self) -> int:
        """The cost of `prompt`, in bytes of text that cost as much: to copy sixteen tokens costs as much as a byte."""
        return len(self.tail) + len(self.token_ids) // 16

    @property
    def size(self) -> int:
        """The branch's size in the table, in tokens; a character of the tail counts as one."""
        return len(self.token_ids) + len(self.tail)


@dataclass(frozen=True, slots=True)
class Held:
    """The text that a request continues: `branch`. `version` is that of the table's entry, None if there was none."""

    program: str
    name: str
    branch: BranchText
    continues: bool
    version: int | None


@dataclass(slots=True)
class Turn:
    """A request on a branch, from its start to its end. `previous`: what the branch held before, None if that is not
    known or can no longer be brought back."""

    program: str
    name: str
    number: int
    previous: BranchText | None


@dataclass(slots=True)
class _Entry:
    branch: BranchText
    version: int
    used_s: float


class Programs:
    """The programs of one router, with what their branches hold.

    A branch has one request at a time. `look` says what the request continues; `begin` takes the branch out of the
    table, and raises if it has changed since. `end` puts it back with its new text. After `undo` it is as before the
    request, after `drop` it is unknown. While a request is on a branch, others find it unknown.
    """

    def __init__(
        self,
        max_tokens: int = MAX_TOKENS,
        max_branches: int = MAX_BRANCHES,
        timeout_s: float = TIMEOUT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The least recently used branches are dropped beyond `max_tokens` and `max_branches`, and those that were not
        used for `timeout_s`. `clock` returns seconds."""
        self._max_tokens = max_tokens
        self._max_branches = max_branches
        self._timeout_s = timeout_s
        self._clock = clock
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()  # least recently used first
        self._running: dict[tuple[str, str], int] = {}  # turns by branch
        self._branches: dict[str, set[str]] = {}  # by program, in `_entries` or `_running`
        self._began_s: OrderedDict[str, float] = OrderedDict()  # by program, the one with the newest call last
        self._homes: OrderedDict[tuple[str, str], Home] = OrderedDict()  # by branch, the newest last
        self._num_tokens = 0
        self._last = 0  # the last turn's number, which is also the version of what it left

    def __len__(self) -> int:
        """Number of programs with a branch that is known or has a request."""
        self._expire()
        return len(self._branches)

    @property
    def num_tokens(self) -> int:
        """Sum of the sizes of all branches in the table."""
        return self._num_tokens

    def look(self, program: str, name: str, parent: str | None, continues: bool, num_chars: int | None = None) -> Held:
        """The text that a request on the branch `name` continues; nothing unless it `continues`. With `parent`, it is
        the first request of the branch, which begins with what the parent holds now. `num_chars`: how many characters
        that is, by the client's count. Raises BranchUnknown."""
        self._expire()
        if not continues:
            return Held(program, name, BranchText(), continues, None)
        if parent is not None and name in self._branches.get(program, ()):
            raise BranchUnknown(f"the branch {name!r} is there already: only its first request names a parent")
        entry = self._use(program, name if parent is None else parent)
        if num_chars is not None and num_chars != entry.branch.num_chars:
            raise BranchUnknown(f"{num_chars} characters are expected, but {entry.branch.num_chars} are held")
        return Held(program, name, entry.branch, continues, entry.version if parent is None else None)

    def begin(self, held: Held) -> Turn:
        """Begins a request that continues `held`. A request that does not continue takes the place of one that is still
        on the branch. Raises BranchUnknown if the branch is not as it was at `look`."""
        key = (held.program, held.name)
        entry = self._entries.get(key)
        if held.continues and (key in self._running or (entry and entry.version) != held.version):
            raise BranchUnknown(f"another request has changed the branch {held.name!r}")
        if entry is not None:
            self._remove(key)
        self._last += 1
        self._running[key] = self._last
        self._branches.setdefault(held.program, set()).add(held.name)
        return Turn(held.program, held.name, self._last, None if entry is None else entry.branch)

    def end(self, turn: Turn, branch: BranchText) -> None:
        """Ends a request: the branch holds `branch` now, unless the program has ended or a later request has come."""
        key = (turn.program, turn.name)
        if self._running.get(key) != turn.number:
            return
        del self._running[key]
        self._entries[key] = _Entry(branch, turn.number, self._clock())
        self._num_tokens += branch.size
        while self._num_tokens > self._max_tokens or len(self._entries) > self._max_branches:
            self._forget(next(iter(self._entries)))

    def undo(self, turn: Turn) -> None:
        """Ends a request that has changed nothing."""
        if turn.previous is None:
            self.drop(turn)
        else:
            self.end(turn, turn.previous)

    def drop(self, turn: Turn) -> None:
        """Ends a request whose client may not know what it generated: the branch becomes unknown. Also after `end`."""
        key = (turn.program, turn.name)
        entry = self._entries.get(key)
        if self._running.get(key) == turn.number or (entry is not None and entry.version == turn.number):
            self._forget(key)

    def age_s(self, program: str) -> float:
        """Seconds since the program's first call, which is now if none is known."""
        began_s = self._began_s.setdefault(program, self._clock())
        self._began_s.move_to_end(program)
        if len(self._began_s) > MAX_HOMES:
            self._began_s.popitem(last=False)
        return self._clock() - began_s

    def home(self, call: BranchCall) -> Home | None:
        """The home of the call's branch; of its parent's, if the branch has none."""
        owner = call.lease.owner
        found = self._homes.get((owner, call.lease.name))
        return self._homes.get((owner, call.parent)) if found is None and call.parent is not None else found

    def set_home(self, call: BranchCall, home: Home) -> None:
        """Sets the home of the call's branch."""
        key = (call.lease.owner, call.lease.name)
        self._homes[key] = home
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def remove(self, program: str) -> None:
        """Forgets a program. Requests on its branches go on and leave nothing."""
        self._began_s.pop(program, None)
        for name in list(self._branches.get(program, ())):
            self._forget((program, name))

    def _use(self, program: str, name: str) -> _Entry:
        entry = self._entries.get((program, name))
        if entry is None:
            raise BranchUnknown(f"the branch {name!r} of this program is not known here, or has a request")
        entry.used_s = self._clock()
        self._entries.move_to_end((program, name))
        return entry

    def _expire(self) -> None:
        oldest_s = self._clock() - self._timeout_s
        while self._entries:
            key, entry = next(iter(self._entries.items()))
            if entry.used_s > oldest_s:
                return
            self._forget(key)

    def _forget(self, key: tuple[str, str]) -> None:
        """Removes a branch, and its program with the last one. A request on the branch loses its turn."""
        self._remove(key)
        self._running.pop(key, None)
        names = self._branches[key[0]]
        names.discard(key[1])
        if not names:
            del self._branches[key[0]]

    def _remove(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_tokens -= entry.branch.size


def kept_tokens(token_ids: Sequence[int], ends: Sequence[int | None], text: str, is_cut: bool) -> tuple[list[int], str]:
    """The tokens of an output whose text lies wholly in the kept `text`, and the rest of that text.

    `ends` has, for each token, the characters up to its end; None if it ends inside a character. `is_cut`: whether a
    stop string cut the text; otherwise all tokens are kept. Of tokens without text at the cut, none is kept.
    """
    if not is_cut:
        return list(token_ids), ""
    number, end = 0, 0
    for count, to in enumerate(ends, 1):
        if to is not None and end < to <= len(text):
            number, end = count, to
    return list(token_ids[:number]), text[end:]
