"""BF16 products of the native module compared with oneDNN and its block kernel (brgemm).

`cpu_kernels.py --only bf16` runs these cases. Operands are BF16 in memory; weight gradients are
FP32. The native kernel and oneDNN, called through torch, pack operands in each call. brgemm reads
packed operands and leaves results in FP32, or INT32 for unsigned by signed bytes, so it shows the
rate of the inner kernel on the native kernel's block sizes. Signed by signed brgemm is excluded: it
is wrong without AMX (torch 2.13). "faster_than_bf16" is oneDNN's time divided by a case's.

Fused activations are compared with the product followed by Inductor's activation kernel;
"of_behind" is the ratio to this sequence.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.support.harness import Row, by_size, measure
from qsync_fx import _C

PEER: Final = "oneDNN bf16"
SHAPES: Final = (
    *((rows, *layer) for rows in (512, 2048) for layer in ((768, 768), (3072, 768), (768, 3072))),
    (1024, 2304, 768),
    (1576, 768, 768),
    (1576, 3072, 768),
)
"""Rows, output and input channels of layers of BERT-base, GPT-2 and ViT-B (8 x 197 tokens)."""

BF16: Final = torch.bfloat16
_NAMES: Final[dict[torch.dtype, str]] = {
    torch.float32: "float32",
    BF16: "bfloat16",
    torch.int32: "int32",
}
_WIDE: Final = 64  # columns of a packed block, as in brgemm.cpp


@functools.cache
def brgemm() -> ctypes.CDLL | None:
    """Return the compiled library of brgemm.cpp, or None if compilation fails."""
    from torch.utils.cpp_extension import load

    try:
        path = load(
            "qsync_brgemm", [str(Path(__file__).with_name("brgemm.cpp"))], is_python_module=False
        )
    except (OSError, RuntimeError) as error:
        print(f"without brgemm: {str(error).splitlines()[0]}")
        return None
    return ctypes.CDLL(str(path))


def packed(b: Tensor) -> Tensor:
    """Return `b` [K, N] in brgemm's format: column blocks, 4-byte groups along K contiguous."""
    values = 4 // b.itemsize
    k, n = b.shape
    return b.reshape(k // values, values, n // _WIDE, _WIDE).permute(2, 0, 3, 1).contiguous()


def by_blocks(
    name: str, a: Tensor, b: Tensor, dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    """Return a call of brgemm; empty if the kernel is unavailable or its result is wrong."""
    library, (m, k), n = brgemm(), a.shape, b.shape[1]
    if library is None or n % _WIDE or k % 4:
        return {}
    function = library[f"brgemm_{name}"]
    left, right, result = a.contiguous(), packed(b), torch.empty(m, n, dtype=dtype)
    sizes = [ctypes.c_int64(size) for size in (m, n, k)]
    addresses = [ctypes.c_void_p(t.data_ptr()) for t in (left, right, result)]

    def call() -> Sequence[Tensor]:
        function(*sizes, *addresses)
        return left, right, result  # the closure owns the operands

    exact = left.double() @ b.double()
    if function(*sizes, *addresses) or not torch.allclose(
        result.double(), exact, rtol=1e-3, atol=1e-3 * k**0.5
    ):
        return {}
    return {f"brgemm {name}, packed": call}


def ours(
    a: Tensor,
    b: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    activation: _C.Activation = "none",
) -> Tensor:
    result = torch.empty(a.shape[0], b.shape[1], dtype=dtype)
    _C.gemm(
        *(
            a.data_ptr(),
            b.data_ptr(),
            result.data_ptr(),
            a.shape[0],
            b.shape[1],
            a.shape[1],
            a.stride(),
            b.stride(),
        ),
        dtype=_NAMES[dtype],  # type: ignore[arg-type]
        bias=0 if bias is None else bias.data_ptr(),
        threads=torch.get_num_threads(),
        operands="int8" if a.dtype == torch.int8 else "bfloat16",
        activation=activation,
    )
    return result


def cases(rows: int, channels: int, inner: int) -> dict[str, dict[str, Callable[[], object]]]:
    x, w, g = (
        torch.randn(*shape).to(BF16)
        for shape in ((rows, inner), (channels, inner), (rows, channels))
    )
    bias = torch.randn(channels)
    narrow = bias.to(BF16)
    xq, wq = (torch.randint(-127, 128, t.shape, dtype=torch.int8) for t in (x, w))
    unsigned = torch.randint(0, 256, x.shape, dtype=torch.uint8)
    return {
        "forward, product alone": {
            PEER: lambda: F.linear(x, w, narrow),
            "bf16 kernel": lambda: ours(x, w.t(), BF16, bias),
            **by_blocks("bf16", x, w.t(), torch.float32),
            "int8 kernel, sums": lambda: ours(xq, wq.t(), torch.int32),
            **by_blocks("u8s8", unsigned, wq.t(), torch.int32),
        },
        "input gradient, product alone": {
            PEER: lambda: g @ w,
            "bf16 kernel": lambda: ours(g, w, BF16),
            **by_blocks("bf16", g, w, torch.float32),
        },
        "weight gradient, product alone": {
            PEER: lambda: (g.t() @ x).float(),
            "bf16 kernel": lambda: ours(g.t(), x, torch.float32),
            **by_blocks("bf16", g.t(), x, torch.float32),
        },
    }


def activations(
    rows: int, channels: int, inner: int, dtype: torch.dtype
) -> dict[str, dict[str, Callable[[], object]]]:
    x, w = (
        torch.randint(-100, 101, shape).to(dtype) for shape in ((rows, inner), (channels, inner))
    )
    bias = torch.randn(channels)
    # Inductor's kernel contains the same formula; these calls have no tensor parameters.
    kernels: dict[_C.Activation, Callable[[Tensor], Tensor]] = {
        "relu": torch.compile(lambda y: torch.relu(y)),
        "gelu": torch.compile(lambda y: F.gelu(y)),
        "gelu_tanh": torch.compile(lambda y: F.gelu(y, approximate="tanh")),
    }
    return {
        name: {
            "behind": lambda kernel=kernel: kernel(ours(x, w.t(), BF16, bias)),  # type: ignore[misc]
            "in the epilogue": lambda name=name: ours(x, w.t(), BF16, bias, name),  # type: ignore[misc]
        }
        for name, kernel in kernels.items()
    }


def product_rows(repeats: int, threads: int, quick: bool, clock: Callable[[], float]) -> list[Row]:
    rows: list[Row] = []
    for m, n, k in by_size(quick, ((32, 64, 64),), SHAPES):
        work = 2 * m * n * k
        for label, compared in cases(m, n, k).items():
            times = measure(compared, repeats, clock=clock)
            peaks = [_C.gemm_peak() * threads, _C.gemm_peak(operands="bfloat16") * threads]
            rows += [
                {
                    "case": f"bf16 {m}x{n}x{k}",
                    "what": label,
                    "name": name,
                    "milliseconds": times.median(name) * 1e3,
                    "gops": work / times.median(name) / 1e9,
                    "faster_than_bf16": 1 / times.ratio(name, PEER),
                    "of_peak": work / times.median(name) / peaks["bf16" in name],
                }
                for name in times
            ]
        if quick or n > 768:
            rows += activation_rows(m, n, k, repeats, clock)
    return rows


def activation_rows(m: int, n: int, k: int, repeats: int, clock: Callable[[], float]) -> list[Row]:
    rows: list[Row] = []
    for dtype, name in ((torch.int8, "int8"), (BF16, "bf16")):
        for label, compared in activations(m, n, k, dtype).items():
            times = measure(compared, repeats, clock=clock)
            rows += [
                {
                    "case": f"bf16 {m}x{n}x{k}",
                    "what": f"forward with {label}",
                    "name": f"{name} kernel, activation {where}",
                    "milliseconds": times.median(where) * 1e3,
                    "of_behind": times.ratio(where, "behind"),
                }
                for where in times
            ]
    return rows
