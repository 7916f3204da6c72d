"""Codecs of gradients, by name: `codec_named` returns one, `NAMES` lists them.

`Codec` (codec.py) is the interface. Each module that implements codecs defines `CODECS`, a tuple of
them; a new codec is a new module (docs/howto-codec.md). Implementations are casts (casts.py), QSGD
(qsgd.py), 1bitSGD (onebit.py) and AQGB's truncation (truncation.py). Their kernels are in
cpp/codecs/kernels.cpp, with equal bits on AVX-512, AVX2 and any other processor; torch_kernels.py
has the same codecs for GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from qsync_fx.communication.codecs.casts import PLAIN
from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.entry_points import listed_in_modules
from qsync_fx.errors import OptionError, nearest

__all__ = ["NAMES", "PLAIN", "Codec", "Draw", "codec_named"]


_CODECS: Final[Mapping[str, Codec]] = listed_in_modules(__name__, "CODECS")
NAMES: Final = tuple(_CODECS)


def codec_named(name: str) -> Codec:
    """Return the codec of this name.

    Unit sizes are from the study of low-precision communication (see `qsgd`).

    Raises:
        OptionError: the name is unknown.
    """
    if name not in _CODECS:
        raise OptionError(f"unknown gradient codec {name!r}", do=nearest(name, NAMES))
    return _CODECS[name]
