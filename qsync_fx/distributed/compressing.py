"""Gradients that are compressed on their way between ranks.

Invariant: no rank sends anything before all have agreed on the codec, the seed and the model.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping
from typing import Final

from torch import distributed, nn

from qsync_fx.communication import assigned
from qsync_fx.communication.codecs import Codec, codec_named
from qsync_fx.communication.compression import Compression
from qsync_fx.distributed import timeouts
from qsync_fx.distributed.meeting import Meeting, several_ranks
from qsync_fx.distributed.statements import parallel_in
from qsync_fx.errors import OptionError
from qsync_fx.module_tree import unwrapped
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.reading import read_plan

_LIMIT: Final = 1800.0
_TYPES: Final = 4
_REMEDIES: Final = {
    "codec of gradients": "give compress the same codec, or the same plan, on all ranks",
    "seed of gradients": "give compress the same seed on all ranks",
    "coding of tensors": "build the same model on all ranks, and give compress the same least or the same plan",
}


def compress(
    model: nn.Module,
    codec: str | Codec | Plan | ClusterPlan | os.PathLike[str],
    *,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
) -> Compression:
    """Has a model's gradients sent in a codec, or in those of a plan; once, before training, on all ranks.

    Args:
        model: a DistributedDataParallel over all ranks, also one that is compiled, on the CPU.
        codec: "fp16", "bf16", "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "qsgd16", "aqgb", whose ranks choose as many bits as the link
            takes, or one of its levels alone ("aqgb12" to "aqgb32"), or one that is made from its class; or a plan
            that says it of each parameter, as `find_plan(..., codecs=...)` finds it, or the path of its file (a `pathlib.Path`, or a
            text that ends with ".json"). Where nothing is to be coded DistributedDataParallel sends gradients as ever.
        seed: of stochastic rounding: with the same one training is repeated to the last bit.
        least: tensors of fewer values go in FP32; by default the largest size with which more than 99% of all values are coded. A plan
            says that itself.
        check_every: after how many steps gradients are compared over ranks, to the last bit, and what a codec adds is measured; 0 for
            never.

    Returns:
        what saves and loads the state of codecs, and reports.

    Raises:
        OptionError: an argument that it cannot take.
        PlanError: the plan cannot be read, or is one of another model.
        RankError: the ranks do not agree; on all of them.
    """
    parallel = parallel_in(model)
    if parallel is None:
        raise OptionError(
            f"compress takes a DistributedDataParallel, not {type(model).__name__}",
            do="wrap the model first: DistributedDataParallel(model)",
        )
    planned = _planned(codec)
    if planned is not None and least is not None:
        raise OptionError("a plan says itself which tensors go in FP32", where="least", do="leave it out")
    if check_every < 0:
        raise OptionError(
            f"check_every is a number of steps, not {check_every}", where="compress", do="give 0 for never"
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
    if planned is not None:
        what = assigned.by_plan(planned, [name for name, _ in named])
    else:
        what = assigned.to_all(_made(codec), [p.numel() for _, p in named], least)
    seconds = timeouts.limit_of_group() or _LIMIT
    own = None
    if several_ranks():
        own = distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
    found = Compression(
        own,
        distributed.get_rank(group),
        world,
        named,
        what,
        seed % 2**64,
        check_every,
    )
    if several_ranks():
        with Meeting(seconds, None, collectives=False) as meeting:
            meeting.agree("codecs", found.statement(), _REMEDIES)
    if any(what.coded):
        parallel.register_comm_hook(None, found.hook)
    return found


def _planned(given: str | Codec | Plan | ClusterPlan | os.PathLike[str]) -> Mapping[str, str] | None:
    """Returns the codec of each parameter that a plan names; None for what is no plan."""
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        given = read_plan(given)
    if isinstance(given, ClusterPlan):
        return given.codecs
    return {} if isinstance(given, Plan) else None


def _made(given: object) -> Codec:
    if isinstance(given, Codec):
        return given
    if isinstance(given, str):
        return codec_named(given)
    raise OptionError(
        f"compress takes a codec or a plan, not {type(given).__name__}", do='give a name such as "qsgd8", or a plan'
    )
