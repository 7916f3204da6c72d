"""Seeding torch is seeding the rounding stream: `torch.random` is watched.

Why a watch: `torch.manual_seed` called again with the same seed leaves nothing behind that tells a second call from the first, unless
something has drawn from the generator in between. Functions of `torch.random` find the default generator as a global of their module; what
stands there hands everything on to it and tells the stream. So it does not matter how a function was imported, and Dynamo knows it still.

Invariant: torch's generator does what it does without us. A state that it returns is equal to the one without us; the place in the stream
rides on that tensor as an attribute, which `torch.save`, `copy.deepcopy` and pickling keep, and which `clone` loses.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from qsync_fx.rounding.stream import RoundingStream, rounding_stream, untraced

PLACE: Final = "qsync_rounding"
"""The attribute of a state of torch's generator that holds the state of the rounding stream at that time."""


class Watched:
    """Torch's default generator for `torch.random`, and a stream that moves with it."""

    def __init__(self, generator: torch.Generator, stream: RoundingStream) -> None:
        self._generator, self._stream = generator, stream

    @untraced
    def manual_seed(self, seed: int) -> torch.Generator:
        found = self._generator.manual_seed(seed)
        self._stream.restart()
        return found

    @untraced
    def seed(self) -> int:
        found = self._generator.seed()
        self._stream.restart()
        return found

    @untraced
    def get_state(self) -> Tensor:
        state = self._generator.get_state()
        setattr(state, PLACE, self._stream.state_dict())
        return state

    @untraced
    def set_state(self, state: Tensor) -> torch.Generator:
        """A state that knows no place, such as a clone, leaves the stream where it is: to go back by guess would round twice alike."""
        here = self._stream.state_dict()
        found = self._generator.set_state(state)
        self._stream.load_state_dict(getattr(state, PLACE, here))
        return found

    @untraced
    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)


def watch() -> None:
    """Puts the watch in place, once for all."""
    module: Any = torch.random
    if not isinstance(module.default_generator, Watched):
        module.default_generator = Watched(module.default_generator, rounding_stream)
