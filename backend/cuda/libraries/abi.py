"""The C interface of compiled kernels: pointers and numbers, no torch.

Invariant: these structures and cpp/cutlass/abi.h say the same; a test compiles the header and compares sizes and offsets. Whoever changes
one raises `VERSION`, which is part of every library's key and which each library returns when asked.

Every library has the functions

    int qsync_abi(void)                                        VERSION
    const char *qsync_name(void)                               the name of its Unit
    int qsync_can_implement(const Arguments *)                 0, or a status
    int64_t qsync_workspace(const Arguments *)                 bytes
    int qsync_run(const Arguments *, void *workspace, void *stream)    0, or a status
    int qsync_shared_memory(void)                              bytes a threadblock
    const char *qsync_error(int status)
"""

from __future__ import annotations

import ctypes
from typing import Final

VERSION: Final = 1

_P, _I64, _I32, _U32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_uint32


class GemmArguments(ctypes.Structure):
    """`d = a @ b * a_scale * b_scale + bias`; strides in elements, of the dimension that is not contiguous."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I64) for name in ("lda", "ldb", "ldd")),
        *((name, _I32) for name in ("m", "n", "k")),
        # 1: a scale for each row (column); 0: one for all. Pointers may be null: scale 1, bias 0.
        ("a_scale_per_row", _I32),
        ("b_scale_per_column", _I32),
        ("split", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class ConvArguments(ctypes.Structure):
    """Packed NHWC tensors: x `[n, h, w, c]`, weight `[k, r, s, c]`, y `[n, p, q, k]`; `a`, `b`, `d` by operation, see ConvProblem."""

    _fields_ = (
        *((name, _P) for name in ("a", "b", "d", "a_scale", "b_scale", "bias")),
        *((name, _I32) for name in ("n", "h", "w", "c", "k", "r", "s", "p", "q")),
        *((name, _I32) for name in ("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w")),
        ("b_scale_per_channel", _I32),
        ("split", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class QuantizeArguments(ctypes.Structure):
    """Largest magnitude in two steps, then rounding; see `qsync::quantize` for what is computed.

    `x` is a matrix `[rows, columns]` with the stride `ldx` between rows. `q` and, unless null, its transpose `qt` `[columns, rows]` have no
    gaps. `group`: 0 one scale, 1 a scale for each row, 2 a scale for each column. `seed` points to one int64 in device memory.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "q", "qt", "scale", "seed")),
        *((name, _I64) for name in ("rows", "columns", "ldx")),
        ("stream", _U32),
        ("x_type", _I32),  # 0 float32, 1 float16, 2 bfloat16
        ("format", _I32),  # 0 int8, 1 float8_e4m3fn, 2 float8_e5m2
        ("rounding", _I32),  # 0 nearest, 1 stochastic, 2 floor
        ("group", _I32),
        ("device", _I32),
        ("multiprocessors", _I32),
    )


class ConvertArguments(ctypes.Structure):
    """Copies of matrices: `y[b, r, c] = x[b, r, c] * scale` or, turned, `x[b, c, r] * scale`, and zeros where `x` has nothing.

    `x` is `batches` matrices `[rows, columns]`, with the stride `ldx` between rows and `batch_stride` between matrices. `y` is `y_batches`
    matrices `[y_rows, y_columns]` without gaps. `scale` points to one FP32 number in device memory; null: 1. Types are the numbers of
    `convert_source.ELEMENTS`.
    """

    _fields_ = (
        *((name, _P) for name in ("x", "y", "scale")),
        *(
            (name, _I64)
            for name in ("batches", "rows", "columns", "ldx", "batch_stride", "y_batches", "y_rows", "y_columns")
        ),
        *((name, _I32) for name in ("x_type", "y_type", "turned")),
        ("device", _I32),
        ("multiprocessors", _I32),
    )
