"""Finding out whether the GPUs of a group's ranks reach each other's memory, and making the sums that go through it."""

import logging
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kernels import peer_memory

if TYPE_CHECKING:
    from kernels.all_reduce import PeerSums
    from worker.parallel import Group

log = logging.getLogger(__name__)

# Looks at the other ranks' memory before a trial has failed: at least ten seconds, in which they may compile.
_PATIENCE = 1 << 24
_TRIAL_SIZE = 4096


class Unreachable(RuntimeError):
    """Why sums cannot go through the GPUs' own memory, in a line."""


def find(group: "Group", store: dist.Store, device: torch.device) -> "PeerSums | None":
    """Sums through memory that all ranks of the group share, or None if they do not reach each other's. All ranks come
    to the same answer. `group` can use its backend already."""
    from kernels.all_reduce import MEMORY_BYTES, PeerSums

    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device)
    memory[-1].item()  # waits: no zero may come after what others write
    addresses: list[int] = []
    try:
        addresses = _addresses(group, store, memory)
    except (Unreachable, OSError) as error:
        log.info("Rank %d does not share memory with the other GPUs: %s", group.rank, error)
    if not group.least(len(addresses)):
        if group.rank == 0:
            log.info("All sums go through NCCL")
        return None
    sums = PeerSums(group.rank, memory, addresses)
    if not group.least(int(_adds_up(sums, group.rank, group.size, device))):
        if group.rank == 0:
            log.warning("Sums in memory that the GPUs share come out wrong: all go through NCCL")
        return None
    return sums


def _addresses(group: "Group", store: dist.Store, memory: torch.Tensor) -> list[int]:
    """Where this GPU finds each rank's `memory`. Raises Unreachable or OSError, having told the others of its own."""
    own, problem = "", None
    try:
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            raise Unreachable("NCCL_P2P_DISABLE is set")
        handle, offset = peer_memory.export(memory)
        own = f"{peer_memory.machine()} {offset} {handle.hex()}"
    except (Unreachable, OSError) as error:
        problem = error
    store.set(f"memory/{group.rank}", own)
    group.meet()
    if problem is not None:
        raise problem
    addresses = []
    for rank in range(group.size):
        if rank == group.rank:
            addresses.append(memory.data_ptr())
            continue
        said = store.get(f"memory/{rank}").decode()
        if not said:
            raise Unreachable(f"rank {rank} shares no memory")
        machine, at, exported = said.split()
        if machine != peer_memory.machine():
            raise Unreachable(f"rank {rank} is on another machine")
        addresses.append(peer_memory.open_exported(bytes.fromhex(exported), int(at)))
    return addresses


def _adds_up(sums: "PeerSums", rank: int, size: int, device: torch.device) -> bool:
    """Whether small and large parts come out right. Afterwards the sums wait as long as it takes."""
    for_ever, sums.patience = sums.patience, _PATIENCE
    weight = torch.ones(_TRIAL_SIZE, dtype=torch.bfloat16, device=device)
    right = True
    for rows in (1, 300):
        # Whole numbers, which bfloat16 has all of, and their sum too.
        pattern = (torch.arange(rows * _TRIAL_SIZE, device=device) % 13).view(rows, _TRIAL_SIZE)
        wanted = (pattern * size + size * (size - 1) // 2).to(weight.dtype)
        residual = torch.zeros_like(wanted)
        for turn in range(2):
            place = sums.place(rows, _TRIAL_SIZE, weight.dtype, turn)
            assert place is not None
            place.copy_(pattern + rank)
            if turn == 0:
                total = sums.sum(place)
            else:
                sums.add_rms_norm(place, residual, weight, 0.0)
        right = right and torch.equal(total, wanted) and torch.equal(residual, wanted)
    sums.patience = for_ever
    return right
