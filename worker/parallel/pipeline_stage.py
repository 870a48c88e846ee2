"""A rank's place in the pipeline of a replica, and the data that passes between stages: hidden states to the next
stage, sampled tokens back to the first.

    stage 0 ── [n, hidden] ──▶ stage 1 ── … ──▶ stage P-1: logits
       ◀──────────────── sampled tokens ──────────────────┘

Links. Every rank has a link to the rank of the same number in the next stage. All ranks of a stage have the same hidden
states. So each sends its share of the columns, and the receiving ranks gather them.

Tokens. A step may need tokens that no host knows yet. The last stage then sends the tokens of all slots to the first
stage. They are a copy that the last stage kept after an earlier step, and sends when the plan that needs them comes. So
a stage waits for an earlier step only, and no two stages wait for each other.

Order on a GPU. For each step in turn, every rank queues the receive, the computation and the send.

- A receive runs in order with the computation. While a receive waits, NCCL occupies multiprocessors. Matrix products
  with a block for each multiprocessor then take twice as long (https://github.com/pytorch/pytorch/issues/143988). Data
  that fits NCCL's buffers is in flight before the receive runs.
- A send overlaps the computation of the next step. It waits if the next stage is behind, when this stage has time.

Sends cannot deadlock:

1. Apart from a step's own collectives, only sends run concurrently with computation.
2. A send waits for the next stage to receive, and never for its own stage.
3. The last stage sends only tokens. NCCL's buffers hold them, so these sends do not block the last stage.
4. Hence the last stage receives everything that it is sent, and all sends of the stage before it end.
5. The same follows for each earlier stage in turn.
6. Even if a device ran all operations strictly in the order in which they were queued, step k of stage s would wait
   only for steps before k and for stages before s.

Step 6 needs receives in the order of the computation. Receives that were begun as plans come, in different orders on
different ranks of a stage, would break it.
"""

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from worker.parallel.communicator import TIMEOUT_S, Communicator
from worker.parallel.rendezvous import Rendezvous

RECEIVES_AHEAD = 2  # receives that a CPU begins before it needs them, because it waits for each


