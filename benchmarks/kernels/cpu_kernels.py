"""INT8 products on the CPU, compared with oneDNN's BF16 and `torch._int_mm`.
The shapes are layers of BERT-base, ResNet-18 and VGG-16. Each layer has rows for the three products
of a training step, and "layer" for their sum. INT8 includes quantization (stochastic, one scale per
tensor) of activation, weight and output gradient; the weight gradient reuses the quantized
gradient. BF16 includes the casts of activation and weight from FP32, and of the weight gradient to
FP32, as under autocast. Rows "product alone", and all convolutions (channels-last), start from
converted operands. Runs are interleaved; times are medians. "gops" counts 2 m n k operations per
product; "faster_than_bf16" is oneDNN's time divided by the row's; "of_peak" is the fraction of the
peak rate measured in the L1 cache, times the threads. With --threads 1 the clock counts CPU time of
the process.

Grouped and depthwise convolutions are in `grouped_convolutions`, BF16 products in `bf16_products`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_fx import _C
from qsync_fx.backend.operators.gemm.gemm import conv2d_product, gemm
from qsync_fx.backend.operators.quantize import quantize

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels import bf16_products, grouped_convolutions
from benchmarks.support.harness import (
    Row,
    Times,
    arguments,
    by_size,
    clock_for,
    finish,
    measure,
    show,
    write_cases,
)

BF16 = torch.bfloat16
PEER = bf16_products.PEER
ROWS = (512, 2048)
LAYERS = ((768, 768), (3072, 768), (768, 3072))
"""Output and input channels: attention projections, and the two layers of the MLP."""

SMALL = tuple((rows, width, width) for rows in (64, 256, 1024) for width in (64, 128, 256, 512))
"""Rows, outputs and inputs of layers around the size from which INT8 and BF16 are faster.

