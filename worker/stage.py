"""A rank's place in the pipeline of a replica, and what passes between stages: the tokens' activations, and the tokens
that come of them.

    stage 0 ── [n, hidden] ──▶ stage 1 ── … ──▶ stage P-1: logits
       ◀──────────────── sampled tokens ──────────────────┘

Every rank has a link to the rank of the same number in the next stage. Of several ranks in a stage, which all have the
same activations, each sends its share of the columns; those who receive put them together again.

Where a step needs tokens that no host knows yet, the last stage hands those of all slots to the first as they are after
a step that was begun before: it keeps a copy then, and sends it when the plan that needs it comes. So whoever waits,
waits for an earlier step, and no two ever wait for each other.

On a GPU every rank begins, for one step after another, to receive, to compute and to send. What it receives is in the
order of what it computes: NCCL keeps multiprocessors for as long as a receive waits, and products that have a block for
every one of them then take twice as long (https://github.com/pytorch/pytorch/issues/143988). What NCCL's buffers hold
is on its way before that. Sends go beside what is computed next; they wait where the next stage is behind, and this one
has time. So beside a step's own collectives there is nothing but sends, which wait for the next stage only, and never
for their own: the last stage sends nothing but tokens, which NCCL's buffers hold, all that it was sent is taken, hence
all that the one before it has sent, and so on. Even where a device did everything in the order in which it was begun,
step k of stage s would wait for steps before k and stages before s alone: receives begun as plans come, in other orders
on other ranks of a stage, would not have that.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from worker.parallel import TIMEOUT_S, Group, Meeting

AHEAD = 2  # receives that a CPU, which waits for each, begins before it needs them


class Link:
    """One end of a way for matrices from a rank to one of the next stage, in order."""

    def __init__(self, pair: Group, device: torch.device) -> None:
        """Of the `pair`, rank 0 sends and rank 1 receives, on `device`."""
        self._pair, self._device = pair, device
        self._ahead = AHEAD if device.type == "cpu" else 0
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._expected: deque[tuple[int, int, torch.dtype]] = deque()
        self._begun: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """Begins to send x, contiguous, which nobody may change any more. Raises RuntimeError where an earlier one did
        not arrive, if the backend notices."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()
        self._sent.append((self._pair.begin_send(x, 1), x))

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Such a matrix is going to come."""
        self._expected.append((rows, columns, dtype))
        self._begin(self._ahead)

    def receive(self) -> torch.Tensor:
        """The matrix that was expected first. Waits for it, on a GPU in the current stream. Raises RuntimeError if it
        does not come, if the backend notices."""
        self._begin(1)
        work, x = self._begun.popleft()
        work.wait()
        self._begin(self._ahead)
        return x

    def close(self) -> None:
        """Leave. What is under way may never arrive."""
        self._pair.close()
        self._sent.clear()  # what has begun holds the connection, by whose end the other side is to notice
        self._begun.clear()

    def _begin(self, most: int) -> None:
        """Has the receives of up to so many matrices begun, on a GPU when the current stream comes to it."""
        while self._expected and len(self._begun) < most:
            rows, columns, dtype = self._expected.popleft()
            x = torch.empty(rows, columns, dtype=dtype, device=self._device)
            self._begun.append((self._pair.begin_receive(x, 0), x))


@dataclass
class Stage:
    """Stage `index` of `count`: the ranks in it as `group`, all ranks of the replica, and this rank's links."""

    index: int
    count: int
    group: Group
    replica: Meeting
    before: Link | None = None
    after: Link | None = None
    back: Link | None = None  # from the leading rank to the first of all
    _kept: torch.Tensor | None = None
    _aside: torch.cuda.Stream | None = None  # that waits for the tokens that are kept, and for nothing else

    @classmethod
    def only(cls, group: Group | None = None) -> "Stage":
        """The stage of a replica that has no other."""
        group = group or Group.single()
        return cls(0, 1, group, group)

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, tp: int, pp: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> "Stage":
        """The place of rank `rank` of `tp * pp`, stage by stage, when all have come to the store. `device` is this
        rank's own, on a GPU the current one. Raises RankLost if a rank has failed."""
        index, own = divmod(rank, tp)
        if pp > 1 and device.type == "cuda":
            Group.widen_links()
        group = Group.join(store, own, tp, device, timeout_s, f"stage/{index}") if tp > 1 else Group.single()
        if pp == 1:
            return cls.only(group)
        stage = cls(index, pp, group, Meeting(store, rank, tp * pp, "replica"))
        # The first link is there when stage 0 and stage 1 are, the next one then, and the way back last of all: nobody
        # waits in a circle.
        if index > 0:
            stage.before = Link(Group.pair(store, 1, device, timeout_s, f"link/{index - 1}/{own}"), device)
        if index < pp - 1:
            stage.after = Link(Group.pair(store, 0, device, timeout_s, f"link/{index}/{own}"), device)
        if own == 0 and index in (0, pp - 1):
            stage.back = Link(Group.pair(store, 0 if index else 1, device, timeout_s, "back"), device)
        return stage

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """The stage before is going to send such a matrix."""
        assert self.before is not None
        self.before.expect(rows, self._share(columns), dtype)

    def receive(self, columns: int) -> torch.Tensor:
        """What was expected first, whole."""
        assert self.before is not None
        x = self.before.receive()
        return x if x.shape[1] == columns else self.group.all_gather(x)

    def send(self, x: torch.Tensor) -> None:
        """Begins to send a copy of x, which all ranks of this stage have, to the next stage: the next step may leave
        its own where x lies."""
        assert self.after is not None
        share = self._share(x.shape[1])
        first = self.group.rank * share if share < x.shape[1] else 0
        self.after.send(x[:, first : first + share].clone(memory_format=torch.contiguous_format))

    def keep(self, tokens: torch.Tensor) -> None:
        """Of a pipeline's leading rank: `tokens`, int64 [n], are those of all slots now, on a GPU when the current
        stream comes to it."""
        if self.back is None or not self.is_last:
            return
        self._kept = tokens.clone().unsqueeze(0)
        if tokens.is_cuda:
            self._aside = self._aside or torch.cuda.Stream(priority=-1)
            self._aside.wait_stream(torch.cuda.current_stream())

    def hand_back(self) -> None:
        """Begins to send what was kept last to the first stage, as soon as it is there."""
        assert self.back is not None and self._kept is not None
        if self._aside is None:
            self.back.send(self._kept)
        else:
            with torch.cuda.stream(self._aside):
                self.back.send(self._kept)

    def take_back(self, tokens: torch.Tensor) -> None:
        """`tokens`, int64 [n], become on every rank of the first stage those that the leading rank hands back next; of
        the only stage, those that it has now."""
        if self.back is not None:
            self.back.expect(1, len(tokens), tokens.dtype)
            tokens.copy_(self.back.receive()[0])
        self.group.broadcast(tokens, 0)

    def close(self) -> None:
        """Leave the group and the links."""
        for link in (self.before, self.after, self.back):
            if link is not None:
                link.close()
        self.group.close()

    def _share(self, columns: int) -> int:
        """The columns that each rank sends: all, where they cannot be shared out."""
        return columns if columns % self.group.size else columns // self.group.size
