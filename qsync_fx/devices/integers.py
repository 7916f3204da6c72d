"""What this CPU makes of products of integers: by the native module, and by oneDNN."""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from qsync_fx import _C
from qsync_fx.errors import OptionError
from qsync_fx.precision import precision


@functools.cache
def cpu_multiplies_integers() -> bool:
    """Whether oneDNN's products of INT8 matrices are exact on this CPU.

    Without VNNI (AVX2, and AVX-512 before Cascade Lake) oneDNN adds two products up in 16 bits, saturated, so that eight of 127 by 127
    come out as 1020 (docs/known-issues.md). That is tried, not looked up: what oneDNN uses is narrowed by ONEDNN_MAX_CPU_ISA, which no
    query of torch's knows.
    """
    # Whoever asks may be tracing, where nothing has a value.
    with _disable_current_modes():
        int8 = precision("int8")
        largest = torch.full((4, 8), int(int8.max), dtype=int8.dtype, device="cpu")
        found = [torch._int_mm(largest, sign * largest.t()) * sign for sign in (1, -1)]
        return all(bool((sums == 8 * int8.max**2).all()) for sums in found)


@functools.cache
def wrong_path() -> OptionError | None:
    """Returns why the native module computes nothing here: QSYNC_CPU_ISA is wrong; None where it is not.

    It is raised where something is computed; whoever looks a machine over is to see the rest of it.
    """
    try:
        _C.isa()
    except OptionError as error:
        return error
    return None


@functools.cache
def native_integer_unit() -> bool:
    """Whether the native module multiplies INT8 by a unit for it (AMX, VNNI), and not by arithmetic that floats are as fast in."""
    return wrong_path() is None and _C.isa() in ("amx", "avx512_vnni")
