"""Agreement of ranks, and propagation of an error of one rank to all.

Invariant: all ranks continue, or all raise an error that names a rank and its reason, unless a
process is killed before it. Meanwhile collectives may last as long as a rank compiles.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import compress
from operator import ne
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.communication import communication_thread
from qsync_fx.communication.control_group import control, limit_of, limit_of_group
from qsync_fx.distributed.rank_liveness import Channel, Failure, StoreLost, Watcher
from qsync_fx.errors import QSyncError, RankError
from qsync_fx.module_paths import unwrapped
from qsync_fx.plan.cluster_plan import CLUSTER
from qsync_fx.plan_switching import options_of
from qsync_fx.torch_internals import _world, callback_handler, keystr, tree_flatten_with_path

Statement = Mapping[str, Sequence[str]]
"""Lines by section. A section that a rank omits is not compared for that rank."""
COMPILING: Final = 1800.0
_FOR_A_CAUSE: Final = 12.0
"""Seconds to wait for the cause of a failed collective: a report, or a detected silence."""
_LEAST: Final = 10.0
"""Minimum seconds between another rank's failure and the termination of a blocked process."""
_GOOD: Final = "good"
_SAME_LAYOUT: Final = "pass the same hierarchical=... to compress on all ranks"
_REMEDIES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "version": "install the same versions on all ranks",
        "model": "create the same model on all ranks",
        "DDP": "pass the same arguments to DistributedDataParallel on all ranks",
        "plan for the cluster": "use the same plan file on all ranks",
        "replanning": "pass guard(..., replan=...) with the same settings on all ranks, or on none",
        "batch": "use batches of the same size and dtypes on all ranks; for different sizes, call "
        "qsync_fx.distributed.average_by_batch(ddp), or pass guard(..., same_batch=False)",
        "hierarchy": _SAME_LAYOUT,
        "node layout": _SAME_LAYOUT,
        "gradient codec": "pass the same codec or plan, and scaler, to compress on all ranks",
        "gradient seed": "pass the same seed to compress on all ranks",
        "tensor codec": "use the same model, and least=... or plan of compress, on all ranks",
        "optimizer": "use the same optimizer settings, and scaler of compress, on all ranks",
    }
)
_DDP_SETTINGS: Final = (
    "bucket_bytes_cap find_unused_parameters static_graph gradient_as_bucket_view broadcast_buffers"
).split()


def several_ranks() -> bool:
    """Return whether torch.distributed is initialized with more than one rank."""
    is_initialized = distributed.is_available() and distributed.is_initialized()
    return is_initialized and distributed.get_world_size() > 1


