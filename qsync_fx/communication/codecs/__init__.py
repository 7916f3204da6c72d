"""Codecs of gradients: what is sent in place of FP32.

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

from qsync_fx.communication.codecs.codec import Codec, Draw
from qsync_fx.communication.codecs.names import NAMES, PLAIN, codec_named

__all__ = ["NAMES", "PLAIN", "Codec", "Draw", "codec_named"]
