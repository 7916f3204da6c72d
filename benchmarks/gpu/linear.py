"""Matrix products and linear layers on a GPU, compared with cuBLAS, torch and torchao.
Peers are torch's products in BF16, INT8 and FP8, and torchao if installed. Rows "product" are one
GEMM with its epilogue (scales, bias, BF16 output) on quantized operands: "qsync::gemm" includes
dispatch, "CUTLASS" is the kernel alone. Rows "forward" and "forward + backward" are a linear layer
with parameters and input in BF16, including quantization. Runs are interleaved; times are medians.
"tflops" counts 2 m n k per product, "to_bf16" is the speedup over `F.linear` in BF16, and "tuned"
says whether the tuning table has the shape. Run `qsync tune benchmarks.gpu.models:linears` first,
as `make bench-gpu` does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qsync_fx.backend.cuda.problem.problem import GemmProduct, gemm_problem
from qsync_fx.backend.operators.gemm.gemm import gemm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import (
    GATE,
    Call,
    Rows,
    Target,
    best,
    by_kernel,
    errors,
    inner_backend,
    measure,
    read,
    tuned,
)
from benchmarks.gpu.models import SHAPES, TINY
from benchmarks.support.harness import Row, Times

BF16 = torch.bfloat16
LARGE = "8192^3"
BF16_KERNEL = Target(">= 0.9 of cuBLAS BF16", least=0.9)
NARROW_KERNEL = Target(">= 1100 T(FL)OP/s and >= the best peer", least=1.0)
INT8_STEP = Target(">= 1.38 x BF16, forward + backward", least=1.38)
"""Target for INT8 with INT8 gradients.
With BF16 gradients, two of three products run at BF16's speed, which limits the speedup to 1.2.
"""
FORMATS = {"bf16": BF16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}

Shape = tuple[int, int, int]


def dequantized(product: Tensor, a_scale: Tensor, b_scale: Tensor, bias: Tensor) -> Tensor:
    """Return the dequantized product with bias: the epilogue as a separate, fusible pass."""
    return (product.float() * a_scale * b_scale + bias).to(BF16)


def values(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-127, 128, shape, dtype=dtype, device=device)
    return torch.randn(shape, device=device).to(dtype)


def product_cases(
    shape: Shape, options: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, GemmProduct]]:
    """Return the calls to compare, and the native kernels' operands by format."""
    (m, n, k), device = shape, options.device
    bias = torch.randn(n, device=device)
    unit_scales = (torch.rand((), device=device) + 0.5, torch.rand((), device=device) + 0.5)
    ours = {}
    for fmt, dtype in FORMATS.items():
        a_scale, b_scale = {"bf16": (None, None)}.get(fmt, unit_scales)
        a, b = values((m, k), dtype, device), values((n, k), dtype, device).t()
        ours[fmt] = GemmProduct(a, b, a_scale, b_scale, bias, BF16)
    x, w, half = (
        ours["bf16"].a,
        ours["bf16"].b.t(),
        (torch.randn(m, k), torch.randn(n, k), bias.half()),
    )
    x16, w16, bias16 = (t.to(device).half() for t in half)
    i8, f8 = ours["int8"], ours["fp8"]
    by_rows = i8.b.contiguous()
    epilogue = dequantized
    if device.type != "cpu":
        epilogue = torch.compile(dequantized, dynamic=False)
    thin, scales = bias.to(BF16), unit_scales

    def scaled(fast: bool) -> Call:
        return lambda: torch._scaled_mm(
            f8.a, f8.b, scales[0], scales[1], bias=thin, out_dtype=BF16, use_fast_accum=fast
        )

    cases: dict[str, Call] = {
        "F.linear bf16": lambda: F.linear(x, w, thin),
        "F.linear fp16": lambda: F.linear(x16, w16, bias16),
        "_int_mm + dequant, K-major": lambda: epilogue(torch._int_mm(i8.a, i8.b), *scales, bias),
        "_int_mm + dequant, N-major": lambda: epilogue(torch._int_mm(i8.a, by_rows), *scales, bias),
        "_scaled_mm": scaled(False),
        "_scaled_mm fast": scaled(True),
    }
    for fmt, product in ours.items():
        cases[f"qsync::gemm {fmt}"] = operator(product)
        kernel = by_kernel(gemm_problem(product), product, device)
        if kernel is not None:
            cases[f"CUTLASS {fmt}"] = kernel
    return cases, ours


def operator(x: GemmProduct) -> Call:
    return lambda: gemm(*x)


