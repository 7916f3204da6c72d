"""Gradients that are compressed on their way between ranks.

Invariant: no rank sends anything before all have agreed on the codec, the seed and the model.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Any, Final, overload

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from qsync_fx.communication import assigned
from qsync_fx.communication.codecs import Codec
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.compression import Compression
from qsync_fx.communication.duo import pure
from qsync_fx.communication.duo.rates import Duo, way_named, weights_codec
from qsync_fx.communication.duo.training import LookingAhead
from qsync_fx.communication.geometry import threshold
from qsync_fx.communication.handle import Handle
from qsync_fx.communication.sharded import ShardedCompression
from qsync_fx.distributed import sharding, timeouts
from qsync_fx.distributed.hosts import nodes_of_ranks
from qsync_fx.distributed.meeting import Meeting, several_ranks
from qsync_fx.distributed.statements import parallel_in
from qsync_fx.errors import OptionError
from qsync_fx.module_tree import unwrapped
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.reading import read_plan

_LIMIT: Final = 1800.0
_TYPES: Final = 4
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
    hierarchical: bool | int = False,
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
    hierarchical: bool | int = False,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
) -> Compression | ShardedCompression:
    """Has a model's gradients sent in a codec, or in those of a plan; once, before training, on all ranks.

    Args:
        model: a DistributedDataParallel over all ranks, or one that is sharded by `fully_shard`, also one that is compiled, on the CPU.
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
            nodes as torchrun has started them, or else by the names of their hosts; a number for nodes of so many ranks in a row.
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
    planned = _planned(codec)
    chosen = planned if planned is not None else _made(codec)
    if optimizer is not None and not isinstance(chosen, Duo):
        raise OptionError(
            "an optimizer is for DUO alone: with a codec the user's own loop steps it",
            where="compress(..., optimizer=...)",
            do='give none, or "duo4" in place of the codec',
        )
    if sharded and not isinstance(chosen, Duo):
        raise OptionError(
            "with DUO alone an optimizer is sharded over ranks",
            where="compress(..., sharded=...)",
            do='leave it out, give "duo4" and an optimizer, or shard the model: fully_shard(model)',
        )
    if planned is not None and least is not None:
        raise OptionError("a plan says itself which tensors go in FP32", where="least", do="leave it out")
    if check_every < 0:
        raise OptionError(
            f"check_every is a number of steps, not {check_every}", where="compress", do="give 0 for never"
        )
    if scaler is not None and not (hasattr(scaler, "is_enabled") and hasattr(scaler, "get_scale")):
        raise OptionError(
            f"a scaler has a scale (get_scale), and {type(scaler).__name__} has none",
            where="compress(..., scaler=...)",
            do="give the torch.amp.GradScaler",
        )
    if hierarchical and (sharding.is_sharded(model) or isinstance(chosen, Duo | Adaptive)):
        raise OptionError(
            "nodes are told apart for a DistributedDataParallel, in codecs whose bits are known before: not with FSDP, DUO or AQGB",
            where="compress(..., hierarchical=...)",
            do="leave it out, or use a codec such as qsgd8 with DistributedDataParallel",
        )
    if sharding.is_sharded(model):
        return _sharded(model, chosen, seed % 2**64, least, check_every, scaler)
    parallel = parallel_in(model)
    if parallel is None:
        raise OptionError(
            f"compress takes a DistributedDataParallel, not {type(model).__name__}",
            do="wrap the model first: DistributedDataParallel(model), or fully_shard(model)",
        )
    if getattr(parallel, "_comm_hooks", None):
        raise OptionError(
            "the model has a communication hook already, and DistributedDataParallel takes one",
            do="make a new DistributedDataParallel, and compress it once",
        )
    group = parallel.process_group
    world = distributed.get_world_size(group)
    if world != distributed.get_world_size():
        raise OptionError(
            f"the model is trained by {world} of {distributed.get_world_size()} ranks",
            do="compress takes a model of all ranks",
        )
    named = [(name, p) for name, p in unwrapped(parallel).named_parameters() if p.requires_grad]
    for name, p in named:
        if p.device.type != "cpu" or not p.is_floating_point() or p.dtype.itemsize > _TYPES:
            raise OptionError(
                f"gradients of {p.dtype} on {p.device} cannot be compressed: codecs take FP32 and narrower floats on the CPU",
                where=name,
                do="train this model on the CPU in FP32, or use a hook of torch.distributed.algorithms.ddp_comm_hooks",
            )
    nodes = nodes_of_ranks(hierarchical, _seconds()) if several_ranks() else None
    sizes, rank, seed = [p.numel() for _, p in named], distributed.get_rank(group), seed % 2**64
    if isinstance(chosen, Duo):
        stepped = pure.checked(optimizer, named)

        def joins() -> bool:
            return bool(parallel._join_config.enable)

        what = chosen.assigned(sizes, least)
        weights = None
        if sharded:
            codec = weights_codec(chosen, None if sharded is True else sharded)
            weights = assigned.to_all(codec, sizes, least).codecs
        own = _group_of_our_own()
        ahead = LookingAhead(
            own, rank, world, named, what, seed, check_every, chosen.ahead, stepped, scaler, joins, weights
        )
        _agree(ahead)
        ahead.follow()
        parallel.register_comm_hook(None, ahead.hook)
        return ahead
    if isinstance(chosen, Codec):
        what = assigned.to_all(chosen, sizes, least)
    else:
        what = assigned.by_plan(chosen, [name for name, _ in named])
    found = Compression(_group_of_our_own(), rank, world, named, what, seed, check_every, scaler, nodes)
    _agree(found)
    found.attach(lambda: parallel.register_comm_hook(None, found.hook))
    return found


