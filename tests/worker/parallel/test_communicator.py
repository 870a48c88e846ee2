"""Groups of ranks, which are threads here: what they compute together, and that none waits for one that has gone."""

import threading

import pytest
import torch
import torch.distributed as dist

from tests.worker.conftest import together
from worker.errors import RankLost
from worker.parallel.communicator import Communicator, own_address
from worker.parallel.rank_store import open_store


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_puts_together_and_tells(size: int, dtype: torch.dtype) -> None:
    def work(group: Communicator) -> tuple[torch.Tensor, ...]:
        x = (torch.arange(6, dtype=dtype) + 10 * group.rank).view(2, 3)
        total = group.all_reduce(x.clone())
        told = group.broadcast(x.clone(), 1)
        return (
            total,
            group.all_gather(x),
            group.all_gather(x, 0),
            told,
            torch.tensor(group.all_reduce_min(7 - group.rank)),
        )

    own = [(torch.arange(6, dtype=dtype) + 10 * rank).view(2, 3) for rank in range(size)]
    for total, wide, long, told, least in together(size, work):
        assert torch.equal(total, sum(own[1:], own[0]))
        assert torch.equal(wide, torch.cat(own, 1)) and wide.is_contiguous()
        assert torch.equal(long, torch.cat(own, 0))
        assert torch.equal(told, own[1])
        assert least == 8 - size


def test_operations_are_in_place() -> None:
    def work(group: Communicator) -> bool:
        x = torch.ones(3)
        return group.all_reduce(x) is x and group.broadcast(x, 0) is x and x.tolist() == [2, 2, 2]

    assert together(2, work) == [True, True]


def test_a_group_of_one_does_nothing() -> None:
    group, x = Communicator.single(), torch.ones(2)
    assert group.all_reduce(x) is group.all_gather(x) is group.broadcast(x, 0) is x
    assert group.all_reduce_min(3) == 3
    group.barrier()
    group.check()
    group.close()


def test_whoever_waits_hears_why_another_failed() -> None:
    store = dist.HashStore()
    failed = Communicator(None, store, 1, 2, torch.device("cpu"))
    failed.fail("rank 1: no weights")
    failed.fail("rank 1: and something that follows from it")
    with pytest.raises(RankLost, match=r"^rank 1: no weights$"):
        Communicator.join(store, 0, 2, torch.device("cpu"), timeout_s=10)


def test_a_rank_that_leaves_is_an_error_for_those_that_wait() -> None:
    leaving = threading.Event()

    def work(group: Communicator) -> str:
        if group.rank == 1:
            group.close()
            leaving.set()
            return "left"
        assert leaving.wait(30)
        with pytest.raises(RuntimeError):
            group.all_reduce(torch.ones(1))
        return "told"

    assert together(2, work, timeout_s=20) == ["told", "left"]


def test_gloo_listens_where_the_store_is_reached_from() -> None:
    store, _ = open_store()
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", store))) == "127.0.0.1"
    assert own_address(dist.HashStore()) is None
