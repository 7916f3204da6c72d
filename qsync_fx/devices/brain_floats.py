"""Whether this CPU has a unit for BF16.

Invariant: a processor of which nothing is known is what torch says it is.
"""

from __future__ import annotations

from typing import Final

import torch

from qsync_fx import environment
from qsync_fx.devices.processor import cpu

_WITHOUT: Final = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of ONEDNN_MAX_CPU_ISA, which narrows what oneDNN uses and which no query of torch's knows."""


def native_bf16_unit() -> bool:
    """Whether oneDNN multiplies BF16 by a unit for it here (AVX512-BF16, AMX, Arm's), and not by converting to FP32 and back.

    Torch says that BF16 is supported from AVX-512 on. On a processor that has it without BF16 a product then takes longer than in FP32.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    features = cpu().features
    if not features:
        return True
    narrowed = environment.text("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
    return bool({"bf16", "amx"}.intersection(features)) and narrowed.upper() not in _WITHOUT