def _sharded(
    model: nn.Module,
    chosen: Codec | Duo | Mapping[str, str],
    seed: int,
    least: int | None,
    check_every: int,
    scaler: object,
) -> ShardedCompression:
    if not isinstance(chosen, Codec):
        raise OptionError(
            "DUO takes a DistributedDataParallel: of a model that FSDP shards it would have to keep parameters that it does not have"
            if isinstance(chosen, Duo)
            else "a plan has a codec for each parameter, and FSDP gives the gradients of many parameters as one row",
            where="compress",
            do='use DistributedDataParallel, or a codec such as "qsgd8"',
        )
    if isinstance(chosen, Adaptive):
        raise OptionError(
            "AQGB chooses bits while gradients come, and FSDP waits for each of its units",
            where="compress",
            do='use one level, such as "aqgb16", or another codec',
        )
    if chosen.fitted((3, 5)) != chosen:
        raise OptionError(
            f"{chosen.name} codes columns of parameters, and FSDP gives the gradients of many parameters as one row",
            where="compress",
            do='use a codec of consecutive values, such as "1bit*"',
        )
    rows, world = sharding.rows(model), distributed.get_world_size()
    if least is None:
        least = threshold([row * world for row in rows.values()])
    found = ShardedCompression(
        _group_of_our_own(), distributed.get_rank(), world, rows, chosen, seed, least, check_every, scaler
    )
    _agree(found)
    sharding.reduce_by(model, found)
    return found


def _group_of_our_own() -> distributed.ProcessGroup | None:
    """Returns a process group that nobody else uses; None for one rank."""
    if not several_ranks():
        return None
    group: distributed.ProcessGroup = distributed.new_group(
        backend="gloo", timeout=datetime.timedelta(seconds=_seconds())
    )
    return group


def _agree(found: Handle) -> None:
    """Returns once all ranks have stated the same."""
    if several_ranks():
        with Meeting(_seconds(), None, collectives=False) as meeting:
            meeting.agree("codecs", found.statement(), _REMEDIES)


def _seconds() -> float:
    return timeouts.limit_of_group() or _LIMIT


def _planned(given: object) -> Mapping[str, str] | None:
    """Returns the codec of each parameter that a plan names; None for what is no plan."""
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        given = read_plan(given)
    if isinstance(given, ClusterPlan):
        return given.codecs
    return {} if isinstance(given, Plan) else None


def _made(given: object) -> Codec | Duo:
    if isinstance(given, Codec | Duo):
        return given
    if isinstance(given, str):
        return way_named(given)
    raise OptionError(
        f"compress takes a codec or a plan, not {type(given).__name__}", do='give a name such as "qsgd8", or a plan'
    )
