"""Agreement of ranks on model, plan and batch before they train.

Each rank publishes a statement: sections of lines on versions, tensors of the model, DDP settings,
plan and batch. Rank 0 compares digests of the sections; a section that a rank omits is not compared
for that rank. Ranks that state the same reduce the same gradients in the same collectives.
Properties that may differ between ranks are not stated: per-class plans, formats, devices and
padding.

Invariant: either all ranks continue, or all raise the same error, which names a rank that differs
from the majority and its differences. A rank that does not arrive within the limit is named.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
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
        channel, watcher: of the guard.
        about: name of this agreement; each name is used once.
        mine: statement of this rank.
        limit: seconds to wait for another rank.
        do: remedy for each section that may differ.

    Raises:
        RankError: statements differ, a rank does not arrive, or a rank has failed.
    """
    digests = {
        name: hashlib.sha256("\n".join(lines).encode()).hexdigest() for name, lines in mine.items()
    }
    try:
        channel.put(
            f"{about}/lines/{channel.rank}",
            json.dumps({name: list(lines) for name, lines in mine.items()}),
        )
        channel.put(f"{about}/digests/{channel.rank}", json.dumps(digests))
        if channel.rank == 0:
            stated = {}
            until = time.monotonic() + limit
            for rank in range(channel.world):
                text = awaited(
                    channel,
                    watcher,
                    f"{about}/digests/{rank}",
                    rank,
                    until - time.monotonic(),
                    about,
                )
                stated[rank] = json.loads(text)
            result = _difference(channel, about, stated, do)
            channel.put(f"{about}/verdict", _GOOD if result is None else json.dumps(asdict(result)))
        # Rank 0 waits for each rank and reports a missing one, so the others wait 5 s longer.
        verdict = awaited(channel, watcher, f"{about}/verdict", 0, limit + 5, about)
    except StoreLost:
        raise lost(channel.rank) from None
    if verdict != _GOOD:
        watcher.learn(Failure(**json.loads(verdict)))
        raise Failure(**json.loads(verdict)).error()


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
        current, existing = (_lines(channel, about, section, rank) for rank in (usual, others[0]))
        only_there = [line for line in existing if line not in set(current)] or [
            "the same lines in another order"
        ]
        only_here = [line for line in current if line not in set(existing)] or [
            "the same lines in another order"
        ]
        more = f" ({len(others)} ranks differ from rank {usual})" if len(others) > 1 else ""
        where = f"rank {others[0]}: {_some(only_there)}; rank {usual}: {_some(only_here)}{more}"
        message = f"rank {others[0]} has another {section} than rank {usual}"
        return Failure(
            others[0], message, where, do.get(section, f"use the same {section} on all ranks")
        )
    return None


def _lines(channel: Channel, about: str, section: str, rank: int) -> list[str]:
    result: list[str] = json.loads(channel.get(f"{about}/lines/{rank}") or "{}").get(section, [])
    return result


def _some(lines: Sequence[str]) -> str:
    more = f", ... ({len(lines)} in total)" if len(lines) > _SHOWN else ""
    return ", ".join(lines[:_SHOWN]) + more


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
    inner = unwrapped(model)
    tensors = [
        *(
            f"{name} {_tensor(p)}{'' if p.requires_grad else ' frozen'}"
            for name, p in inner.named_parameters()
        ),
        *(f"buffer {name} {_tensor(b)}" for name, b in inner.named_buffers()),
    ]
    stated = {
        "version": [f"torch {torch.__version__}", f"qsync_fx {qsync_fx.__version__}"],
        "model": tensors,
    }
    if (parallel := parallel_in(model)) is not None:
        stated["DDP"] = list(_buckets(parallel))
    clusters = {
        o.plan.notes[CLUSTER]
        for o in options_of(model)
        if o.plan is not None and CLUSTER in o.plan.notes
    }
    return {**stated, "plan for the cluster": sorted(clusters)} if clusters else stated


def of_replanning(settings: object) -> Statement:
    """Return the statement about replanning: its thresholds, or "none"."""
    return {
        "replanning": [
            "none" if settings is None else str(getattr(settings, "hysteresis", settings))
        ]
    }


def of_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: bool) -> Statement:
    """Return the statement about a batch: dtype and dimensions of each tensor.

    Args:
        sizes: whether to state the number of samples, too.
    """
    leaves, _ = pytree.tree_flatten_with_path((args, dict(kwargs)))
    lines = [
        f"{pytree.keystr(path)} {str(leaf.dtype).removeprefix('torch.')} of {leaf.dim()} dimensions"
        + (f", {leaf.shape[0]} samples" if sizes and leaf.dim() else "")
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]
    return {"batch": lines}


def parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is or contains; None without one."""
    return next(
        (part for part in model.modules() if isinstance(part, DistributedDataParallel)), None
    )


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that Dynamo calls without tracing it."""
    disable: Any = torch.compiler.disable
    result: Callable[..., Any] = disable(hook)
    return result


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
