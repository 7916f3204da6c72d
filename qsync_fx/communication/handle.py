"""What a user holds of a training whose gradients are compressed, whatever sends them.

Invariant: each rank saves and loads its own state, and goes on from it with the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from qsync_fx.communication.tally import Report


class Handle(ABC):
    """What `qsync_fx.distributed.compress` returns."""

    _buckets = 0
    """Buckets of the last step; units, of a model that is sharded."""

    def __repr__(self) -> str:
        """Return one line for people; it waits for no other rank."""
        return self.report().line(self._buckets)

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything that was given is sent and received.

        Raises:
            RankError: a rank is gone, or a message could not be read.
        """

    def flush(self) -> None:
        """Brings parameters to where all gradients so far have been used in full: before evaluation, before parameters are saved for use
        and at the end of training. With DUO alone something is outstanding between steps."""
        self.wait()

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns what it takes to go on with the same bits, beside the states of the model and of the optimizer. Each rank saves
        its own."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` returned on this rank. On another one, or among more or fewer, what belongs to a rank is dropped,
        with a warning.

        Raises:
            OptionError: it is of another codec or another model.
        """

    @abstractmethod
    def report(self) -> Report:
        """Returns what this rank has sent so far, how long that took, and what it changed."""

    @abstractmethod
    def statement(self) -> dict[str, list[str]]:
        """Returns what all ranks have to agree on before they send each other anything."""