def patience() -> float:
    """Return the seconds that ranks wait for each other: the default group's timeout, or 1800."""
    return limit_of_group() or COMPILING


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Raise the timeouts of all process groups to at least `seconds`; restore them on exit."""
    least, groups = timedelta(seconds=seconds), list[Any](_world.pg_map)
    backends = {
        id(backend): backend
        for group in groups
        for device in group._device_types
        if hasattr(backend := group._get_backend(torch.device(device)), "_set_default_timeout")
    }
    limits = [(backend, limit_of(backend)) for backend in backends.values()]
    changed = [(backend, limit) for backend, limit in limits if limit is not None and limit < least]
    for backend, _ in changed:
        backend._set_default_timeout(least)
    try:
        yield
    finally:
        for backend, limit in changed:
            backend._set_default_timeout(limit)


class Meeting:
    """Context in which ranks agree and report failures; raises timeouts of collectives.

    All methods raise `RankError` if a rank has failed or the store is lost. For `compiling` and
    `silence` see `guard`; with `collectives`, a process blocked in a collective is terminated.
    """

    def __init__(self, compiling: float, silence: float | None, collectives: bool = True) -> None:
        limit = limit_of_group()
        self._collectives, self._channel = collectives, Channel()
        self.rank, self.world = self._channel.rank, self._channel.world
        self._silence, self.compiling = silence or limit or COMPILING, compiling
        ends = None
        if collectives and limit is not None and limit < compiling:
            # The timeout of the group no longer ends a blocked process, as this meeting raises it.
            ends = max(limit, _LEAST)
        self.watcher = Watcher(self._channel, self._silence, compiling, ends)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Meeting:
        with self._store():
            self.watcher.start()
        self._stack.enter_context(at_least(self.compiling))
        return self

    def agree(self, about: str, mine: Statement, patient: bool = False) -> None:
        """Return once all ranks have stated the same; otherwise raise the same error on all.

        Each name `about` is used once. With `patient`, wait as long as a rank may compile.
        """
        limit = self._silence
        if patient:
            limit = self.compiling
        self.put(f"{about}/lines", json.dumps({name: list(lines) for name, lines in mine.items()}))
        if self.rank == 0:
            until, stated = time.monotonic() + limit, {}
            for rank in range(self.world):
                rest = until - time.monotonic()
                stated[rank] = json.loads(self.get(f"{about}/lines", rank, rest, about))
            difference = _difference(stated)
            self.put(f"{about}/verdict", _GOOD if difference is None else difference.to_json())
        # Rank 0 waits for each rank and reports a missing one, so the others wait 5 s longer.
        verdict = self.get(f"{about}/verdict", 0, limit + 5, about)
        if verdict != _GOOD:
            failure = Failure.from_json(verdict)
            self.watcher.learn(failure)
            raise failure.error()

    def check(self) -> None:
        """Raise `RankError` if a rank is known to have failed."""
        if self.watcher.failure is not None:
            raise self.watcher.failure.error()

    def put(self, key: str, text: str) -> None:
        """Publish a text of this rank for the other ranks."""
        with self._store():
            self._channel.put(f"{key}/{self.rank}", text)

    def get(self, key: str, rank: int, limit: float, about: str = "") -> str:
        """Return the text that `rank` puts under `key`, once it is present, within `limit` s."""
        began, pause = time.monotonic(), 0.001
        with self._store():
            while (text := self._channel.get(f"{key}/{rank}")) is None:
                self.check()
                if (waited := time.monotonic() - began) > limit:
                    reason = f"rank {rank} has not reached the comparison of {about or key} within"
                    do = "check its log; every rank must enter the same guard around the same loop"
                    failure = Failure(rank, f"{reason} {waited:.0f} s", None, do, lives=False)
                    self.watcher.report(failure)
                time.sleep(pause)
                pause = min(2 * pause, 0.1)
        return text

    def get_all(self, key: str, limit: float) -> list[str]:
        """Return the texts that all ranks put under `key`."""
        return [self.get(key, rank, limit) for rank in range(self.world)]

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._stack.close()
        if isinstance(error, SystemExit) and not error.code:
            error = None
        cause = None
        try:
            if error is not None:
                cause = self._cause(error)
                self.watcher.linger()
        except StoreLost:
            pass
        finally:
            self.watcher.stop(done=error is None)
            if self._collectives:
                communication_thread.wait_for_gloo()
        if cause is not None:
            raise cause.error() from error

    @contextlib.contextmanager
    def _store(self) -> Iterator[None]:
        try:
            yield
        except StoreLost:
            text = "the store of the process group no longer responds: its process has ended"
            where = f"rank {self.rank}; the store is in the process of rank 0, or the launcher"
            do = "find the cause in the log of this process, and restart all ranks"
            raise RankError(text, where=where, do=do) from None

    def _cause(self, error: BaseException) -> Failure | None:
        """Return the failure of another rank that caused an error; report an error of this rank."""
        # A lost connection is explained by the rank behind it within some seconds.
        lost_connection = _is_of_a_collective(error)
        if self.watcher.failure is None and lost_connection:
            self.watcher.hurry(_FOR_A_CAUSE)
        failure, is_own = self.watcher.failure, not isinstance(error, RankError)
        if failure is not None and failure.rank != self.rank and (lost_connection or is_own):
            return failure
        if isinstance(error, RankError):
            self.watcher.learn(Failure(error.rank, error.what, error.where, error.do), logs=False)
        else:
            self.watcher.report(Failure.of(self.rank, error))
        return None


@contextlib.contextmanager
def told_to_all() -> Iterator[None]:
    """Report an error of this rank to the others, which enter a meeting next, and re-raise it."""
    try:
        yield
    except QSyncError as error:
        if several_ranks():
            with contextlib.suppress(QSyncError), Meeting(patience(), None, collectives=False):
                raise error
        raise


@contextlib.contextmanager
def compiles_told(meeting: Meeting) -> Iterator[None]:
    """Report to the other ranks when this one compiles."""
    begins, ends = (functools.partial(meeting.watcher.compiles, begins) for begins in (True, False))
    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


def _is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error or a cause of it comes from a collective whose peer is gone."""
    # Errors of gloo have no class of their own, so the message is searched.
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting")
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, distributed.DistError):
            return True
        if isinstance(link, RuntimeError) and any(word in str(link) for word in words):
            return True
        link = link.__cause__
    return False


