"""The stream that stochastic rounding draws from: one number a graph and step.

Invariant: a number is a function of torch's seed, of the rank in torch.distributed when it is drawn, and of how many were drawn in this
process since the seed was set; no generator of torch's is touched. Every draw of a process has a place of its own, so graphs, steps,
micro-batches and recompilations need not be told apart. `qsync_fx.rounding.seeding` moves the stream with torch's default generator.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed

from qsync_fx.errors import QSyncError, shown

_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keeps Dynamo out of a function: it looks at whatever Python code runs between two graphs, and reads torch's generator for that."""
    found: Callable[_P, _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return found


class RoundingStream:
    """Where stochastic rounding is in its stream of random numbers; `qsync_fx.rounding_stream` is the one of this process.

    It moves with torch's default generator: `torch.manual_seed` restarts it, and `torch.set_rng_state` puts it back to where it was at
    `torch.get_rng_state`. What keeps and restores the state of training through `state_dict` and `load_state_dict`, as Accelerate's
    `register_for_checkpointing` and torch.distributed.checkpoint do, can keep it as it is.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._seen: int | None = None
        self._draws = 0

    @untraced
    def draw(self) -> int:
        """Returns the next number of the stream, at least 0 and below 2**62."""
        with self._lock:
            place = self._notice(), _rank(), self._draws
            self._draws += 1
        return number(*place)

    @untraced
    def state_dict(self) -> dict[str, int]:
        """Returns the place in the stream: whole numbers, which JSON holds. Each rank has its own: plans may differ, so draws may."""
        with self._lock:
            seed = self._notice()
            return {"seed": seed, "draws": self._draws}

    @untraced
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a place that `state_dict` has returned, in this process or in another.

        Raises:
            QSyncError: it is no such state.
        """
        numbers = dict(state) if isinstance(state, Mapping) else {}
        if numbers.keys() != {"seed", "draws"} or any(type(n) is not int or n < 0 for n in numbers.values()):
            raise QSyncError(
                f"a state of the rounding stream is {{'seed': ..., 'draws': ...}} in whole numbers, not {shown(repr(state))}",
                where="qsync_fx.rounding_stream.load_state_dict",
                do="give what qsync_fx.rounding_stream.state_dict() returned when the checkpoint was written",
            )
        with self._lock:
            self._seed, self._draws, self._seen = numbers["seed"], numbers["draws"], _seed_of_torch()

    @untraced
    def restart(self) -> None:
        """Goes to the start of the stream of torch's seed."""
        with self._lock:
            self._seen = None

    def _notice(self) -> int:
        """Restarts the stream where torch's generator was given another seed, by whatever way; returns the stream's seed."""
        now = _seed_of_torch()
        if self._seed is None or now != self._seen:
            self._seed, self._draws, self._seen = now, 0, now
        return self._seed


def number(seed: int, rank: int, draws: int) -> int:
    """Returns what the stream gives at a place, at least 0 and below 2**62: a hash, so that no two places have anything in common."""
    place = f"{seed} {rank} {draws}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 2


def _seed_of_torch() -> int:
    return torch.default_generator.initial_seed()


def _rank() -> int:
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


rounding_stream = RoundingStream()
