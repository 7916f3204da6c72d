"""Meeting of all ranks: agreement on statements and propagation of errors.

Inside a meeting, collectives may last as long as compilation, because other ranks wait in a
collective while one compiles; the watcher applies the timeout of the process group to silent ranks
instead. Invariant: an error on any rank ends the meeting on every rank with an error that names the
rank and its reason, unless the process is killed before it can report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
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
    """Return the timeout of the default process group in seconds; None if it has none."""
    limits = map(limit_of, _backends([distributed_c10d._get_default_group()]))
    return min((limit.total_seconds() for limit in limits if limit is not None), default=None)


@contextlib.contextmanager
def at_least(seconds: float) -> Iterator[None]:
    """Raise the timeouts of all process groups to at least `seconds`; restore them on exit."""
    least, groups = timedelta(seconds=seconds), list(distributed_c10d._world.pg_map)
    limits = [(backend, limit_of(backend)) for backend in _backends(groups)]
    changed = [(backend, limit) for backend, limit in limits if limit is not None and limit < least]
    for backend, _ in changed:
        backend._set_default_timeout(least)
    try:
        yield
    finally:
        for backend, limit in changed:
            backend._set_default_timeout(limit)


def _backends(groups: Iterable[Any]) -> list[Any]:
    """Return the backends of process groups that have a timeout."""
    result = {}
    for group in groups:
        for device in group._device_types:
            backend = group._get_backend(torch.device(device))
            if hasattr(backend, "_set_default_timeout"):
                result[id(backend)] = backend
    return list(result.values())


def patience() -> float:
    """Return the seconds that ranks wait for each other: the default group's timeout, or 1800."""
    return limit_of_group() or _PATIENCE


COMPILING: Final = 1800.0
_FOR_A_CAUSE: Final = 12.0
"""Seconds to wait for the cause of a failed collective: a report, or a detected silence."""
_LEAST: Final = 10.0
"""Minimum seconds between another rank's failure and the termination of a blocked process."""


def several_ranks() -> bool:
    """Return whether torch.distributed is initialized with more than one rank."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )


class Meeting:
    """Context in which ranks agree and report failures; raises timeouts of collectives.

    Args:
        compiling: seconds that a rank may compile.
        silence: seconds without a heartbeat until a rank counts as failed; by default the timeout
            of the process group.
        collectives: whether ranks may be blocked in a collective when another fails: then a process
            that stays blocked is terminated.
    """

    def __init__(self, compiling: float, silence: float | None, collectives: bool = True) -> None:
        limit = limit_of_group()
        self._collectives = collectives
        self._channel = Channel()
        self.rank, self.world = self._channel.rank, self._channel.world
        self._silence, self.compiling = silence or limit or COMPILING, compiling
        ends = None
        if collectives and limit is not None and limit < compiling:
            # The timeout of the group no longer ends a blocked process, as this meeting raises it.
            ends = max(limit, _LEAST)
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
        """Return once all ranks have stated the same.

        Args:
            about, mine, do: as of `agreement.agree`.
            patient: wait as long as a rank may compile, instead of the limit of silence.

        Raises:
            RankError: on every rank: statements differ, a rank does not arrive, or one has failed.
        """
        limit = self.compiling if patient else self._silence
        agree(self._channel, self.watcher, about, mine, limit, do)

    def check(self) -> None:
        """Raise `RankError` if a rank is known to have failed."""
        if self.watcher.failure is not None:
            raise self.watcher.failure.error()

    def put(self, key: str, text: str) -> None:
        """Publish a text of this rank for the other ranks."""
        try:
            self._channel.put(f"{key}/{self.rank}", text)
        except StoreLost:
            raise lost(self.rank) from None

    def get(self, key: str, rank: int, limit: float) -> str:
        """Return the text that `rank` puts under `key`, once it is present.

        Raises:
            RankError: `limit` seconds have passed, or a rank has failed.
        """
        try:
            return awaited(self._channel, self.watcher, f"{key}/{rank}", rank, limit, key)
        except StoreLost:
            raise lost(self.rank) from None

    def get_all(self, key: str, limit: float) -> list[str]:
        """Return the texts that all ranks put under `key`; raise as `get` does."""
        return [self.get(key, rank, limit) for rank in range(self.world)]

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Report an error to the other ranks, or raise the failure that caused it.

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
        """Return the failure of another rank that caused an error; None for this rank's own error.

        Report an error of this rank to the others.
        """
        # A lost connection is explained by the rank behind it within some seconds.
        lost_connection = _is_of_a_collective(error)
        if self.watcher.failure is None and lost_connection:
            self.watcher.hurry()
            self.watcher.wait(_FOR_A_CAUSE)
        failure, is_own = self.watcher.failure, not isinstance(error, RankError)
        if failure is not None and failure.rank != self.rank and (lost_connection or is_own):
            return failure
        if isinstance(error, RankError):
            self.watcher.learn(Failure(error.rank, error.what, error.where, error.do), logs=False)
        else:
            self.watcher.tell(Failure.of(self.rank, error))
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
    """Return whether an error or a cause of it comes from a collective whose peer is gone.

    Errors of gloo have no class of their own, so the message is searched.
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
