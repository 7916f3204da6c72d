"""Bit-exact comparison of parameters over ranks.

Each rank hashes its parameters on its own device, and ranks compare the hashes. Parameters of type
DTensor are skipped, because each rank has a different shard.
"""

from __future__ import annotations

import functools
from collections import Counter

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor

from qsync_fx.communication.control_group import control
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
    if (
        not (distributed.is_available() and distributed.is_initialized())
        or distributed.get_world_size() == 1
    ):
        return
    result = digests(model)
    if not result:
        return
    least = torch.tensor(list(result.values()), dtype=torch.int64)
    most = least.clone()
    distributed.all_reduce(least, distributed.ReduceOp.MIN, group=control())
    distributed.all_reduce(most, distributed.ReduceOp.MAX, group=control())
    unequal = [
        name for name, differs in zip(result, (least != most).tolist(), strict=True) if differs
    ]
    if unequal:
        raise _differ(unequal, [result[name] for name in unequal])


def _differ(names: list[str], mine: list[int]) -> RankError:
    everyones: list[list[int]] = [[] for _ in range(distributed.get_world_size())]
    distributed.all_gather_object(everyones, mine, group=control())
    usual = list(Counter(map(tuple, everyones)).most_common(1)[0][0])
    others = [rank for rank, values in enumerate(everyones) if values != usual]
    differing = [
        name
        for name, value, expected in zip(names, everyones[others[0]], usual, strict=True)
        if value != expected
    ]
    more = f", ... ({len(differing)} in total)" if len(differing) > _SHOWN else ""
    error = RankError(
        f"the parameters of rank {others[0]} differ from those of rank {everyones.index(usual)}; "
        "they must be bit-identical",
        where=f"{', '.join(differing[:_SHOWN])}{more}"
        + (f"; ranks {', '.join(map(str, others))}" if others[1:] else ""),
        do="check that all ranks start with the same parameters, use the same optimizer settings, "
        "and do not change averaged gradients",
    )
    error.rank = others[0]
    return error


def digests(model: nn.Module) -> dict[str, int]:
    """Return a 64-bit hash of the bits of each parameter that is not a DTensor, by name."""
    named = [
        (name, p) for name, p in unwrapped(model).named_parameters() if not isinstance(p, DTensor)
    ]
    if not named:
        return {}
    result = torch.stack([_digest(p.detach()) for _, p in named]).tolist()
    return {name: digest for (name, _), digest in zip(named, result, strict=True)}


@torch.no_grad()
def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 64-bit polynomial hash of a tensor: int64 scalar on the CPU.

    Chunks of 2**20 bytes are summed with odd weights modulo 2**64 and combined with factor 31.
    """
    values = tensor.contiguous().view(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for index in range(0, values.numel(), _CHUNK):
        part = values[index : index + _CHUNK].to(torch.int64) + 1
        total = total * 31 + (part * _weights(tensor.device)[: part.numel()]).sum()
    return total.cpu()


@functools.lru_cache(maxsize=8)
def _weights(device: torch.device) -> torch.Tensor:
    mixed = torch.arange(1, _CHUNK + 1, device=device) * _ODD
    mixed = (mixed ^ (mixed >> 29)) * _ODD
    return (mixed ^ (mixed >> 32)) | 1
