"""Layer size from which BF16 is faster than FP32 on the CPU.
It determines `ENOUGH_WORK` and `LARGE_WEIGHT` in backend/operators/gemm/cpu_kernels.py. A case is
the three products of a training step of a linear layer or of a channels-last convolution. In BF16
it includes the casts of weight and bias from FP32 and of the weight gradient to FP32, as under
autocast; activations and their gradients are BF16 already. Runs are interleaved; times are medians.
"work" is log2 of the multiplications of the output, and "to_fp32" the median ratio of BF16's time
to FP32's. The kind "few rows" has weights around the size from which the allocator requests memory
from the system in each step. With --threads 1 the clock counts CPU time of the process.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.support.harness import (
    Row,
    arguments,
    by_size,
    clock_for,
    finish,
    measure,
    show,
    standing,
    write_json,
)

LAST = torch.channels_last
WIDTHS = (32, 64, 128, 256, 512, 1024)
LAYERS = tuple(
    (rows, outputs, inputs)
    for outputs in WIDTHS
    for inputs in WIDTHS
    if max(outputs, inputs) <= 4 * min(outputs, inputs)
    for rows in (8, 32, 128, 512, 1024, 4096)
    if 2**19 <= rows * outputs * inputs <= 2**24
)
"""Rows, output and input features."""
ONE_ROW = tuple(
    (1, outputs, inputs)
    for outputs, inputs in ((512, 512), (1024, 1024), (2048, 2048), (4096, 1024), (1024, 4096))
)
FEW_ROWS = tuple(
    (rows, inputs, outputs)
    for inputs, outputs in ((1024, 4096), (2048, 2048), (3072, 3072), (4096, 4096))
    for rows in (2, 8, 16, 32, 48, 64)
)
CONVOLUTIONS = tuple(
    (batch, side, inputs, outputs, kernel)
    for inputs, outputs in ((16, 16), (16, 64), (32, 32), (64, 64), (128, 128))
    for kernel in (1, 3)
    for batch, side in ((1, 4), (8, 4), (1, 16), (8, 8), (8, 16))
    if 2**19 <= batch * side**2 * inputs * outputs * kernel**2 <= 2**24.5
)
"""Images, height and width, input and output channels, kernel height and width."""

Step = Callable[[], object]


def layer(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> Step:
    x, gradient = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    weight, bias = torch.randn(outputs, inputs), torch.randn(outputs)

    def step() -> tuple[Tensor, ...]:
        w, b = weight.to(dtype), bias.to(dtype)
        outputs = torch.addmm(b, x, w.t()), gradient @ w, (gradient.t() @ x).float()
        return *outputs, gradient.sum(0, dtype=torch.float32)

    return step


def convolution(
    batch: int, side: int, inputs: int, outputs: int, kernel: int, dtype: torch.dtype
) -> Step:
    x, gradient = (
        torch.randn(batch, n, side, side).to(dtype).contiguous(memory_format=LAST)
        for n in (inputs, outputs)
    )
    weight = torch.randn(outputs, inputs, kernel, kernel).contiguous(memory_format=LAST)
    settings = [1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1

    def step() -> tuple[Tensor, ...]:
        w = weight.to(dtype)
        out = torch.ops.aten.convolution.default(x, w, None, *settings)
        back = torch.ops.aten.convolution_backward.default(
            gradient, x, w, None, *settings, [True, True, False]
        )
        return out, back[0], back[1].float()

    return step


def steps(quick: bool) -> Iterator[tuple[str, str, int, Step, Step]]:
    """Yield kind, name, multiplications, and the steps in BF16 and FP32."""
    for shape in by_size(quick, (*LAYERS[:2], ONE_ROW[0]), (*LAYERS, *ONE_ROW)):
        kind, name = "layer" if shape[0] > 1 else "one row", "x".join(map(str, shape))
        yield (
            kind,
            name,
            math.prod(shape),
            layer(*shape, torch.bfloat16),
            layer(*shape, torch.float32),
        )
    for shape in by_size(quick, (), FEW_ROWS):
        name = "x".join(map(str, shape))
        yield (
            "few rows",
            name,
            math.prod(shape),
            layer(*shape, torch.bfloat16),
            layer(*shape, torch.float32),
        )
    for geometry in by_size(quick, CONVOLUTIONS[:2], CONVOLUTIONS):
        batch, side, inputs, outputs, kernel = geometry
        name = f"{batch}x{side}x{side}, {inputs} to {outputs}, {kernel}x{kernel}"
        both = convolution(*geometry, torch.bfloat16), convolution(*geometry, torch.float32)
        yield "convolution", name, batch * side**2 * inputs * outputs * kernel**2, *both


def main() -> None:
    options = arguments(
        __doc__,
        only={
            "help": "prefix of kinds to measure: layer, one row, few rows; rows of other kinds stay"
        },
    )
    torch.manual_seed(0)
    clock = clock_for(options.threads)
    rows: list[Row] = []
    with torch.no_grad():
        for kind, name, work, bf16, fp32 in steps(options.quick):
            if not kind.startswith(options.only or ""):
                continue
            times = measure(
                {"bf16": bf16, "fp32": fp32}, by_size(options.quick, 3, 11), clock=clock
            )
            microseconds = {f"{fmt}_us": times.median(fmt) * 1e6 for fmt in times}
            ratio = times.ratio("bf16", "fp32")
            rows.append(
                {
                    "kind": kind,
                    "case": name,
                    "work": math.log2(work),
                    **microseconds,
                    "to_fp32": ratio,
                }
            )
    if options.only and options.json:
        done = {row["kind"] for row in rows}
        other_rows = [
            row for row in standing(options.json, options.quick) if row["kind"] not in done
        ]
        write_json(options.json, [*other_rows, *rows], quick=options.quick)
    else:
        finish(options, rows)
    by_work: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        by_work.setdefault((row["kind"], round(row["work"])), []).append(row["to_fp32"])
    show(
        [
            {
                "kind": kind,
                "work": work,
                "least": min(ratios),
                "median": statistics.median(ratios),
                "most": max(ratios),
            }
            for (kind, work), ratios in sorted(by_work.items())
        ]
    )


if __name__ == "__main__":
    main()
