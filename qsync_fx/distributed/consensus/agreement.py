"""Agreement of ranks on model, plan and batch before they train.

Each rank publishes a statement: sections of lines on versions, tensors of the model, DDP settings,
plan and batch. Rank 0 compares digests of the sections; a section that a rank omits is not compared
for that rank. Plans per class, formats, devices and padding may differ, and are not stated.
Invariant: either all ranks continue, or all raise the same error, which names a differing rank.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import qsync_fx
from qsync_fx.distributed.consensus.rank_liveness import Watcher
from qsync_fx.distributed.consensus.store_channel import Channel, Failure, StoreLost
from qsync_fx.errors import RankError
from qsync_fx.module_paths import unwrapped
from qsync_fx.plan.cluster_plan import CLUSTER
from qsync_fx.plan_switching import options_of

Statement = Mapping[str, Sequence[str]]
_SHOWN = 3
_GOOD = "good"


def agree(
    channel: Channel,
    watcher: Watcher,
    about: str,
    mine: Statement,
    limit: float,
    do: Mapping[str, str],
) -> None:
    """Return once all ranks have stated the same.

    Args:
        about: name of this agreement; each name is used once.
        limit: seconds to wait for another rank.
        do: remedy for each section that may differ.

    Raises:
        RankError: statements differ, a rank does not arrive, or a rank has failed.
    """
    digests = {
        name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in mine.items()
    }
    try:
        lines = json.dumps({name: list(lines) for name, lines in mine.items()})
        channel.put(f"{about}/lines/{channel.rank}", lines)
        channel.put(f"{about}/digests/{channel.rank}", json.dumps(digests))
        if channel.rank == 0:
            stated = {}
            until = time.monotonic() + limit
            for rank in range(channel.world):
                key, rest = f"{about}/digests/{rank}", until - time.monotonic()
                stated[rank] = json.loads(awaited(channel, watcher, key, rank, rest, about))
            difference = _difference(channel, about, stated, do)
            channel.put(f"{about}/verdict", _GOOD if difference is None else difference.to_json())
        # Rank 0 waits for each rank and reports a missing one, so the others wait 5 s longer.
        verdict = awaited(channel, watcher, f"{about}/verdict", 0, limit + 5, about)
    except StoreLost:
        raise lost(channel.rank) from None
    if verdict != _GOOD:
        failure = Failure.from_json(verdict)
        watcher.learn(failure)
        raise failure.error()


def awaited(
    channel: Channel, watcher: Watcher, key: str, rank: int, limit: float, about: str
) -> str:
    """Return the text that a rank puts under `key`, polling until it is present.

    Raises:
        RankError: `limit` seconds have passed, or a rank has failed.
    """
    began, pause = time.monotonic(), 0.001
    while (text := channel.get(key)) is None:
        if watcher.failure is not None:
            raise watcher.failure.error()
        if (waited := time.monotonic() - began) > limit:
            message = f"rank {rank} has not reached the comparison of {about} within {waited:.0f} s"
            do = "check its log; every rank must enter the same guard around the same training loop"
            watcher.tell(Failure(rank, message, None, do, lives=False))
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return text


def _difference(
    channel: Channel, about: str, stated: Mapping[int, Mapping[str, str]], do: Mapping[str, str]
) -> Failure | None:
    for section in dict.fromkeys(name for digests in stated.values() for name in digests):
        digests = {rank: item[section] for rank, item in stated.items() if section in item}
        most, count = Counter(digests.values()).most_common(1)[0]
        if count == len(digests):
            continue
        usual = next(rank for rank, digest in digests.items() if digest == most)
        others = [rank for rank, digest in digests.items() if digest != most]
        lines = {}
        for rank in (others[0], usual):
            text = channel.get(f"{about}/lines/{rank}") or "{}"
            lines[rank] = json.loads(text).get(section, [])
        common = set(lines[usual]) & set(lines[others[0]])
        where = "; ".join(
            f"rank {rank}: {first_of([line for line in stated if line not in common], _SHOWN)}"
            for rank, stated in lines.items()
        )
        if len(others) > 1:
            where += f" ({len(others)} ranks differ from rank {usual})"
        message = f"rank {others[0]} has another {section} than rank {usual}"
        remedy = do.get(section, f"use the same {section} on all ranks")
        return Failure(others[0], message, where, remedy)
    return None


def first_of(lines: Sequence[str], most: int) -> str:
    """Return the first lines as text, with the number of all if there are more than `most`."""
    if not lines:
        return "the same lines in another order"
    more = f", ... ({len(lines)} in total)" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more


def lost(rank: int) -> RankError:
    who = "rank 0, or the launcher" if rank else "the launcher"
    return RankError(
        "the store of the process group no longer responds: its process has ended",
        where=f"rank {rank}; the store is in the process of {who}",
        do="find the cause in the log of this process, and restart all ranks",
    )


REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "version": "install the same versions on all ranks",
        "model": "create the same model on all ranks",
        "DDP": "pass the same arguments to DistributedDataParallel on all ranks",
        "plan for the cluster": "use the same plan file on all ranks",
        "replanning": "pass guard(..., replan=...) with the same settings on all ranks, or on none",
        "batch": "use batches of the same size and dtypes on all ranks; for different sizes, "
        "weight gradients with qsync_fx.distributed.average_by_batch(ddp), or pass guard(..., "
        "same_batch=False)",
    }
)


def of_model(model: nn.Module) -> Statement:
    tensors = []
    for name, p in unwrapped(model).named_parameters():
        tensors.append(f"{name} {_tensor(p)}{'' if p.requires_grad else ' frozen'}")
    for name, buffer in unwrapped(model).named_buffers():
        tensors.append(f"buffer {name} {_tensor(buffer)}")
    stated = {
        "version": [f"torch {torch.__version__}", f"qsync_fx {qsync_fx.__version__}"],
        "model": tensors,
    }
    if (parallel := parallel_in(model)) is not None:
        stated["DDP"] = [f"{name}={getattr(parallel, name)}" for name in _DDP_SETTINGS]
    plans = [options.plan for options in options_of(model) if options.plan is not None]
    if clusters := {plan.notes[CLUSTER] for plan in plans if CLUSTER in plan.notes}:
        stated["plan for the cluster"] = sorted(clusters)
    return stated


def of_replanning(settings: object) -> Statement:
    """Return the statement about replanning: its thresholds, or "none"."""
    return {"replanning": [str(getattr(settings, "hysteresis", settings or "none"))]}


def of_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: bool) -> Statement:
    """Return the statement about a batch: dtype and dimensions of each tensor.

    Args:
        sizes: whether to state the number of samples, too.
    """
    leaves, _ = pytree.tree_flatten_with_path((args, dict(kwargs)))
    lines = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            dtype = str(leaf.dtype).removeprefix("torch.")
            samples = f", {leaf.shape[0]} samples" if sizes and leaf.dim() else ""
            lines.append(f"{pytree.keystr(path)} {dtype} of {leaf.dim()} dimensions{samples}")
    return {"batch": lines}


def parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is or contains; None without one."""
    parts = (part for part in model.modules() if isinstance(part, DistributedDataParallel))
    return next(parts, None)


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that Dynamo calls without tracing it."""
    disable: Any = torch.compiler.disable
    return disable(hook)  # type: ignore[no-any-return]


_DDP_SETTINGS: Final = (
    "bucket_bytes_cap",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "broadcast_buffers",
)


def _tensor(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