class StageLink:
    """End of a one-way link between a rank and its peer in the next stage. Matrices arrive in the order sent."""

    def __init__(self, pair: Communicator, device: torch.device) -> None:
        """Rank 0 of `pair` sends, rank 1 receives. Matrices lie on `device`."""
        self._pair, self._device = pair, device
        self._ahead = RECEIVES_AHEAD if device.type == "cpu" else 0
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._expected: deque[tuple[int, int, torch.dtype]] = deque()
        self._begun: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, x: torch.Tensor) -> None:
        """Begins to send x, contiguous, which must not change any more. Raises RuntimeError if the backend has noticed
        that an earlier matrix did not arrive."""
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()[0].wait()
        self._sent.append((self._pair.begin_send(x, 1), x))

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Announces a matrix that is going to come."""
        self._expected.append((rows, columns, dtype))
        self._begin(self._ahead)

    def receive(self) -> torch.Tensor:
        """The matrix that was expected first. The caller waits for it, on a GPU only the current stream. Raises
        RuntimeError if the backend notices that it does not come."""
        self._begin(1)
        work, x = self._begun.popleft()
        work.wait()
        self._begin(self._ahead)
        return x

    def close(self) -> None:
        """Closes the link. Matrices in flight may never arrive."""
        self._pair.close()
        self._sent.clear()  # begun operations hold the connection, and the peer notices when that ends
        self._begun.clear()

    def _begin(self, most: int) -> None:
        """Begins receives until `most` of them have begun. On a GPU they run when the current stream comes to them."""
        while self._expected and len(self._begun) < most:
            rows, columns, dtype = self._expected.popleft()
            x = torch.empty(rows, columns, dtype=dtype, device=self._device)
            self._begun.append((self._pair.begin_receive(x, 0), x))


@dataclass
class PipelineStage:
    """Stage `index` of `count`, as one of its ranks sees it.

    | field | meaning |
    | --- | --- |
    | `communicator` | the ranks of this stage |
    | `rendezvous` | all ranks of the replica |
    | `before`, `after` | links from the stage before and to the stage after, None at the ends of the pipeline |
    | `back` | link from the leading rank to the first rank of stage 0, None on all other ranks |
    """

    index: int
    count: int
    communicator: Communicator
    rendezvous: Rendezvous
    before: StageLink | None = None
    after: StageLink | None = None
    back: StageLink | None = None
    _kept: torch.Tensor | None = None
    _aside: torch.cuda.Stream | None = None  # side stream: waits for the kept tokens alone

    @classmethod
    def only(cls, group: Communicator | None = None) -> "PipelineStage":
        """The only stage of a replica."""
        group = group or Communicator.single()
        return cls(0, 1, group, group)

    @classmethod
    def join(
        cls, store: dist.Store, rank: int, tp: int, pp: int, device: torch.device, timeout_s: float = TIMEOUT_S
    ) -> "PipelineStage":
        """The place of rank `rank` of `tp * pp`, which are numbered stage by stage. Returns when all have come to the
        store. `device` is this rank's own, on a GPU the current one. Raises RankLost if a rank has failed."""
        index, own = divmod(rank, tp)
        if pp > 1 and device.type == "cuda":
            Communicator.set_nccl_buffers()
        group = (
            Communicator.join(store, own, tp, device, timeout_s, f"stage/{index}") if tp > 1 else Communicator.single()
        )
        if pp == 1:
            return cls.only(group)
        stage = cls(index, pp, group, Rendezvous(store, rank, tp * pp, "replica"))
        # Links are made in the order of the stages, the way back last. So ranks do not wait for each other in a circle.
        if index > 0:
            stage.before = StageLink(Communicator.pair(store, 1, device, timeout_s, f"link/{index - 1}/{own}"), device)
        if index < pp - 1:
            stage.after = StageLink(Communicator.pair(store, 0, device, timeout_s, f"link/{index}/{own}"), device)
        if own == 0 and index in (0, pp - 1):
            stage.back = StageLink(Communicator.pair(store, 0 if index else 1, device, timeout_s, "back"), device)
        return stage

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    @property
    def samples(self) -> bool:
        """Whether this is the replica's leading rank, which samples."""
        return self.is_last and self.communicator.rank == 0

    def expect(self, rows: int, columns: int, dtype: torch.dtype) -> None:
        """Announces a matrix `[rows, columns]` that the stage before is going to send."""
        assert self.before is not None
        self.before.expect(rows, self._share(columns), dtype)

    def receive(self, columns: int) -> torch.Tensor:
        """The matrix that was expected first, with all its columns."""
        assert self.before is not None
        x = self.before.receive()
        return x if x.shape[1] == columns else self.communicator.all_gather(x)

    def send(self, x: torch.Tensor) -> None:
        """Begins to send x, which all ranks of this stage have, to the next stage. Sends a copy, because the next step
        may overwrite x."""
        assert self.after is not None
        share = self._share(x.shape[1])
        first = self.communicator.rank * share if share < x.shape[1] else 0
        self.after.send(x[:, first : first + share].clone(memory_format=torch.contiguous_format))

    def stash_tokens(self, tokens: torch.Tensor) -> None:
        """Keeps a copy of the tokens of all slots, int64 [n], on a GPU when the current stream comes to this. Does
        nothing except on the leading rank of a pipeline."""
        if self.back is None or not self.is_last:
            return
        self._kept = tokens.clone().unsqueeze(0)
        if tokens.is_cuda:
            self._aside = self._aside or torch.cuda.Stream(priority=-1)
            self._aside.wait_stream(torch.cuda.current_stream())

    def send_tokens(self) -> None:
        """Begins to send the tokens that were kept last to the first stage, as soon as they have been copied."""
        assert self.back is not None and self._kept is not None
        if self._aside is None:
            self.back.send(self._kept)
        else:
            with torch.cuda.stream(self._aside):
                self.back.send(self._kept)

    def receive_tokens(self, tokens: torch.Tensor) -> None:
        """Overwrites `tokens`, int64 [n], on every rank of the first stage with those that the leading rank sends next.
        With a single stage, with those of the leading rank now."""
        if self.back is not None:
            self.back.expect(1, len(tokens), tokens.dtype)
            tokens.copy_(self.back.receive()[0])
        self.communicator.broadcast(tokens, 0)

    def close(self) -> None:
        """Closes the links and leaves the group."""
        for link in (self.before, self.after, self.back):
            if link is not None:
                link.close()
        self.communicator.close()

    def _share(self, columns: int) -> int:
        """Number of columns that each rank sends: all of them if they cannot be divided evenly."""
        return columns if columns % self.communicator.size else columns // self.communicator.size