See `backend.operators.gemm.cpu_kernels.ENOUGH_WORK`. These rows also measure FP32.
"""

CONVOLUTIONS = {
    "ResNet-18": (
        (64, 56, 64, 3, 1),
        (64, 56, 128, 3, 2),
        (128, 28, 128, 3, 1),
        (256, 14, 256, 3, 1),
        (512, 7, 512, 3, 1),
    ),
    "VGG-16": ((64, 112, 64, 3, 1), (128, 56, 128, 3, 1), (256, 28, 256, 3, 1)),
    "fewer channels": ((16, 32, 16, 3, 1), (32, 32, 32, 3, 1)),
}
"""Input channels, height and width, output channels, kernel size, stride; the batch size is 8."""
BATCH = grouped_convolutions.BATCH

Cases = Mapping[str, Callable[[], object]]


def cases(rows: int, channels: int, inner: int) -> dict[str, Cases]:
    x, weight, bias = torch.randn(rows, inner), torch.randn(channels, inner), torch.randn(channels)
    wide = torch.randn(rows, channels)
    gradient = wide.to(BF16)
    seed = torch.zeros(1, dtype=torch.int64)

    def quantized(t: Tensor) -> tuple[Tensor, Tensor]:
        return quantize(t, seed, 0, "int8", "stochastic", [])

    (xq, x_scale), (wq, w_scale), (gq, g_scale) = (
        quantized(x),
        quantized(weight),
        quantized(gradient),
    )
    xb, wb, bb = x.to(BF16), weight.to(BF16), bias.to(BF16)

    def output(q: Tensor, q_scale: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return gemm(q, w, q_scale, scale, bias, out_dtype=BF16, transposed=True)

    def input_gradient(q: Tensor, q_scale: Tensor) -> Tensor:
        return gemm(q, wq, q_scale, w_scale, None, out_dtype=BF16)

    def weight_gradient(q: Tensor, q_scale: Tensor) -> Tensor:
        return gemm(q.t(), xq, q_scale, x_scale, None)

    def ours() -> None:
        output(*quantized(x), *quantized(weight))
        rounded = quantized(gradient)
        input_gradient(*rounded)
        weight_gradient(*rounded)

    def plain() -> None:
        F.linear(x, weight, bias)
        wide @ weight
        wide.t() @ x

    def autocast() -> None:
        narrow, narrow_weight = x.to(BF16), weight.to(BF16)
        F.linear(narrow, narrow_weight, bb)
        gradient @ narrow_weight
        (gradient.t() @ narrow).float()

    def integers(
        a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype
    ) -> Tensor:
        return (torch._int_mm(a, b).float() * (a_scale * b_scale)).to(dtype)

    return {
        "forward": {
            PEER: lambda: F.linear(x.to(BF16), weight.to(BF16), bb),
            "int8": lambda: output(*quantized(x), *quantized(weight)),
        },
        "input gradient": {
            PEER: lambda: gradient @ wb,
            "int8": lambda: input_gradient(*quantized(gradient)),
        },
        "weight gradient": {
            PEER: lambda: (gradient.t() @ xb).float(),
            "int8": lambda: weight_gradient(gq, g_scale),
        },
        "layer": {PEER: autocast, "int8": ours, "fp32": plain},
        "forward, product alone": {
            PEER: lambda: F.linear(xb, wb, bb),
            "int8": lambda: output(xq, x_scale, wq, w_scale),
            "_int_mm": lambda: torch._int_mm(xq, wq.t()),
            "_int_mm and scales": lambda: integers(xq, wq.t(), x_scale, w_scale, BF16),
        },
        "input gradient, product alone": {
            PEER: lambda: gradient @ wb,
            "int8": lambda: input_gradient(gq, g_scale),
            "_int_mm": lambda: torch._int_mm(gq, wq),
        },
        "weight gradient, product alone": {
            PEER: lambda: gradient.t() @ xb,
            "int8": lambda: weight_gradient(gq, g_scale),
            "_int_mm": lambda: torch._int_mm(gq.t(), xq),
            "_int_mm and scales": lambda: integers(gq.t(), xq, g_scale, x_scale, torch.float32),
        },
    }


def convolution_cases(
    inner: int, side: int, channels: int, kernel: int, stride: int
) -> dict[str, Cases]:
    padding = kernel // 2
    out = (side + 2 * padding - kernel) // stride + 1
    shapes = (
        (BATCH, inner, side, side),
        (channels, inner, kernel, kernel),
        (BATCH, channels, out, out),
    )
    x, weight, gradient = (
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in shapes
    )
    xb, wb, gb = (t.to(BF16) for t in (x, weight, gradient))
    xq, wq, gq = (t.mul(30).clamp(-127, 127).to(torch.int8) for t in (x, weight, gradient))
    scale, settings = torch.rand(()), ([stride] * 2, [padding] * 2, [1, 1])
    rest = *settings, False, [0, 0], 1

    def backward(of_input: bool) -> Tensor:
        mask = [of_input, not of_input, False]
        gradients: tuple[Tensor, ...] = torch.ops.aten.convolution_backward.default(
            gb, xb, wb, None, *rest, mask
        )
        return gradients[0] if of_input else gradients[1].float()

    def ours(
        a: Tensor, b: Tensor, size: list[int], operation: str, dtype: torch.dtype
    ) -> Callable[[], Tensor]:
        return lambda: conv2d_product(a, b, scale, scale, None, size, *settings, operation, dtype)

    return {
        "forward": {
            PEER: lambda: torch.ops.aten.convolution.default(xb, wb, None, *rest),
            "int8": ours(xq, wq, [kernel] * 2, "fprop", BF16),
        },
        "input gradient": {
            PEER: lambda: backward(True),
            "int8": ours(gq, wq, [side] * 2, "dgrad", BF16),
        },
        "weight gradient": {
            PEER: lambda: backward(False),
            "int8": ours(gq, xq, [kernel] * 2, "wgrad", torch.float32),
        },
    }


def convolution_rows(repeats: int, threads: int, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for model, layers in CONVOLUTIONS.items():
        for layer in by_size(quick, layers[:1], layers):
            inner, side, channels, kernel, stride = layer
            peak = _C.gemm_peak() * threads
            for name, compared in convolution_cases(*layer).items():
                if name == "input gradient" and stride > 1:
                    continue  # the backend computes this in oneDNN for every format
                work = 2 * BATCH * (side // stride) ** 2 * inner * channels * kernel**2
                case = (
                    f"{model} {inner}x{side}x{side} to {channels}, {kernel}x{kernel}, stride "
                    f"{stride}"
                )
                rows += rows_of(
                    case, name, measure(compared, repeats, clock=clock(threads)), work, peak
                )
    return rows


def grouped_rows(repeats: int, threads: int, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for case, work, compared in grouped_convolutions.layers(quick):
        for name, variants in compared.items():
            rows += rows_of(case, name, measure(variants, repeats, clock=clock(threads)), work, 1.0)
    return rows


def clock(threads: int) -> Callable[[], float]:
    return clock_for(threads)


def rows_of(case: str, label: str, times: Times, work: float, peak: float) -> list[Row]:
    return [
        {
            "case": case,
            "what": label,
            "name": name,
            "milliseconds": times.median(name) * 1e3,
            "gops": work / times.median(name) / 1e9,
            "faster_than_bf16": 1 / times.ratio(name, PEER),
            "of_peak": work / times.median(name) / peak if name == "int8" else None,
        }
        for name in times
    ]


def product_rows(repeats: int, threads: int, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for count in by_size(quick, (32,), ROWS):
        for channels, inner in by_size(quick, ((48, 64),), LAYERS):
            peak = _C.gemm_peak() * threads
            for name, compared in cases(count, channels, inner).items():
                work = 2 * count * channels * inner * (3 if name == "layer" else 1)
                times = measure(compared, repeats, clock=clock(threads))
                rows += rows_of(f"{count}x{channels}x{inner}", name, times, work, peak)
    return rows


def small_rows(repeats: int, threads: int, quick: bool) -> list[Row]:
    rows: list[Row] = []
    for shape in by_size(quick, SMALL[:1], SMALL):
        layer = measure(cases(*shape)["layer"], repeats, clock=clock(threads))
        rows += rows_of(
            "x".join(map(str, shape)),
            "layer",
            layer,
            6 * math.prod(shape),
            _C.gemm_peak() * threads,
        )
    return rows


def bf16_rows(repeats: int, threads: int, quick: bool) -> list[Row]:
    return bf16_products.product_rows(repeats, threads, quick, clock(threads))


PARTS: Mapping[str, Callable[[int, int, bool], list[Row]]] = {
    "products": product_rows,
    "small": small_rows,
    "convolutions": convolution_rows,
    "grouped": grouped_rows,
    "bf16": bf16_rows,
}


def main() -> None:
    options = arguments(
        __doc__, only={"choices": tuple(PARTS), "help": "measure these alone, and keep other rows"}
    )
    repeats = by_size(options.quick, 3, 15)
    if options.only:
        rows = PARTS[options.only](repeats, options.threads, options.quick)
        if options.json:
            write_cases(options.json, rows, quick=options.quick)
        show(rows)
        return
    finish(
        options,
        [row for part in PARTS.values() for row in part(repeats, options.threads, options.quick)],
    )


if __name__ == "__main__":
    main()
