"""Bit-exact comparison of parameters over ranks.

Each rank hashes its parameters on its own device, and ranks compare the hashes. Parameters of type
DTensor are skipped, because each rank has a different shard.
"""

from __future__ import annotations

import functools
from collections import Counter
from itertools import compress
from operator import ne

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from qsync_fx.communication.control_group import control
from qsync_fx.distributed.consensus.agreement import first_of
from qsync_fx.distributed.consensus.rendezvous import several_ranks
from qsync_fx.distributed.consensus.store_channel import Failure
from qsync_fx.errors import RankError
from qsync_fx.module_paths import unwrapped

_CHUNK = 2**20
_SHOWN = 5
_ODD = -7046029254386353131  # 2**64 divided by the golden ratio, as a signed number


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters of all ranks bit by bit; call it on every rank at the same step.

    Raises:
        RankError: on every rank, with the rank and the parameters that differ.
    """
    if not several_ranks() or not (result := digests(model)):
        return
    least = torch.tensor(list(result.values()), dtype=torch.int64)
    most = least.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group=control())
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=control())
    if unequal := list(compress(result, (least != most).tolist())):
        raise _differ(unequal, [result[name] for name in unequal])


def _differ(names: list[str], mine: list[int]) -> RankError:
    everyones: list[list[int]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(everyones, mine, group=control())
    usual = list(Counter(map(tuple, everyones)).most_common(1)[0][0])
    others = [rank for rank, values in enumerate(everyones) if values != usual]
    differing = list(compress(names, map(ne, everyones[others[0]], usual)))
    where = first_of(differing, _SHOWN)
    if others[1:]:
        where += f"; ranks {', '.join(map(str, others))}"
    description = (
        f"the parameters of rank {others[0]} differ from those of rank {everyones.index(usual)}; "
        "they must be bit-identical"
    )
    do = (
        "check that all ranks start with the same parameters, use the same optimizer settings, "
        "and do not change averaged gradients"
    )
    return Failure(others[0], description, where, do).error()


def digests(model: nn.Module) -> dict[str, int]:
    """Return a 64-bit hash of the bits of each parameter that is not a DTensor, by name."""
    named = unwrapped(model).named_parameters()
    result = {name: _digest(p.detach()) for name, p in named if not isinstance(p, DTensor)}
    return {name: int(digest) for name, digest in result.items()}


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit polynomial hash of a tensor: int64 scalar on its device.

    Chunks of 2**20 bytes are summed with odd weights modulo 2**64 and combined with factor 31.
    """
    values = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index in range(0, values.numel(), _CHUNK):
        part = values[index : index + _CHUNK].to(torch.int64) + 1
        total = total * 31 + (part * _weights(tensor.device)[: part.numel()]).sum()
    return total


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, _CHUNK + 1, device=device) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed ^ (mixed >> 32)) | 1
