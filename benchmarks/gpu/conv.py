"""Convolutions of ResNet-50 on a GPU, compared with cuDNN in BF16, channels-last.
The batch size is 256. The products are the outputs and both gradients of a training step in INT8
(--precision): outputs have INT8 operands, gradients have BF16 operands. `qsync tune
benchmarks.gpu.models:resnet50 --precision int8` tunes them. "cuDNN bf16" is the convolution alone
with BF16 operands; "torch" is the eager fallback for the same operands, with conversions and
epilogue; "qsync::conv2d_product" includes dispatch, and "CUTLASS" is the kernel alone. Runs are
interleaved; times are medians. "to_cudnn" is cuDNN's time divided by the row's (target: at least
0.97), and "tuned" says whether the tuning table has the problem.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.problem.problem import ConvProduct
from qsync_fx.backend.cuda.runtime.event_timer import operands, peer
from qsync_fx.backend.cuda.tuning import shown, work
from qsync_fx.backend.operators.gemm.gemm import conv2d_product
from qsync_fx.backend.operators.layer_kernels import problems_of
from qsync_fx.diagnostics import explain

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import GATE, Call, Rows, by_kernel, errors, measure, read, tuned
from benchmarks.support.harness import Row, by_size

BF16 = torch.bfloat16


def problems(options: argparse.Namespace) -> list[ConvProblem]:
    """Return the convolution products of a training step, in order of decreasing FLOPs."""
    from benchmarks.gpu.models import resnet50

    model, args = resnet50()
    model.to(options.device)
    args = tree_map_only(torch.Tensor, lambda t: t.to(options.device), args)
    result = problems_of(
        explain(
            model, *args, options={"precision": options.precision, "skip_unprofitable": False}
        ).lowered_graphs
    )
    chosen = {p for p in result if isinstance(p, ConvProblem)}
    return sorted(chosen, key=lambda p: (-p.flops, shown(p)))


def operator(x: ConvProduct) -> Call:
    """Return a call of `qsync::conv2d_product` with dispatch, checks and fallback."""
    return lambda: conv2d_product(*x)


def cudnn(p: ConvProblem, o: ConvProduct) -> Call:
    """Return a call of cuDNN's product alone; shape-only arguments are allocated before."""
    a, b = o.a.to(BF16), o.b.to(BF16)
    geometry = list(p.stride), list(p.padding), list(p.dilation), False, [0, 0], 1
    if p.operation == "fprop":
        return lambda: torch.ops.aten.convolution.default(a, b, None, *geometry)

    def like(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device=a.device, memory_format=torch.channels_last)

    backward = torch.ops.aten.convolution_backward.default
    if p.operation == "dgrad":
        x = like(p.n, p.c, p.h, p.w)
        return lambda: backward(a, x, b, None, *geometry, [True, False, False])
    weight = like(p.k, p.c, p.r, p.s)
    return lambda: backward(a, b, weight, None, *geometry, [False, True, False])


def rows_of(p: ConvProblem, options: argparse.Namespace) -> list[Row]:
    inputs = operands(p, options.device)
    assert isinstance(inputs, ConvProduct)
    cases = {
        "cuDNN bf16": cudnn(p, inputs),
        "torch": peer(p, inputs),
        "qsync::conv2d_product": operator(inputs),
    }
    kernel = by_kernel(p, inputs, options.device)
    if kernel is not None:
        cases["CUTLASS"] = kernel
    times, failed = measure(cases, options)
    m, n, k = work(p)
    rows: list[Row] = []
    for name in times:
        seconds = times.median(name)
        row: dict[str, Any] = {"case": shown(p), "name": name, "microseconds": seconds * 1e6}
        row |= {
            "tflops": 2 * m * n * k / seconds / 1e12,
            "to_cudnn": 1 / times.ratio(name, "cuDNN bf16"),
        }
        if name.startswith("qsync"):
            row |= {"tuned": tuned(p, options.device)} | GATE.columns(row["to_cudnn"])
        rows.append(row)
    return rows + errors(shown(p), failed)


def main() -> None:
    options = read(__doc__, precision={"default": "int8", "help": "of the model (%(default)s)"})
    torch.backends.cudnn.benchmark = True
    rows = Rows(options)
    problems_by_name = {shown(p): p for p in problems(options)}
    names = by_size(options.quick, list(problems_by_name)[:3], list(problems_by_name))
    for case in rows.wanted(names):
        rows.add(*rows_of(problems_by_name[case], options))
    rows.finish()


if __name__ == "__main__":
    main()
