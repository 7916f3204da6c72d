"""Codecs of gradients, by name: `codec_named` returns one, `NAMES` lists them.

`Codec` (codec.py) is the interface; implementations are QSGD (qsgd.py), 1bitSGD (onebit.py), and
AQGB's truncation and casts (truncation.py). The kernels are in cpp/codecs/kernels.cpp, with equal
bits on AVX-512, AVX2 and any other processor; torch_kernels.py has the same codecs for GPUs.
"""

from __future__ import annotations

from typing import Final

from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.communication.codecs.onebit import Columns, Reshaped
from qsync_fx.communication.codecs.qsgd import UNITS, Qsgd
from qsync_fx.communication.codecs.truncation import LEVELS, Adaptive, CastCodec, Truncated
from qsync_fx.errors import OptionError, nearest
from qsync_fx.formats import FORMATS

__all__ = ["NAMES", "PLAIN", "Codec", "Draw", "codec_named"]


PLAIN: Final = CastCodec(FORMATS["fp32"])
"""FP32 without coding: for tensors too small to benefit from a codec."""

_CODECS: Final[tuple[Codec, ...]] = (
    PLAIN,
    *(CastCodec(row) for row in FORMATS.values() if row.plain and row.bits == 16),
    Columns(),
    Reshaped(64),
    *(Qsgd(bits, size) for bits, size in UNITS.items()),
    *(Truncated(bits) for bits in LEVELS),
    Adaptive(),
)
NAMES: Final = tuple(codec.name for codec in _CODECS)


def codec_named(name: str) -> Codec:
    """Return the codec of this name.

    Unit sizes are from the study of low-precision communication (see `qsgd`).

    Raises:
        OptionError: the name is unknown.
    """
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise OptionError(f"unknown gradient codec {name!r}", do=nearest(name, NAMES))
