"""Gradient compression for DistributedDataParallel and FSDP2.

Invariant: no rank sends gradients before all ranks agree; an error of one rank raises on every
rank.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, overload

from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from qsync_fx.communication import ddp_hook
from qsync_fx.communication.allreduce import NodeGroups
from qsync_fx.communication.bucket import threshold
from qsync_fx.communication.codecs import PLAIN, codec_named
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.truncation import Adaptive
from qsync_fx.communication.compressor_state import CompressorHandle
from qsync_fx.communication.control_group import CPU
from qsync_fx.communication.ddp_hook import DdpCompressor
from qsync_fx.communication.duo import functional_optimizer
from qsync_fx.communication.duo.duo_hook import DuoCompressor
from qsync_fx.communication.duo.sign_codecs import Duo, way_named, weights_codec
from qsync_fx.communication.fsdp_hook import Scatter, ShardedCompression
from qsync_fx.distributed import agreement
from qsync_fx.distributed.agreement import Meeting, parallel_in, patience, several_ranks
from qsync_fx.distributed.gradient_groups import (
    agreed_transport,
    checked_transport,
    gradient_groups,
)
from qsync_fx.distributed.node_topology import nodes_of_ranks
from qsync_fx.distributed.sample_weighted_mean import (
    GradientHook,
    fsdp_units,
    has_hook,
    unit_rows,
)
from qsync_fx.errors import OptionError, shown
from qsync_fx.module_paths import unwrapped
from qsync_fx.plan.cluster_plan import (
    TRANSPORT,
    ClusterPlan,
    codes_inside,
    given_plan,
    nodes_noted,
    read_plan,
)
from qsync_fx.plan.plan import Plan

Scheme = Codec | Duo | Mapping[str, str]
"""A codec for all gradients, DUO, or the codec of each parameter from a plan."""
_SCALER_METHODS: Final = ("get_scale", "is_enabled")
_DEVICES: Final = ("cpu", "cuda")
_MOST_BYTES: Final = 4  # of a value


@dataclass(frozen=True)
class CompressRequest:
    """Validated arguments of `compress`.

    `planned` are the ranks per node, and `transport` is the transport, that a plan assumes.
    """

    scheme: Scheme
    hierarchical: bool | int = False
    planned: int = 0
    inside: Codec = PLAIN  # codec inside nodes; a plan has its own
    transport: str = ""

    def warn(self, nodes: NodeGroups | None, transport: str) -> None:
        """Warn if nodes or transport differ from the plan's, or all ranks share one node."""
        if not self.scheme:  # a plan without codecs
            return
        size = 1 if nodes is None else nodes.size
        if self.transport not in ("", transport):
            text = f"the plan's codecs were chosen for the transport {shown(self.transport)}, but "
            text += f"gradients are sent with {shown(transport)}: the predicted step time does not "
            text += f"apply. Pass transport={self.transport!r} to compress, or find a plan for a "
            text += f"cluster whose [network] has transport = {transport!r}"
            warnings.warn(text, stacklevel=3)
        if nodes is not None and len(nodes.ranks) == 1:
            inside = self.inside != PLAIN or (
                isinstance(self.scheme, Mapping) and codes_inside(self.scheme)
            )
            use = "only the codec inside nodes is used"
            if not inside:
                use = "gradients are sent in FP32 and not compressed"
            text = f"all ranks share one node, so {use}. Set hierarchical=False to compress "
            warnings.warn(f"{text}gradients between all ranks", stacklevel=3)
        elif self.planned and self.planned != size:
            text = f"the plan's codecs were chosen for nodes of {self.planned} ranks, but these "
            text += f"nodes have {size}: the predicted step time does not apply. Find a plan for "
            warnings.warn(f"{text}these nodes or remove hierarchical=...", stacklevel=3)


