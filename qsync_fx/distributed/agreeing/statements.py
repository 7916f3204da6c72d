"""What a rank states of itself: versions, the model's tensors, how DDP puts them into buckets, the plan, and the batch.

Invariant: two ranks that state the same sum the same gradients in the same collectives. What may differ between ranks, their parts of a
plan, formats, devices and sizes of padding, is not stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import qsync_fx
from qsync_fx.distributed.agreeing.agreement import Statement
from qsync_fx.module_tree import unwrapped
from qsync_fx.plan.cluster_plan import CLUSTER
from qsync_fx.switching import options_of

REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "version": "install the same versions on all ranks",
        "model": "build the same model on all ranks",
        "DDP": "give DistributedDataParallel the same arguments on all ranks",
        "plan for the cluster": "give all ranks the same file of a plan",
        "replanning": "give guard(..., replan=...) with the same numbers on all ranks, or on none",
        "batch": "give all ranks batches of the same size and types; for batches of different sizes have gradients weighted with "
        "qsync_fx.distributed.average_by_batch(ddp), or give guard(..., same_batch=False)",
    }
)


def of_model(model: nn.Module) -> Statement:
    """Returns what can be stated before the first step."""
    inner = unwrapped(model)
    tensors = [
        *(f"{name} {_tensor(p)}{'' if p.requires_grad else ' frozen'}" for name, p in inner.named_parameters()),
        *(f"buffer {name} {_tensor(b)}" for name, b in inner.named_buffers()),
    ]
    stated = {"version": [f"torch {torch.__version__}", f"qsync_fx {qsync_fx.__version__}"], "model": tensors}
    if (parallel := parallel_in(model)) is not None:
        stated["DDP"] = list(_buckets(parallel))
    clusters = {o.plan.notes[CLUSTER] for o in options_of(model) if o.plan is not None and CLUSTER in o.plan.notes}
    return {**stated, "plan for the cluster": sorted(clusters)} if clusters else stated


def of_replanning(how: object) -> Statement:
    """Returns whether, and by which numbers, the ranks plan anew, which they do together."""
    return {"replanning": ["none" if how is None else str(getattr(how, "hysteresis", how))]}


def of_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: bool) -> Statement:
    """Returns what can be stated of what a model is called with: how many samples, where `sizes`, and types."""
    leaves, _ = pytree.tree_flatten_with_path((args, dict(kwargs)))
    lines = [
        f"{pytree.keystr(path)} {str(leaf.dtype).removeprefix('torch.')} of {leaf.dim()} dimensions"
        + (f", {leaf.shape[0]} samples" if sizes and leaf.dim() else "")
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]
    return {"batch": lines}


def parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Returns the DistributedDataParallel that a model is or holds."""
    return next((part for part in model.modules() if isinstance(part, DistributedDataParallel)), None)


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a hook that Dynamo calls and does not look into."""
    disable: Any = torch.compiler.disable
    found: Callable[..., Any] = disable(hook)
    return found


def _buckets(parallel: DistributedDataParallel) -> Iterator[str]:
    names = (
        "bucket_bytes_cap",
        "find_unused_parameters",
        "static_graph",
        "gradient_as_bucket_view",
        "broadcast_buffers",
    )
    for name in names:
        yield f"{name}={getattr(parallel, name)}"


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
