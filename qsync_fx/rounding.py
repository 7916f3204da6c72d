"""Random numbers for stochastic rounding: rounding modes, stream layout, and seeding.

`RandomStreams` numbers the roundings of a graph by 32-bit stream ids. A graph assigns ids below
`GRADIENTS` to casts and lowered operators, ids up to `RESULT` to gradient rounding, and ids from
`DROPOUT` to dropout; the backward pass adds an offset per operand (`BACKWARD`), and `RESULT` for
its outputs. No two sums are equal, because each term has its own bits. `RoundingStream` draws one
number per graph and step, without use of torch's generators. `watch` couples it to the seed of
torch's default generator.
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
"""First stream id for roundings by the option "gradient_rounding"."""

RESULT: Final = 1 << 29
"""Offset for outputs of a backward pass; stream ids of roundings are below it."""

DROPOUT: Final = RESULT
"""First stream id of dropout by the option "fast_dropout".

Rounding ids have this bit only together with an offset of `BACKWARD`.
"""

_BACKWARD: Final = 1 << 30
SHARED: Final = _BACKWARD
"""Offset for an incoming gradient that both products of a backward pass read."""

BACKWARD: Final = {"shared": SHARED, "activation": 2 * _BACKWARD, "weight": 3 * _BACKWARD}
"""Offsets in a backward pass, by the operand whose gradient is rounded."""


class RandomStreams:
    """Allocator of unique stream ids from `first` up to `end`, exclusive, for one graph."""

    def __init__(self, first: int = 0, end: int = GRADIENTS) -> None:
        self._next, self._end = first, end

    def take(self) -> int:
        if self._next == self._end:
            raise OverflowError(f"a graph has at most {self._end} streams of random numbers")
        self._next += 1
        return self._next - 1


Rounding = Literal["stochastic", "nearest", "floor"]
"""Rounding modes.

stochastic: up with the probability of the fraction (QSync, section IV-A). nearest: ties to even.
floor: toward minus infinity.
"""

ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)


def rounding_mode(name: str) -> Rounding:
    """Return `name` if it is a rounding mode; raise `OptionError` otherwise."""
    if name not in ROUNDINGS:
        raise OptionError(f"{name!r} is not a rounding mode", do=nearest(str(name), ROUNDINGS))
    return name


_P = ParamSpec("_P")
_T = TypeVar("_T")


def untraced(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Disable Dynamo for a function that runs between graphs and reads torch's generator."""
    result: Callable[_P, _T] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return result


class RoundingStream:
    """Position of stochastic rounding in its random stream; `qsync_fx.rounding_stream` is global.

    A number is a hash of torch's seed, the rank, and the number of draws in this process since
    seeding, so graphs, steps, micro-batches and recompilations need no ids. The stream follows
    torch's default generator: `torch.manual_seed` restarts it, and `torch.set_rng_state` restores
    its position at `torch.get_rng_state`. It can be checkpointed by its `state_dict` and
    `load_state_dict`, for example with Accelerate's `register_for_checkpointing` or
    torch.distributed.checkpoint.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seed: int | None = None
        self._torch_seed: int | None = None
        self._draws = 0

    @untraced
    def draw(self) -> int:
        """Return the next number of the stream, in [0, 2**62)."""
        with self._lock:
            place = self._notice(), _rank(), self._draws
            self._draws += 1
        return number(*place)

    @untraced
    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON-compatible integers.

        Each rank has its own position, because the plans of ranks may draw different amounts.
        """
        with self._lock:
            seed = self._notice()
            return {"seed": seed, "draws": self._draws}

    @untraced
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state_dict` returned, in this process or another."""
        numbers = dict(state) if isinstance(state, Mapping) else {}
        if numbers.keys() != {"seed", "draws"} or any(
            type(n) is not int or n < 0 for n in numbers.values()
        ):
            raise QSyncError(
                "the state of the rounding stream must be {'seed': ..., 'draws': ...} with "
                f"integers of 0 or more, not {shown(repr(state))}",
                where="qsync_fx.rounding_stream.load_state_dict",
                do="pass the result of qsync_fx.rounding_stream.state_dict()",
            )
        with self._lock:
            self._seed, self._draws = numbers["seed"], numbers["draws"]
            self._torch_seed = _seed_of_torch()

    @untraced
    def restart(self) -> None:
        """Restart the stream from torch's seed."""
        with self._lock:
            self._torch_seed = None

    def _notice(self) -> int:
        """Restart the stream if torch's seed has changed; return the seed of the stream."""
        now = _seed_of_torch()
        if self._seed is None or now != self._torch_seed:
            self._seed, self._draws, self._torch_seed = now, 0, now
        return self._seed


def number(seed: int, rank: int, draws: int) -> int:
    """Return the number at a position, in [0, 2**62): a hash, so numbers are uncorrelated."""
    place = f"{seed} {rank} {draws}".encode()
    return int.from_bytes(hashlib.blake2b(place, digest_size=8).digest(), "little") >> 2


def _seed_of_torch() -> int:
    return torch.default_generator.initial_seed()


def _rank() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return 0


rounding_stream = RoundingStream()


PLACE: Final = "qsync_rounding"
"""Attribute of torch's generator state that stores the position of the rounding stream."""


class WatchedSeed:
    """Wrapper of torch's default generator that moves the rounding stream with it.

    It replaces the global `default_generator` of `torch.random`, because a repeated
    `torch.manual_seed` with the same seed is not detectable from the generator's state. The
    position of the stream is an attribute of the returned state tensor: `torch.save`,
    `copy.deepcopy` and pickle preserve it, `clone` does not.
    """

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
        """Restore the generator, and the stream if the state has a position.

        A state without a position, such as a clone, does not move the stream: a guessed position
        would repeat random numbers.
        """
        current = self._stream.state_dict()
        result = self._generator.set_state(state)
        self._stream.load_state_dict(getattr(state, PLACE, current))
        return result

    @untraced
    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def watch() -> None:
    """Install the wrapper in `torch.random`; further calls have no effect."""
    module: Any = torch.random
    if not isinstance(module.default_generator, WatchedSeed):
        module.default_generator = WatchedSeed(module.default_generator, rounding_stream)
