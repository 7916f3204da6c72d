"""Convolution kernels on the CPU: problems and expected results; see cutlass_cpu.py.

Invariant: operands are small integers, so sums of their products are exact in FP32 in any order.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from qsync_fx.backend.cuda.kernel_build.library import ConvArguments, Library
from qsync_fx.backend.cuda.kernel_config import KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem
from qsync_fx.backend.cuda.selection import constraints
from qsync_fx.formats import FORMATS
from tests.support.cuda.on_cpu import cuda_emulation as emulation


def drawn(fmt: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return small integers, whose sums of products are exact in FP32 in any order."""
    high = 128 if fmt == "int8" else 5
    return torch.randint(-high, high, shape, generator=generator).to(FORMATS[fmt].dtype)


def expected(p: ConvProblem, a: Tensor, b: Tensor) -> Tensor:
    """Return the channels-last sums in FP32 for channels-last operands."""
    first, second = (t.permute(0, 3, 1, 2).double() for t in (a, b))
    geometry = p.stride, p.padding, p.dilation
    if p.operation == "fprop":
        sums = F.conv2d(first, second, None, *geometry)
    elif p.operation == "dgrad":
        sums = torch.nn.grad.conv2d_input((p.n, p.c, p.h, p.w), second, first, *geometry)
    else:
        sums = torch.nn.grad.conv2d_weight(second, (p.k, p.c, p.r, p.s), first, *geometry)
    return sums.permute(0, 2, 3, 1).float().contiguous()


def problems(config: KernelConfig) -> list[ConvProblem]:
    """Return supported problems: smaller than a tile, several tiles with remainders, strides,
    dilations.
    """
    unit = max(config.alignment, config.out_alignment)
    formats = (config.a, config.b, config.out)
    wide = unit * (-(-(config.tile[1] + 1) // unit))
    candidates = [
        ConvProblem(config.operation, 1, 3, 4, unit, unit, 1, 1, (0, 0), (1, 1), (1, 1), *formats),
        ConvProblem(config.operation, 2, 9, 11, unit, wide, 3, 3, (1, 1), (1, 1), (1, 1), *formats),
        ConvProblem(
            config.operation, 3, 8, 7, wide, 2 * unit, 3, 2, (2, 0), (1, 1), (2, 1), *formats
        ),
        ConvProblem(
            config.operation, 2, 12, 13, unit, 2 * unit, 3, 5, (1, 2), (2, 3), (1, 1), *formats
        ),
        ConvProblem(
            config.operation, 2, 10, 9, 2 * unit, unit, 1, 1, (0, 0), (2, 2), (1, 1), *formats
        ),
        ConvProblem(config.operation, 2, 14, 9, unit, unit, 3, 3, (0, 3), (3, 1), (1, 1), *formats),
    ]
    return [p for p in candidates if constraints.serves(config, p) is None]


def run(
    library: Library,
    p: ConvProblem,
    a: Tensor,
    b: Tensor,
    shape: torch.Size,
    **kernel_arguments: Tensor | int | None,
) -> Tensor:
    """Return `d`.

    Operands are parts of larger memory whose other bytes are NaN or large values. The memory around
    `d` must not change.
    """
    memories = []
    for operand in (a, b):
        memory = torch.empty(operand.numel() + 128, dtype=operand.dtype)
        memory.view(torch.uint8).fill_(0x7F)
        memory[64 : 64 + operand.numel()] = operand.reshape(-1)
        memories.append(memory)
    d = torch.full((shape.numel() + 128,), -77.0, dtype=FORMATS[p.out].dtype)
    start = [memory.data_ptr() + 64 * memory.element_size() for memory in (*memories, d)]
    values = {
        name: value.data_ptr() if isinstance(value, Tensor) else value or 0
        for name, value in kernel_arguments.items()
    }
    scales = kernel_arguments.get("b_scale")
    (pad_h, pad_w), (stride_h, stride_w), (dilation_h, dilation_w) = p.padding, p.stride, p.dilation
    arguments = ConvArguments(
        **{name: getattr(p, name) for name in "nhwckrspq"} | dict(zip("abd", start,
        strict=True)) | {"split": 1} | values,
        pad_h=pad_h,
        pad_w=pad_w,
        stride_h=stride_h,
        stride_w=stride_w,
        dilation_h=dilation_h,
        dilation_w=dilation_w,
        b_scale_per_channel=isinstance(scales, Tensor) and scales.dim() > 0,
        multiprocessors=5,
    )  # fmt: skip
    assert library.can_implement(arguments) is None
    workspace = torch.full((library.workspace(arguments) + 1,), 0x55, dtype=torch.uint8)
    library.run(arguments, workspace.data_ptr(), 0)
    assert (d[:64] == -77).all(), "the kernel wrote before the result"
    assert (d[64 + shape.numel() :] == -77).all(), "the kernel wrote beyond the result"
    return d[64 : 64 + shape.numel()].view(shape)


def check(library: Library, config: KernelConfig) -> None:
    """Assert that a kernel equals its emulation bit by bit, for each problem and kind of scales."""
    generator = torch.Generator().manual_seed(int(config.digest, 16))
    served = problems(config)
    assert len(served) >= 2
    scaled = config.a_scale != "none"
    for p in served:
        x, weight, y = (p.n, p.h, p.w, p.c), (p.k, p.r, p.s, p.c), (p.n, p.p, p.q, p.k)
        shapes = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[p.operation]
        a, b = (drawn(fmt, shape, generator) for fmt, shape in zip((p.a, p.b), shapes, strict=True))
        sums = expected(p, a, b)
        for full in (False, True):
            a_scale, b_scale = (
                (torch.rand((), generator=generator) for _ in "ab") if scaled else (None, None)
            )
            bias = None
            if full and p.operation == "fprop":
                b_scale = torch.rand(p.k, generator=generator) if scaled else None
                bias = torch.randn(p.k, generator=generator) if config.bias else None
            for split in (1, 3) if config.order == "split_k" else (1,):
                arguments = {"a_scale": a_scale, "b_scale": b_scale, "bias": bias, "split": split}
                result = run(library, p, a, b, sums.shape, **arguments)
                flat = sums.reshape(-1, sums.shape[-1])
                columns = None if b_scale is None else b_scale.reshape(1, -1)
                wanted = emulation.finish(flat, a_scale, columns, bias, result.dtype).view(
                    sums.shape
                )
                if config.order == "split_k" and scaled:
                    # The kernel scales and rounds each split before the addition.
                    torch.testing.assert_close(
                        result, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max())
                    )
                else:
                    assert torch.equal(result, wanted), (p, full)