def product_rows(case: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    cases, ours = product_cases(shape, options)
    times, failed = measure(cases, options)
    m, n, k = shape
    rows: list[Row] = []
    for name in times:
        tflops = 2 * m * n * k / times.median(name) / 1e12
        faster = 1 / times.ratio(name, "F.linear bf16")
        row: dict[str, Any] = {
            "case": case,
            "what": "product",
            "name": name,
            "microseconds": times.median(name) * 1e6,
        }
        row |= {"tflops": tflops, "to_bf16": faster} | judged_product(case, name, tflops, times)
        fmt = name.split()[-1]
        if name.startswith(("qsync", "CUTLASS")):
            selected = best(gemm_problem(ours[fmt]), options.device)
            row["tuned"] = tuned(gemm_problem(ours[fmt]), options.device)
            if selected is not None and name.startswith("CUTLASS"):
                row["kernel"] = selected[0].name
        rows.append(row)
    return rows + errors(f"{case}, product", failed)


def judged_product(case: str, name: str, tflops: float, times: Times) -> dict[str, Any]:
    if case == LARGE and name == "CUTLASS bf16":
        return BF16_KERNEL.columns(1 / times.ratio(name, "F.linear bf16"))
    if case == LARGE and name in ("CUTLASS int8", "CUTLASS fp8"):
        peers = [
            peer
            for peer in times
            if peer.startswith("_int_mm" if name.endswith("int8") else "_scaled_mm")
        ]
        ahead = min((1 / times.ratio(name, peer) for peer in peers), default=1.0)
        return NARROW_KERNEL.columns(min(tflops / 1100, ahead))
    if name.startswith("qsync"):
        return GATE.columns(1 / times.ratio(name, "F.linear bf16"))
    return {}


def layers(shape: Shape, options: argparse.Namespace) -> dict[str, Callable[[Tensor], Tensor]]:
    """Return linear layers in BF16, by the compiler or library that trains them."""
    _, n, k = shape

    def plain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(k, n, dtype=torch.bfloat16, device=options.device)

    inner = inner_backend(options.device)
    result: dict[str, Callable[[Tensor], Tensor]] = {"F.linear bf16": plain()}
    for precision in ("bf16", "int8", "int8_grad", "fp8"):
        settings: dict[str, Any] = {
            "precision": precision,
            "inner_backend": inner,
            "skip_unprofitable": False,
        }
        result[f"qsync {precision}"] = torch.compile(
            plain(), backend="qsync", options=settings, dynamic=False
        )
    if options.device.type == "cuda":
        result["Inductor bf16"] = torch.compile(plain(), dynamic=False)
        result |= {
            name: torch.compile(layer, dynamic=False)
            for name, layer in torchao_layers(plain).items()
        }
    return result


def torchao_layers(plain: Callable[[], nn.Module]) -> dict[str, nn.Module]:
    """Return torchao's layers for training in INT8 and FP8, as far as they can be imported."""
    result: dict[str, nn.Module] = {}
    with contextlib.suppress(ImportError, AttributeError):
        result["torchao fp8"] = import_module("torchao.float8").convert_to_float8_training(
            nn.Sequential(plain())
        )
    with contextlib.suppress(ImportError, AttributeError):
        prototype = import_module("torchao.prototype.quantized_training")
        make = (
            getattr(prototype, "Int8MixedPrecisionTrainingConfig", None)
            or prototype.int8_mixed_precision_training
        )
        model = nn.Sequential(plain())
        import_module("torchao").quantize_(model, make())
        result["torchao int8"] = model
    return result


def layer_rows(case: str, shape: Shape, options: argparse.Namespace) -> list[Row]:
    m, n, k = shape
    x = torch.randn(m, k, device=options.device, dtype=BF16, requires_grad=True)
    g = torch.randn(m, n, device=options.device, dtype=BF16)
    result = layers(shape, options)
    rows: list[Row] = []
    torch.compiler.reset()
    for pass_name, products in (("forward", 1), ("forward + backward", 3)):
        cases = {
            name: forward(layer, x) if products == 1 else both(layer, x, g)
            for name, layer in result.items()
        }
        times, failed = measure(cases, options)
        for name in times:
            seconds, faster = times.median(name), 1 / times.ratio(name, "F.linear bf16")
            row: dict[str, Any] = {
                "case": case,
                "what": pass_name,
                "name": name,
                "microseconds": seconds * 1e6,
            }
            row |= {"tflops": products * 2 * m * n * k / seconds / 1e12, "to_bf16": faster}
            if products == 3 and case == LARGE and name == "qsync int8_grad":
                row |= INT8_STEP.columns(faster)
            elif name in ("qsync int8", "qsync int8_grad", "qsync fp8"):
                row |= GATE.columns(faster)
            rows.append(row)
        rows += errors(f"{case}, {pass_name}", failed)
    return rows


def forward(layer: Callable[[Tensor], Tensor], x: Tensor) -> Call:
    return lambda: layer(x)


def both(layer: Callable[[Tensor], Tensor], x: Tensor, g: Tensor) -> Call:
    assert isinstance(layer, nn.Module)
    leaves = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(layer(x), leaves, g)


def main() -> None:
    options = read(__doc__)
    rows = Rows(options)
    shapes = (
        TINY if options.quick else dict(sorted(SHAPES.items(), key=lambda item: item[0] != LARGE))
    )
    for case in rows.wanted(list(shapes)):
        rows.add(*product_rows(case, shapes[case], options))
        rows.add(*layer_rows(case, shapes[case], options))
    rows.finish()


if __name__ == "__main__":
    main()