def _difference(stated: Mapping[int, Statement]) -> Failure | None:
    for section in dict.fromkeys(name for item in stated.values() for name in item):
        lines = {rank: tuple(item[section]) for rank, item in stated.items() if section in item}
        most, count = Counter(lines.values()).most_common(1)[0]
        if count == len(lines):
            continue
        usual = next(rank for rank in lines if lines[rank] == most)
        others = [rank for rank in lines if lines[rank] != most]
        where = "; ".join(
            f"rank {rank}: {_first_of([line for line in lines[rank] if line not in lines[other]])}"
            for rank, other in ((others[0], usual), (usual, others[0]))
        )
        if len(others) > 1:
            where += f" ({len(others)} ranks differ from rank {usual})"
        message = f"rank {others[0]} has another {section} than rank {usual}"
        remedy = _REMEDIES.get(section, f"use the same {section} on all ranks")
        return Failure(others[0], message, where, remedy)
    return None


def _first_of(lines: Sequence[str]) -> str:
    if not lines:
        return "the same lines in another order"
    more = f", ... ({len(lines)} in total)" if len(lines) > 3 else ""
    return ", ".join(lines[:3]) + more


def of_model(model: nn.Module) -> Statement:
    """Return the statement about a model: versions, tensors, DDP settings and plan."""
    tensors = []
    for name, p in unwrapped(model).named_parameters():
        tensors.append(f"{name} {_dtype(p)}{list(p.shape)}{'' if p.requires_grad else ' frozen'}")
    for name, buffer in unwrapped(model).named_buffers():
        tensors.append(f"buffer {name} {_dtype(buffer)}{list(buffer.shape)}")
    versions = [f"torch {torch.__version__}", f"qsync_fx {qsync_fx.__version__}"]
    stated = {"version": versions, "model": tensors}
    if (parallel := parallel_in(model)) is not None:
        stated["DDP"] = [f"{name}={getattr(parallel, name)}" for name in _DDP_SETTINGS]
    plans = [options.plan for options in options_of(model) if options.plan is not None]
    if clusters := {plan.notes[CLUSTER] for plan in plans if CLUSTER in plan.notes}:
        stated["plan for the cluster"] = sorted(clusters)
    return stated


def of_batch(args: tuple[Any, ...], kwargs: Mapping[str, Any], sizes: bool) -> Statement:
    """Return the dtype and dimensions of each tensor of a batch; with `sizes`, the samples, too."""
    leaves, _ = tree_flatten_with_path((args, dict(kwargs)))
    lines = []
    for path, leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            samples = f", {leaf.shape[0]} samples" if sizes and leaf.dim() else ""
            name = keystr(path)
            lines.append(f"{name} {_dtype(leaf)} of {leaf.dim()} dimensions{samples}")
    return {"batch": lines}


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def parallel_in(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel that a model is or contains; None without one."""
    parts = (part for part in model.modules() if isinstance(part, DistributedDataParallel))
    return next(parts, None)


def uncompiled(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that Dynamo calls without tracing it."""
    disable: Any = torch.compiler.disable
    return disable(hook)  # type: ignore[no-any-return]


def check_replicas(model: nn.Module) -> None:
    """Compare the parameters of all ranks bit by bit; call it on every rank at the same step.

    Raise `RankError` on every rank if they differ. DTensors are skipped: ranks have other shards.
    """
    if not several_ranks() or not (result := digests(model)):
        return
    mine = torch.tensor(list(result.values()))
    everyones = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everyones, mine, group=control())
    rows = [tuple(row.tolist()) for row in everyones]
    usual, count = Counter(rows).most_common(1)[0]
    if count == len(rows):
        return
    others = [rank for rank, row in enumerate(rows) if row != usual]
    where = _first_of(list(compress(result, map(ne, rows[others[0]], usual))))
    if others[1:]:
        where += f"; ranks {', '.join(map(str, others))}"
    text = f"the parameters of rank {others[0]} differ from those of rank {rows.index(usual)}"
    do = "use equal initial parameters and optimizers, and do not change averaged gradients"
    raise Failure(others[0], f"{text}; they must be bit-identical", where, do).error()


def digests(model: nn.Module) -> dict[str, int]:
    """Return a checksum of the bits of each parameter that is not a DTensor, by name."""
    return {
        name: zlib.crc32(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, p in unwrapped(model).named_parameters()
        if not isinstance(p, DTensor)
    }
