"""Codecs of gradients, by name: `codec_named` returns one, `NAMES` lists them.

Each module that implements codecs defines `CODECS`, a tuple of them (docs/howto-codec.md). Kernels
are in cpp/codecs/kernels.cpp, with equal bits on all processors, and in torch_kernels.py for GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from qsync_fx.communication.codecs.casts import PLAIN
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import OptionError, nearest

__all__ = ["NAMES", "PLAIN", "Codec", "Draw", "codec_named", "first_on_host"]


_CODECS: Final[Mapping[str, Codec]] = listed_in_modules(__name__, "CODECS")
NAMES: Final = tuple(_CODECS)


def codec_named(name: str) -> Codec:
    """Return the codec of this name; raise `OptionError` if it is unknown."""
    if name not in _CODECS:
        raise OptionError(f"unknown gradient codec {name!r}", do=nearest(name, NAMES))
    return _CODECS[name]


def first_on_host(codecs: Iterable[Codec]) -> str | None:
    """Return the name of the first codec that encodes in host memory; None if none does."""
    return next((codec.name for codec in codecs if codec.on_host), None)