def checked(
    codec: object,
    optimizer: object,
    scaler: object,
    sharded: object,
    hierarchical: bool | int | None,
    least: int | None,
    fsdp: bool,
    inside: object = PLAIN.name,
) -> CompressRequest:
    """Return the request; raise `OptionError` or `PlanError` if it is invalid."""
    plan: Any = given_plan(codec)
    if isinstance(plan, os.PathLike) or (isinstance(plan, str) and plan.endswith(".json")):
        plan = read_plan(plan)
    planned: Mapping[str, str] | None = None
    if isinstance(plan, Plan | ClusterPlan):
        planned = getattr(plan, "codecs", {})
    elif isinstance(codec, str):
        codec = way_named(codec)
    elif not isinstance(codec, Codec | Duo):
        text = f"compress requires a codec or a plan, not {type(codec).__name__}"
        raise OptionError(text, do='pass the name of a codec, such as "qsgd8", or a plan')
    chosen: Any = codec if planned is None else planned
    description, is_duo = None, isinstance(chosen, Duo)
    if optimizer is not None and not is_duo:
        name, do = "optimizer", 'remove optimizer=..., or use "duo4" instead of the codec'
        description = "only DUO uses an optimizer; with a codec, your loop calls optimizer.step()"
    elif sharded and not is_duo:
        name, description = "sharded", "only DUO shards the optimizer over ranks"
        do = 'remove sharded=..., use "duo4", or shard the model with fully_shard(model)'
    elif planned is not None and least is not None:
        name, description = "least", "a plan defines which tensors are sent in FP32"
        do = "remove least=..."
    elif scaler is not None and not all(hasattr(scaler, method) for method in _SCALER_METHODS):
        name, do, kind = "scaler", "pass the torch.amp.GradScaler", type(scaler).__name__
        description = f"a scaler must have get_scale and is_enabled, but {kind} does not"
    elif hierarchical and sharded:
        name, do = "hierarchical", "remove hierarchical=..., or remove sharded=..."
        description = "sharded DUO cannot reduce inside nodes first: its optimizer shards are cut "
        description += "over all ranks, and two levels average the shards of a node"
    elif hierarchical and isinstance(chosen, Adaptive):
        name, do = "hierarchical", 'remove hierarchical=..., or use "aqgb16" or "qsgd8"'
        description = "AQGB cannot reduce inside nodes first: it chooses bits by the progress of "
        description += "one all-gather of all ranks during the backward pass"
    local: Any = codec_named(inside) if isinstance(inside, str) else inside
    if planned is not None and local != PLAIN:
        name, do = "inside", 'remove inside=..., or find a plan with inside_codecs=("qsgd8",)'
        description = "a plan defines the codecs inside nodes"
    elif not isinstance(local, Codec) or local.residual or local.gathered or fitted(local):
        name, do = "inside", 'use "fp32", "bf16" or "qsgd8"'
        description = "inside nodes, a codec must code consecutive values without error feedback"
    size, transport = 0, ""
    if planned:
        transport = plan.notes.get(TRANSPORT, "")
    # Without codecs, too: replanning may add some.
    if planned is not None and (noted := nodes_noted(plan.notes)) is not None:
        size, in_a_row = noted
        if hierarchical is None:
            hierarchical = size if in_a_row else True
    if description is None and local != PLAIN and not hierarchical:
        name, do = "inside", "add hierarchical=True, or remove inside=..."
        description = "gradients are not reduced inside nodes first, so this codec has no use"
    if description is None and planned and codes_inside(planned) and not hierarchical:
        name, do = "hierarchical", "pass hierarchical=True, or find a plan without inside_codecs"
        description = "the plan codes gradients inside nodes, but they are not reduced there first"
    if description is not None:
        raise OptionError(description, where=f"compress(..., {name}=...)", do=do)
    return CompressRequest(chosen, hierarchical or False, size, local, transport)


def fitted(codec: Codec) -> bool:
    """Return whether a codec depends on the shape of a parameter."""
    return codec.fitted((3, 5)) != codec


def checked_numbers(seed: int, least: int | None, check_every: int) -> int:
    """Return the seed modulo 2**64; raise `OptionError` if a number is out of its range."""
    _number("seed", seed, "an integer", "use an integer", -math.inf)
    if least is not None:
        _number("least", least, "a number of values", "use 0 or more, or remove least=...", 0)
    _number("check_every", check_every, "a number of steps", "use 0 to disable the check", 0)
    return seed % 2**64


def _number(name: str, value: object, expected: str, do: str, smallest: float) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= smallest:
        return
    reported = shown(value) if isinstance(value, str) else value
    description = f"{name} must be {expected}, not {reported}"
    raise OptionError(description, where=f"compress(..., {name}=...)", do=do)


