"""Gradients that are compressed on their way between ranks.

Invariant: no rank sends anything before all have agreed on the codec, the seed and the model. What one of them cannot take is an error on
all of them at once.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any, Final, overload

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from qsync_fx.communication.codecs import Codec
from qsync_fx.communication.compression import Compression
from qsync_fx.communication.duo import pure
from qsync_fx.communication.duo.rates import Duo
from qsync_fx.communication.duo.training import LookingAhead
from qsync_fx.communication.geometry import threshold
from qsync_fx.communication.handle import Handle
from qsync_fx.communication.sharded import ShardedCompression
from qsync_fx.distributed import asked, sharding
from qsync_fx.distributed.agreeing import timeouts
from qsync_fx.distributed.agreeing.meeting import Meeting, several_ranks, told_to_all
from qsync_fx.distributed.hosts import nodes_of_ranks
from qsync_fx.plan import ClusterPlan, Plan

_REMEDIES: Final = {
    "codec of gradients": "give compress the same codec, or the same plan, on all ranks, and a scaler on all of them or on none",
    "nodes of ranks": "give compress the same hierarchical on all ranks",
    "seed of gradients": "give compress the same seed on all ranks",
    "coding of tensors": "build the same model on all ranks, and give compress the same least or the same plan",
    "optimizer": "make the optimizer with the same arguments on all ranks, and give a scaler to compress on all of them or on none",
}


@overload
def compress(
    model: FSDPModule,
    codec: str | Codec,
    *,
    scaler: object = None,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
) -> ShardedCompression: ...
@overload
def compress(
    model: nn.Module,
    codec: str | Codec | Duo | Plan | ClusterPlan | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scaler: object = None,
    sharded: bool | str | Codec = False,
    hierarchical: bool | int | None = None,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
) -> Compression: ...
def compress(
    model: Any,
    codec: str | Codec | Duo | Plan | ClusterPlan | os.PathLike[str],
    *,
    optimizer: Optimizer | None = None,
    scaler: object = None,
    sharded: bool | str | Codec = False,
    hierarchical: bool | int | None = None,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
) -> Compression | ShardedCompression:
    """Has a model's gradients sent in a codec, or in those of a plan; once, before training, on all ranks.

    Args:
        model: a DistributedDataParallel over all ranks, or one that is sharded by `fully_shard`, also one that is compiled, on the CPU or
            on one GPU a rank, which codes its gradients; they travel by way of its host, where AQGB's levels are made.
        codec: "fp16", "bf16", "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "qsgd16", "aqgb", whose ranks choose as many bits as the link
            takes, or one of its levels alone ("aqgb12" to "aqgb32"), or one that is made from its class; "duo0", "duo1", "duo2", "duo4",
            "duo8" for DUO, or `Duo(...)`; or a plan that says it of each parameter, as `find_plan(..., codecs=...)` finds it, or the path
            of its file (a `pathlib.Path`, or a text that ends with ".json"). Where nothing is to be coded DistributedDataParallel
            sends gradients as ever.
        optimizer: with DUO, what steps the model's parameters, all of them.
        scaler: the GradScaler that scales the loss, if there is one: with DUO, and with a codec that sends with the next gradient what it
            leaves of one ("1bit", "1bit*"), which then keeps to the scale, and forgets steps that are left out. Others need it not.
        sharded: with DUO, whether each rank's optimizer steps a part of every parameter alone, and ranks send each other what they make of
            theirs: True for differences in 4 bits, 8 with "duo8", and in FP32 with "duo32", or what they go in ("qsgd8"). The optimizer's
            parameters become those parts.
        hierarchical: whether gradients are summed in FP32 between ranks of the same node, and go in the codec between nodes alone. True for
            nodes as torchrun has started them, or else by the names of their hosts; a number for nodes of so many ranks in a row. By
            default as a plan says, and else not.
        seed: of stochastic rounding: with the same one training is repeated to the last bit.
        least: tensors, and under FSDP units, of fewer values go in FP32; by default the largest size with which more than 99% of all
            values are coded, and with "duo0" none do. A plan says that itself.
        check_every: after how many steps gradients are compared over ranks, to the last bit, and what a codec adds is measured; 0 for
            never.

    Returns:
        what saves and loads the state of codecs, and reports.

    Raises:
        OptionError: an argument that it cannot take.
        PlanError: the plan cannot be read, or is one of another model.
        RankError: the ranks do not agree; on all of them.
    """
    rank = distributed.get_rank() if several_ranks() else 0
    with told_to_all():
        seed = asked.checked_numbers(seed, least, check_every)
        fsdp = sharding.is_sharded(model)
        wanted = asked.checked(codec, optimizer, scaler, sharded, hierarchical, least, fsdp)
        chosen = wanted.way
        if fsdp:
            units, rows = asked.of_units(chosen), sharding.rows(model)
        else:
            parallel, named = asked.trained(model)
            names, sizes = [name for name, _ in named], [p.numel() for _, p in named]
            what = asked.assignment(chosen, names, sizes, least)
            weights = asked.weights(chosen, sharded, sizes, least) if isinstance(chosen, Duo) else None
            stepped = pure.checked(optimizer, named) if isinstance(chosen, Duo) else None
    # Here an error of one rank is told on the others, which have not begun to make a group yet.
    nodes = None
    if several_ranks():
        nodes = nodes_of_ranks(wanted.hierarchical, timeouts.patience())
        wanted.tell(nodes)
    if fsdp:
        return _sharded(model, rows, units, seed, least, check_every, scaler)
    world, own = distributed.get_world_size(parallel.process_group), _group_of_our_own()
    if stepped is not None and isinstance(chosen, Duo):

        def joins() -> bool:
            return bool(parallel._join_config.enable)

        ahead = LookingAhead(
            own, rank, world, named, what, seed, check_every, chosen.ahead, stepped, scaler, joins, weights
        )
        _agree(ahead)
        ahead.follow()
        parallel.register_comm_hook(None, ahead.hook)
        return ahead
    found = Compression(own, rank, world, named, what, seed, check_every, scaler, nodes)
    _agree(found)
    found.attach(lambda: parallel.register_comm_hook(None, found.hook))
    return found


def _sharded(
    model: nn.Module,
    rows: Mapping[str, int],
    codec: Codec,
    seed: int,
    least: int | None,
    check_every: int,
    scaler: object,
) -> ShardedCompression:
    world, device = distributed.get_world_size(), next(p.device for p in model.parameters() if p.requires_grad)
    if least is None:
        least = threshold([row * world for row in rows.values()])
    found = ShardedCompression(
        _group_of_our_own(), distributed.get_rank(), world, rows, codec, seed, least, check_every, scaler, device
    )
    _agree(found)
    sharding.reduce_by(model, found)
    return found


def _group_of_our_own() -> distributed.ProcessGroup | None:
    """Returns a process group that nobody else uses; None for one rank."""
    if not several_ranks():
        return None
    group: distributed.ProcessGroup = distributed.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=timeouts.patience())
    )
    return group


def _agree(found: Handle) -> None:
    """Returns once all ranks have stated the same."""
    if several_ranks():
        with Meeting(timeouts.patience(), None, collectives=False) as meeting:
            meeting.agree("codecs", found.statement(), _REMEDIES)
