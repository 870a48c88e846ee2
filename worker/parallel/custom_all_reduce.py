"""Set-up of the custom all-reduce: a test whether the GPUs of a group reach each other's memory and add up
correctly."""

import logging
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kernels.comm import cuda_ipc
from worker.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from kernels.comm.all_reduce import CustomAllReduce

log = logging.getLogger(__name__)

# Polls of the other ranks' memory after which the trial has failed: at least ten seconds, in which they may compile.
_PATIENCE_POLLS = 1 << 24
_TRIAL_SIZE = 4096


class Unreachable(RuntimeError):
    """Sums cannot go through the GPUs' own memory; the message is the reason, in a line."""


def find(group: Rendezvous, store: dist.Store, device: torch.device) -> "CustomAllReduce | None":
    """All-reduce through memory that all ranks of the group share, or None if they do not reach each other's memory.
    All ranks get the same answer. The backend of `group` must be connected already."""
    from kernels.comm.all_reduce import MEMORY_BYTES, CustomAllReduce

    memory = torch.zeros(MEMORY_BYTES, dtype=torch.uint8, device=device)
    memory[-1].item()  # waits, so that no zero overwrites what other ranks write
    addresses: list[int] = []
    try:
        addresses = _addresses(group, store, memory)
    except (Unreachable, OSError) as error:
        log.info("Rank %d does not share memory with the other GPUs: %s", group.rank, error)
    if not group.all_reduce_min(len(addresses)):
        if group.rank == 0:
            log.info("All sums go through NCCL")
        return None
    sums = CustomAllReduce(group.rank, memory, addresses)
    if not group.all_reduce_min(int(_adds_up(sums, group.rank, group.size, device))):
        if group.rank == 0:
            log.warning("Sums in memory that the GPUs share come out wrong: all go through NCCL")
        return None
    return sums


def _addresses(group: Rendezvous, store: dist.Store, memory: torch.Tensor) -> list[int]:
    """Address at which this GPU reaches each rank's `memory`. Raises Unreachable or OSError, but not before the other
    ranks can read in the store whether this rank shares its own."""
    own, problem = "", None
    try:
        if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
            raise Unreachable("NCCL_P2P_DISABLE is set")
        handle, offset = cuda_ipc.export(memory)
        own = f"{cuda_ipc.machine()} {offset} {handle.hex()}"
    except (Unreachable, OSError) as error:
        problem = error
    store.set(f"memory/{group.rank}", own)
    group.barrier()
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
        if machine != cuda_ipc.machine():
            raise Unreachable(f"rank {rank} is on another machine")
        addresses.append(cuda_ipc.open_exported(bytes.fromhex(exported), int(at)))
    return addresses


def _adds_up(sums: "CustomAllReduce", rank: int, size: int, device: torch.device) -> bool:
    """Whether sums of small and of large parts are correct. Afterwards the sums wait for other ranks without limit."""
    for_ever, sums.patience = sums.patience, _PATIENCE_POLLS
    weight = torch.ones(_TRIAL_SIZE, dtype=torch.bfloat16, device=device)
    right = True
    for rows in (1, 300):
        # Whole numbers that are exact in bfloat16, as is their sum.
        pattern = (torch.arange(rows * _TRIAL_SIZE, device=device) % 13).view(rows, _TRIAL_SIZE)
        wanted = (pattern * size + size * (size - 1) // 2).to(weight.dtype)
        residual = torch.zeros_like(wanted)
        for turn in range(2):
            part = sums.buffer(rows, _TRIAL_SIZE, weight.dtype, turn)
            assert part is not None
            part.copy_(pattern + rank)
            if turn == 0:
                total = sums.sum(part)
            else:
                sums.add_rms_norm(part, residual, weight, 0.0)
        right = right and torch.equal(total, wanted) and torch.equal(residual, wanted)
    sums.patience = for_ever
    return right
