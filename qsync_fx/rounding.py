"""Where stochastic rounding draws from: `stream`, which `seeding` moves with torch's seed; `layout` tells the roundings of a step apart.

Which random streams belong to whom: the one place that lays them out.

A stream is a number of 32 bits. A graph hands out those below `GRADIENTS`, one for each cast and each lowered operator, and those from
there to `RESULT` for what rounds gradients alone, and then those for dropout. The backward pass of a lowered operator draws from its own
stream plus a place of the backward pass, plus `RESULT` for what it gives out.

Invariant: no two sums are equal, as every term has bits of its own; whoever takes more than there are is told.

The ways to round, by the names that options, operators and kernels share.

The stream that stochastic rounding draws from: one number a graph and step.

Invariant: a number is a function of torch's seed, of the rank in torch.distributed when it is drawn, and of how many were drawn in this
process since the seed was set; no generator of torch's is touched. Every draw of a process has a place of its own, so graphs, steps,
micro-batches and recompilations need not be told apart. `qsync_fx.rounding` moves the stream with torch's default generator.

Seeding torch is seeding the rounding stream: `torch.random` is watched.

Why a watch: `torch.manual_seed` called again with the same seed leaves nothing behind that tells a second call from the first, unless
something has drawn from the generator in between. Functions of `torch.random` find the default generator as a global of their module; what
stands there hands everything on to it and tells the stream. So it does not matter how a function was imported, and Dynamo knows it still.

Invariant: torch's generator does what it does without us. A state that it returns is equal to the one without us; the place in the stream
rides on that tensor as an attribute, which `torch.save`, `copy.deepcopy` and pickling keep, and which `clone` loses.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, ParamSpec, TypeVar, get_args

import torch
from torch import Tensor, distributed

from qsync_fx.errors import OptionError, QSyncError, nearest, shown

GRADIENTS: Final = 1 << 28
"""The first stream of what the option "gradient_rounding" rounds."""

RESULT: Final = 1 << 29
"""Added for the results of a backward pass, which are rounded after what it reads; all that graphs hand out for roundings lies below."""

DROPOUT: Final = RESULT
"""The first stream of what the option "fast_dropout" drops: no rounding has this bit without a place of the backward pass."""

_BACKWARD: Final = 1 << 30
SHARED: Final = _BACKWARD
"""Added for an incoming gradient that both products of a backward pass read."""

BACKWARD: Final = {"shared": SHARED, "activation": 2 * _BACKWARD, "weight": 3 * _BACKWARD}
"""Added in a backward pass, by the operand whose gradient a rounding is for."""


class RandomStreams:
    """Hands out the numbers from `first` to `end` that tell the roundings of a graph and of its bodies apart; no two are equal."""

    def __init__(self, first: int = 0, end: int = GRADIENTS) -> None:
        self._next, self._end = first, end

    def take(self) -> int:
        if self._next == self._end:
            raise OverflowError(f"a graph has no more than {self._end} streams of random numbers")
        self._next += 1
        return self._next - 1


Rounding = Literal["stochastic", "nearest", "floor"]
"""stochastic: up with the probability of the fraction (QSync, section IV-A). nearest: ties to even. floor: to minus infinity."""

ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)


def rounding_mode(name: str) -> Rounding:
    """Returns `name` if it is a way to round; raises `OptionError` naming the nearest one otherwise."""
    if name not in ROUNDINGS:
        raise OptionError(f"{name!r} is not a way to round", do=nearest(str(name), ROUNDINGS))
    return name


_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Keeps Dynamo out of a function: it looks at whatever Python code runs between two graphs, and reads torch's generator for that."""
    result: Callable[_P, _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return result


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
        if numbers.keys() != {"seed", "draws"} or any(
            type(n) is not int or n < 0 for n in numbers.values()
        ):
            raise QSyncError(
                f"a state of the rounding stream is {{'seed': ..., 'draws': ...}} in whole numbers, not {shown(repr(state))}",
                where="qsync_fx.rounding_stream.load_state_dict",
                do="give what qsync_fx.rounding_stream.state_dict() returned when the checkpoint was written",
            )
        with self._lock:
            self._seed, self._draws, self._seen = (
                numbers["seed"],
                numbers["draws"],
                _seed_of_torch(),
            )

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
    return (
        distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
    )


rounding_stream = RoundingStream()


PLACE: Final = "qsync_rounding"
"""The attribute of a state of torch's generator that holds the state of the rounding stream at that time."""


class WatchedSeed:
    """Torch's default generator for `torch.random`, and a stream that moves with it."""

    def __init__(self, generator: torch.Generator, stream: RoundingStream) -> None:
        self._generator, self._stream = generator, stream

    @untraced
    def manual_seed(self, seed: int) -> torch.Generator:
        result = self._generator.manual_seed(seed)
        self._stream.restart()
        return result

    @untraced
    def seed(self) -> int:
        result = self._generator.seed()
        self._stream.restart()
        return result

    @untraced
    def get_state(self) -> Tensor:
        state = self._generator.get_state()
        setattr(state, PLACE, self._stream.state_dict())
        return state

    @untraced
    def set_state(self, state: Tensor) -> torch.Generator:
        """A state that knows no place, such as a clone, leaves the stream where it is: to go back by guess would round twice alike."""
        current = self._stream.state_dict()
        result = self._generator.set_state(state)
        self._stream.load_state_dict(getattr(state, PLACE, current))
        return result

    @untraced
    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def watch() -> None:
    """Puts the watch in place, once for all."""
    module: Any = torch.random
    if not isinstance(module.default_generator, WatchedSeed):
        module.default_generator = WatchedSeed(module.default_generator, rounding_stream)