def trained(model: nn.Module) -> tuple[Any, list[tuple[str, nn.Parameter]]]:
    """Return the DistributedDataParallel of a model and its trained parameters, by name."""
    parallel = parallel_in(model)
    if parallel is None:
        kind = type(model).__name__
        text = f"compress requires a DistributedDataParallel or FSDP model, not {kind}"
        do = "wrap the model first with DistributedDataParallel(model) or fully_shard(model)"
        raise OptionError(text, do=do)
    if has_hook(parallel):
        text = (
            "the model already has a communication hook, and DistributedDataParallel supports one"
        )
        raise OptionError(text, do="create a new DistributedDataParallel, and call compress once")
    ranks, world = distributed.get_world_size(parallel.process_group), distributed.get_world_size()
    if ranks != world:
        text = f"the model is trained by only {ranks} of {world} ranks"
        raise OptionError(text, do="use a process group of all ranks for the model")
    named = [(name, p) for name, p in unwrapped(parallel).named_parameters() if p.requires_grad]
    for name, p in named:
        compressible(name, p)
        if p.device != (first := named[0][1].device):
            text = f"the model has parameters on {first} and on {p.device}"
            raise OptionError(text, where=name, do="train on one device per rank")
    return parallel, named


def compressible(name: str, parameter: nn.Parameter) -> None:
    """Raise `OptionError` if no codec supports the device or dtype of a parameter."""
    is_supported = parameter.is_floating_point() and parameter.dtype.itemsize <= _MOST_BYTES
    if parameter.device.type not in _DEVICES or not is_supported:
        text = f"gradients of {parameter.dtype} on {parameter.device} cannot be compressed"
        do = "train in at most 32 bits on the CPU or an NVIDIA GPU, or without compress"
        raise OptionError(text, where=name, do=do)


def of_units(chosen: Scheme) -> Codec:
    """Return the codec for FSDP units; raise `OptionError` if the request does not suit FSDP."""
    do = 'use DistributedDataParallel, or a codec such as "qsgd8"'
    if isinstance(chosen, Duo):
        text = "DUO requires a DistributedDataParallel: with FSDP, ranks lack parameters to store"
    elif not isinstance(chosen, Codec):
        text = "a plan assigns a codec to each parameter, but FSDP reduces many as one row"
    elif isinstance(chosen, Adaptive):
        text = "AQGB adapts its bits during the backward pass, but FSDP waits for each of its units"
    elif fitted(chosen):
        text = f"{chosen.name} encodes columns of parameters, but FSDP reduces many as one row"
        do = 'use a codec of consecutive values, such as "1bit*"'
    else:
        return chosen
    raise OptionError(text, where="compress", do=do)


