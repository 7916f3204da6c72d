"""Which codec is called what.

Codecs of gradients: what is sent in place of FP32.

    codec       what a codec is
    qsgd        stochastic rounding between levels, 2 to 16 bits
    onebit      signs with a residual: 1bitSGD, and 1bitSGD* over consecutive values
    truncation  the highest bits of each number, as in AQGB
    casting     torch's own narrower formats, and FP32
    memory      what their kernels take, and where bytes lie
    operators   the same in torch operators, for GPUs
    fusing      these compiled, for any number of units
    names       which codec is called what

The kernels are those of cpp/codecs/kernels.cpp, for AVX-512, AVX2 and any processor, with the same bits.
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
"""FP32 as it is: for tensors that are too small to be worth a codec."""

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
    """Returns the codec of this name, with the units that the study of low-precision communication uses.

    Raises:
        OptionError: there is none.
    """
    for codec in _CODECS:
        if codec.name == name:
            return codec
    raise OptionError(f"no codec of gradients is called {name!r}", do=nearest(name, NAMES))
