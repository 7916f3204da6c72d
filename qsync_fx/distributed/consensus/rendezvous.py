"""A meeting of all ranks: they see how the others fare, agree on what they state, and leave it together where one fails.

Invariant: an error on any rank, whatever it is, ends the meeting on every rank with an error that names the rank and its reason, unless a
process is killed before it can tell. A rank's own error stays what it is.

The time that collectives of this process's groups may take.

A group's limit is for a rank that is lost, and a rank that compiles is not: while it does, others wait for it in a collective. So under a
guard collectives may take as long as compiling may, and the group's own limit is that of a rank that says nothing, which its watcher keeps.

Invariant: what was there before is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Final

import torch
from torch import distributed
from torch._dynamo.callback import callback_handler
from torch.distributed import distributed_c10d

from qsync_fx.communication import communication_thread
from qsync_fx.communication.control_group import limit_of
from qsync_fx.distributed.consensus.agreement import Statement, agree, awaited, lost
from qsync_fx.distributed.consensus.rank_liveness import Watcher
from qsync_fx.distributed.consensus.store_channel import Channel, Failure, StoreLost
from qsync_fx.errors import QSyncError, RankError

_PATIENCE: Final = 1800.0


def limit_of_group() -> float | None:
    """Returns the seconds that collectives of the default group may take; None where it does not say."""
    result = [seconds for backend in _backends() if (seconds := _limit(backend)) is not None]
    return min(result, default=None)


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Lets collectives take so long, where they may not take longer anyway."""
    changed = [
        (b, limit)
        for b in _backends(every=True)
        if (limit := _limit(b)) is not None and limit < seconds
    ]
    for backend, _ in changed:
        backend._set_default_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        for backend, limit in changed:
            backend._set_default_timeout(timedelta(seconds=limit))


def _backends(every: bool = False) -> list[Any]:
    groups: list[Any] = (
        list(distributed_c10d._world.pg_map) if every else [distributed_c10d._get_default_group()]
    )
    result = {}
    for group in groups:
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            if hasattr(backend, "_set_default_timeout"):
                result[id(backend)] = backend
    return list(result.values())


def _limit(backend: Any) -> float | None:
    limit = limit_of(backend)
    return None if limit is None else limit.total_seconds()


def patience() -> float:
    """Returns the seconds for which ranks wait for one another: the limit of the default group, or half an hour."""
    return limit_of_group() or _PATIENCE


COMPILING: Final = 1800.0
_FOR_A_CAUSE: Final = 12.0
"""Seconds after a failed collective in which some rank must have told, or have been silent long enough to be found gone."""
_LEAST: Final = 10.0
"""Seconds that a process has at least to come back from where it waits, once another rank has failed."""


def several_ranks() -> bool:
    """Whether torch.distributed is up, with more ranks than one."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class Meeting:
    """The context; collectives in it may take as long as compiling.

    Args:
        compiling: seconds that a rank may compile.
        silence: seconds that a rank may say nothing; by default the limit of the process group.
        collectives: whether ranks may wait for one that has failed in a collective: then a process that does not come back is ended.

    Attributes:
        rank, world: this rank's number, of how many.
        compiling: as given.
    """

    def __init__(self, compiling: float, silence: float | None, collectives: bool = True) -> None:
        limit = limit_of_group()
        self._collectives = collectives
        self._channel = Channel()
        self.rank, self.world = self._channel.rank, self._channel.world
        self._silence, self.compiling = silence or limit or COMPILING, compiling
        # Only where it is given more time than the group has does a process need an end of its own.
        ends = (
            max(limit, _LEAST) if collectives and limit is not None and limit < compiling else None
        )
        self.watcher = Watcher(self._channel, self._silence, compiling, ends)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Meeting:
        try:
            self.watcher.start()
        except StoreLost:
            raise lost(self.rank) from None
        self._stack.enter_context(at_least(self.compiling))
        return self

    def agree(
        self, about: str, mine: Statement, do: Mapping[str, str], patient: bool = False
    ) -> None:
        """Returns once all ranks have stated the same; `patient` waits for them as long as they may compile.

        Raises:
            RankError: on every rank: they differ, one of them does not come, or one has failed.
        """
        agree(
            self._channel,
            self.watcher,
            about,
            mine,
            self.compiling if patient else self._silence,
            do,
        )

    def check(self) -> None:
        """Raises `RankError` where a rank is known to have failed."""
        if self.watcher.failure is not None:
            raise self.watcher.failure.error()

    def put(self, key: str, text: str) -> None:
        """Gives a text to the other ranks."""
        try:
            self._channel.put(f"{key}/{self.rank}", text)
        except StoreLost:
            raise lost(self.rank) from None

    def get(self, key: str, rank: int, limit: float) -> str:
        """Returns the text that a rank gives, once it does; raises `RankError` if it fails, or takes longer."""
        try:
            return awaited(self._channel, self.watcher, f"{key}/{rank}", rank, limit, key)
        except StoreLost:
            raise lost(self.rank) from None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Tells the others of an error, or says whose failure it comes from.

        Raises:
            RankError: another rank has failed.
        """
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

    def _cause(self, error: BaseException) -> Failure | None:
        """Return the failure of another rank that caused an error; None for an error of this rank or one that names its cause.

        Report an error of this rank to the others. A `RankError` names its rank already, unless it comes from a lost connection: then
        the rank behind that connection has reported its reason, or reports it within some seconds.
        """
        lost_connection = _is_of_a_collective(error)
        if self.watcher.failure is None and lost_connection:
            self.watcher.hurry()
            self.watcher.wait(_FOR_A_CAUSE)
        failure = self.watcher.failure
        if (
            failure is not None
            and failure.rank != self.rank
            and (lost_connection or not isinstance(error, RankError))
        ):
            return failure
        if isinstance(error, RankError):
            self.watcher.learn(Failure(error.rank, error.what, error.where, error.do), logs=False)
        else:
            self.watcher.tell(Failure.of(self.rank, error))
        return None


@contextlib.contextmanager
def told_to_all() -> Iterator[None]:
    """Tells the other ranks, which come to a meeting next, of an error on this one; it stays what it is."""
    try:
        yield
    except QSyncError as error:
        if several_ranks():
            with contextlib.suppress(QSyncError), Meeting(patience(), None, collectives=False):
                raise error
        raise


@contextlib.contextmanager
def compiles_told(meeting: Meeting) -> Iterator[None]:
    """Tells the other ranks when this one compiles."""

    def begins(_: Any) -> None:
        meeting.watcher.compiles(True)

    def ends(_: Any) -> None:
        meeting.watcher.compiles(False)

    callback_handler.register_start_callback(begins)
    callback_handler.register_end_callback(ends)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begins)
        callback_handler.remove_end_callback(ends)


def _is_of_a_collective(error: BaseException) -> bool:
    """Return whether an error, or one that it was raised from, is what torch.distributed raises where another rank is gone.

    Errors of gloo have no class of their own.
    """
    words = ("gloo", "NCCL", "Connection closed", "Connection reset", "Timed out waiting")
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, distributed.DistError):
            return True
        if isinstance(link, RuntimeError) and any(word in str(link) for word in words):
            return True
        link = link.__cause__
    return False