@overload
def compress(
    model: FSDPModule,
    codec: str | Codec,
    *,
    scaler: object = None,
    seed: int = 0,
    least: int | None = None,
    check_every: int = 100,
    transport: str = "auto",
    inside: str | Codec = "fp32",
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
    transport: str = "auto",
    inside: str | Codec = "fp32",
) -> DdpCompressor: ...
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
    transport: str = "auto",
    inside: str | Codec = "fp32",
) -> DdpCompressor | ShardedCompression:
    """Install gradient compression on a model, and return its handle.

    Call it once before training, on all ranks. Raise `OptionError` for an invalid argument,
    `PlanError` for a plan of another model, and on all ranks `RankError` if they do not agree.

    Args:
        model: a DistributedDataParallel over all ranks, or a model sharded by `fully_shard`,
            compiled or not, on the CPU or on one GPU per rank.
        codec: "fp16", "bf16", "1bit", "1bit*", "qsgd2", "qsgd4", "qsgd8", "qsgd16", "aqgb" (ranks
            choose the bits by the bandwidth of the link), one AQGB level ("aqgb12" to "aqgb32"), or
            a `Codec` object. DUO: "duo0", "duo1", "duo2", "duo4", "duo8", "duo32", or `Duo(...)`.
            A plan with a codec for each parameter: the result of `find_plan(..., codecs=...)`, or
            the path of its file (a `pathlib.Path`, or a string that ends with ".json"). If no
            tensor is to be coded, DistributedDataParallel reduces gradients itself.
        optimizer: with DUO, the optimizer that steps all parameters of the model.
        scaler: the GradScaler of the loss, for DUO and codecs with error feedback ("1bit",
            "1bit*"), which rescale the feedback and undo its change of a skipped step.
        sharded: with DUO, whether the optimizer of each rank steps a shard of every parameter, and
            ranks exchange the updates. True codes updates in 4 bits ("duo8": 8 bits, "duo32":
            FP32); a codec such as "qsgd8" replaces this default. The parameters of the optimizer
            become the shards.
        hierarchical: whether gradients are summed inside a node first and coded only between
            nodes. True uses the nodes of torchrun, or else host names; an int is the number of
            consecutive ranks per node. Default: as the plan specifies, otherwise False.
        seed: seed of stochastic rounding. The same seed reproduces training bit by bit.
        least: tensors (with FSDP: units) of fewer values are sent in FP32. Default without a plan:
            the largest size with which more than 99% of all values are coded; 0 with "duo0".
        check_every: steps between bit-exact comparisons of gradients over ranks and measurements of
            the codec's error; 0 for never.
        transport: "point_to_point" sends messages from host memory over gloo. "collective" encodes,
            sends and decodes on the device by collectives of the backend of the process group, such
            as NCCL; AQGB does not support it. "auto": "collective" where it is supported and the
            backend is not gloo.
        inside: codec inside nodes, with `hierarchical`: "fp32", or for example "qsgd8". It needs
            consecutive values and no error feedback. A plan has codecs of both levels itself.
    """
    with agreement.told_to_all():
        seed = checked_numbers(seed, least, check_every)
        fsdp = any(isinstance(module, FSDPModule) for module in model.modules())
        request = checked(codec, optimizer, scaler, sharded, hierarchical, least, fsdp, inside)
        chosen = request.scheme
        if fsdp:
            units, rows = of_units(chosen), unit_rows(model)
            for name, p in unwrapped(model).named_parameters():
                if p.requires_grad:
                    compressible(name, p)
            device = next(p.device for p in model.parameters() if p.requires_grad)
            coding: Iterable[Codec] = [units]
        else:
            parallel, named = trained(model)
            sizes = [p.numel() for _, p in named]
            if isinstance(chosen, Codec):
                assigned = ddp_hook.to_all(chosen, sizes, least)
            elif not isinstance(chosen, Duo):
                assigned = ddp_hook.by_plan(chosen, [name for name, _ in named])
            else:
                assigned, weights = chosen.assigned(sizes, least), None
                if sharded:
                    updates = weights_codec(chosen, None if sharded is True else sharded)
                    weights = ddp_hook.to_all(updates, sizes, least).codecs
                stepped = functional_optimizer.checked(optimizer, named)
            if isinstance(chosen, Codec | Duo):
                assigned = replace(assigned, inside=(request.inside,) * len(named))
            device = next((p.device for _, p in named), CPU)
            coding = assigned.codecs
        preferred = checked_transport(transport, coding, device)
    # Up to this point an error of one rank is reported to the others, which do not create a process
    # group yet.
    nodes = group = collectives = None
    if several_ranks():
        nodes = nodes_of_ranks(request.hierarchical, patience())
        transport = agreed_transport(transport, preferred, patience())
        request.warn(nodes, transport)
        group, collectives = gradient_groups(transport, device, nodes, patience())
    rank, world = distributed.get_rank(), distributed.get_world_size()
    if fsdp:
        if least is None:
            least = threshold([row * world for row in rows.values()])
        compression = ShardedCompression(
            group,
            rank,
            world,
            rows,
            units,
            seed,
            least,
            check_every,
            scaler,
            device,
            nodes,
            collectives,
            request.inside,
        )
        _agree(compression)
        modules = fsdp_units(model)
        for unit in compression.units:
            modules[unit.name].set_custom_reduce_scatter(Scatter(compression, unit))
        return compression
    common = group, rank, world, named, assigned, seed, check_every
    if isinstance(chosen, Duo):
        settings = *common, chosen, stepped, scaler
        duo = DuoCompressor(
            *settings, lambda: bool(parallel._join_config.enable), weights, nodes, collectives
        )
        _agree(duo)
        duo.follow()
        GradientHook.of(parallel).hook = duo.hook
        return duo
    result = DdpCompressor(*common, scaler, nodes, collectives)
    _agree(result)
    result.attach(lambda: setattr(GradientHook.of(parallel), "hook", result.hook))
    return result


def _agree(result: CompressorHandle) -> None:
    if several_ranks():
        with Meeting(patience(), None, collectives=False) as meeting:
            meeting.agree("codecs", result.statement())
