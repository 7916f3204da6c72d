"""Which codec is called what."""

from __future__ import annotations

from typing import Final

from qsync_fx.communication.codecs.casting import Cast
from qsync_fx.communication.codecs.codec import Codec
from qsync_fx.communication.codecs.onebit import Columns, Reshaped
from qsync_fx.communication.codecs.qsgd import UNITS, Qsgd
from qsync_fx.communication.codecs.truncation import LEVELS, Adaptive, Truncated
from qsync_fx.errors import OptionError, nearest
from qsync_fx.precision import FORMATS

PLAIN: Final = Cast(FORMATS["fp32"])
"""FP32 as it is: for tensors that are too small to be worth a codec."""

_CODECS: Final[tuple[Codec, ...]] = (
    PLAIN,
    *(Cast(row) for row in FORMATS.values() if row.plain and row.bits == 16),
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
