"""What `compress` was asked for, looked at by each rank for itself.

Invariant: nothing is sent, and nothing changes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import distributed, nn

from qsync_fx.communication import assigned
from qsync_fx.communication.assigned import Assigned
from qsync_fx.communication.codecs import Codec
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.duo.rates import Duo, way_named, weights_codec
from qsync_fx.communication.hierarchy import Nodes
from qsync_fx.distributed.agreeing.statements import parallel_in
from qsync_fx.errors import OptionError, shown
from qsync_fx.module_tree import unwrapped
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.gradient_codecs import nodes_noted
from qsync_fx.plan.reading import given_plan, read_plan

Way = Codec | Duo | Mapping[str, str]
"""A codec for all gradients, DUO, or the codec of each parameter as a plan says it."""
_DEVICES: Final = ("cpu", "cuda")
_TYPES: Final = 4


@dataclass(frozen=True)
class Asked:
    """
    Attributes:
        way: in what gradients are to go.
        hierarchical: whether that is between nodes alone; a number for nodes of so many ranks in a row.
        planned: how many ranks of a node a plan goes by; 0 where none says it, or the user says otherwise.
    """

    way: Way
    hierarchical: bool | int = False
    planned: int = 0

    def tell(self, nodes: Nodes | None) -> None:
        """Warns where ranks share nodes in another way than was asked for."""
        if nodes is not None and len(nodes.ranks) == 1:
            warnings.warn(
                "all ranks share one node, inside of which gradients go in FP32: nothing is compressed; give hierarchical=False to "
                "compress what goes between all ranks",
                stacklevel=3,
            )
        elif self.planned and self.planned != (size := 1 if nodes is None else nodes.size):
            warnings.warn(
                f"the plan's codecs were chosen for what goes between nodes of {self.planned} ranks, and here nodes have {size}: steps "
                "take another time than it says; find the plan for these nodes",
                stacklevel=3,
            )


def checked(
    codec: object,
    optimizer: object,
    scaler: object,
    sharded: object,
    hierarchical: bool | int | None,
    least: int | None,
    fsdp: bool,
) -> Asked:
    """Returns what is asked for; raises `OptionError` or `PlanError` where arguments do not fit, or a plan cannot be read."""
    plan = _plan(codec)
    planned = plan.codecs if isinstance(plan, ClusterPlan) else None if plan is None else {}
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
    if scaler is not None and not (hasattr(scaler, "is_enabled") and hasattr(scaler, "get_scale")):
        raise OptionError(
            f"a scaler has a scale (get_scale), and {type(scaler).__name__} has none",
            where="compress(..., scaler=...)",
            do="give the torch.amp.GradScaler",
        )
    if hierarchical and (fsdp or isinstance(chosen, Duo | Adaptive)):
        raise OptionError(
            "nodes are told apart for a DistributedDataParallel, in codecs whose bits are known before: not with FSDP, DUO or AQGB",
            where="compress(..., hierarchical=...)",
            do="leave it out, or use a codec such as qsgd8 with DistributedDataParallel",
        )
    noted = nodes_noted(plan.notes) if planned and plan is not None else None
    if noted is None:
        return Asked(chosen, hierarchical or False)
    size, in_a_row = noted
    if hierarchical is False:
        warnings.warn(
            f"the plan's codecs were chosen for what goes between nodes of {size} ranks, and here all ranks send each other gradients in "
            "them: steps take longer than it says; leave hierarchical out",
            stacklevel=3,
        )
        return Asked(chosen)
    return Asked(chosen, (size if in_a_row else True) if hierarchical is None else hierarchical, size)


def checked_numbers(seed: int, least: int | None, check_every: int) -> int:
    """Returns the seed as codecs take it; raises `OptionError` where one of these is no such number."""
    _number("seed", seed, "a whole number", "give one of any size", None)
    if least is not None:
        _number("least", least, "a number of values", "give 0 or more, or leave it out", 0)
    _number("check_every", check_every, "a number of steps", "give 0 for never", 0)
    return seed % 2**64


def _number(name: str, value: object, what: str, do: str, smallest: int | None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and (smallest is None or value >= smallest):
        return
    told = shown(value) if isinstance(value, str) else value
    raise OptionError(f"{name} is {what}, not {told}", where=f"compress(..., {name}=...)", do=do)


def trained(model: nn.Module) -> tuple[Any, list[tuple[str, nn.Parameter]]]:
    """Returns the DistributedDataParallel of a model and the parameters that it trains, by name; raises `OptionError` where it cannot be
    compressed."""
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
    world = distributed.get_world_size(parallel.process_group)
    if world != distributed.get_world_size():
        raise OptionError(
            f"the model is trained by {world} of {distributed.get_world_size()} ranks",
            do="compress takes a model of all ranks",
        )
    named = [(name, p) for name, p in unwrapped(parallel).named_parameters() if p.requires_grad]
    for name, p in named:
        compressible(
            name,
            p,
            "train this model in FP32, on the CPU or a GPU, or use a hook of torch.distributed.algorithms.ddp_comm_hooks",
        )
        if p.device != named[0][1].device:
            raise OptionError(
                f"the model's parameters lie on {named[0][1].device} and on {p.device}, and gradients are coded on one device a rank",
                where=name,
                do="have each rank train on one device",
            )
    return parallel, named


def compressible(name: str, parameter: nn.Parameter, do: str) -> None:
    """Raises `OptionError`, which says what to do, where gradients of a parameter are none that codecs take."""
    if parameter.device.type not in _DEVICES or not parameter.is_floating_point() or parameter.dtype.itemsize > _TYPES:
        raise OptionError(
            f"gradients of {parameter.dtype} on {parameter.device} cannot be compressed: codecs take FP32 and narrower floats "
            "on the CPU and on NVIDIA GPUs",
            where=name,
            do=do,
        )


def of_units(chosen: Way) -> Codec:
    """Returns the codec of what FSDP reduces; raises `OptionError` where it cannot go in what is asked for."""
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
    return chosen


def assignment(chosen: Way, names: Sequence[str], sizes: Sequence[int], least: int | None) -> Assigned:
    """Returns the codec of each parameter; raises `PlanError` where a plan is one of another model."""
    if isinstance(chosen, Duo):
        return chosen.assigned(sizes, least)
    return assigned.to_all(chosen, sizes, least) if isinstance(chosen, Codec) else assigned.by_plan(chosen, names)


def weights(duo: Duo, sharded: bool | str | Codec, sizes: Sequence[int], least: int | None) -> Sequence[Codec] | None:
    """Returns what differences of each parameter go in; None where the optimizer is not to be sharded."""
    if sharded is False:
        return None
    return assigned.to_all(weights_codec(duo, None if sharded is True else sharded), sizes, least).codecs


def _plan(found: object) -> Plan | ClusterPlan | None:
    """Returns the plan that is given, or whose file is; None for what is none."""
    given = given_plan(found)
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".json")):
        return read_plan(given)
    return given if isinstance(given, Plan | ClusterPlan) else None


def _made(given: object) -> Codec | Duo:
    if isinstance(given, Codec | Duo):
        return given
    if isinstance(given, str):
        return way_named(given)
    raise OptionError(
        f"compress takes a codec or a plan, not {type(given).__name__}", do='give a name such as "qsgd8", or a plan'
    )
