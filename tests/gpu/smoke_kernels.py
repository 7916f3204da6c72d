"""Kernel stages of `smoke.py`: one kernel of each kind against torch bit by bit, streams and CUDA
graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_build import compiler, kernel_registry
from qsync_fx.backend.cuda.kernel_config import Arch, KernelConfig
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, reference_result
from qsync_fx.backend.cuda.problem.problem import ConvProduct, GemmProduct, type_of
from qsync_fx.backend.cuda.runtime import launch, layout_convert, quantize_launch
from qsync_fx.backend.cuda.selection import candidates
from qsync_fx.backend.numerics import reference
from qsync_fx.formats import precision

MOST = 8
SEED = 0x0123456789ABCDEF


def kinds(arch: Arch) -> dict[str, KernelConfig]:
    """Return a configuration of each kind of this architecture, GEMM first, then by format."""
    configs: dict[str, KernelConfig] = {}
    for config in candidates.all_configs(arch):
        if config.out == "fp32" and (
            config.operation != "gemm" or (config.a_major, config.b_major) == ("row", "column")
        ):
            configs.setdefault(f"{config.operation} {config.a}", config)
    order = ("int8", "fp8", "fp16", "bf16", "tf32", "fp32", "fp8_e5m2")
    return dict(
        sorted(
            configs.items(), key=lambda item: (item[0].split()[0] != "gemm", order.index(item[1].a))
        )
    )


def each(arch: Arch, device: torch.device) -> dict[str, Any]:
    """Compile and check `MOST` units; raise RuntimeError after all of them if one failed."""
    products = kinds(arch)
    plain = {
        "quantize int8": codegen.quantizer(arch, "fp32", "int8"),
        "copy": codegen.copier(arch),
    }
    chosen = dict(
        list(
            {
                **plain,
                **{name: codegen.unit_of(config) for name, config in products.items()},
            }.items()
        )[:MOST]
    )
    start = time.monotonic()
    built = compiler.attempt(list(chosen.values()))
    report: dict[str, Any] = {
        "compiled": f"{len(built.libraries)} of {len(chosen)} in {time.monotonic() - start:.0f} s"
    }
    wrong = []
    for name, unit in chosen.items():
        if unit in built.failures:
            message = str(built.failures[unit])
        else:
            message = (
                _quantizer(device)
                if name.startswith("quantize")
                else _copy(device)
                if name == "copy"
                else _product(products[name], device)
            )
        report[name] = message or "right to the last bit"
        wrong += [f"{name}: {message}"] if message else []
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return report


def _whole(shape: tuple[int, ...], fmt: str, device: torch.device) -> Tensor:
    return torch.randint(-3, 4, shape, device=device).float().to(type_of(fmt))


def _product(config: KernelConfig, device: torch.device) -> str:
    unit = codegen.unit_of(config)
    library = kernel_registry.library(unit)
    assert library is not None
    scaled = config.a_scale != "none"
    scale = torch.tensor(0.5, device=device) if scaled else None
    on_cpu = None if scale is None else scale.cpu()
    kind: Any = "tensor" if scaled else "none"
    if config.operation == "gemm":
        m, n, k = 256, 384, 512
        a, b = _whole((m, k), config.a, device), _whole((n, k), config.b, device).t()
        problem = GemmProblem(m, n, k, config.a, config.b, config.out, a_scale=kind, b_scale=kind)
        x = GemmProduct(a, b, scale, scale, None)
        got = launch.call_site(library, config, problem, problem, x)(x)
        want = reference_result.gemm(GemmProduct(a.cpu(), b.cpu(), on_cpu, on_cpu, None))
        return _differs(got, want)
    # The 2.x input gradient has separate kernels for strides of 1 and for others.
    stride = (2, 2) if config.operation == "dgrad" and config.strided else (1, 1)
    problem_ = ConvProblem(
        config.operation,
        4,
        14,
        14,
        64,
        128,
        3,
        3,
        (1, 1),
        stride,
        (1, 1),
        config.a,
        config.b,
        config.out,
        kind,
        kind,
    )
    x, weight, y = (4, 64, 14, 14), (128, 64, 3, 3), (4, 128, problem_.p, problem_.q)
    first, second = {"fprop": (x, weight), "dgrad": (y, weight), "wgrad": (y, x)}[config.operation]
    a, b = _whole(first, config.a, device), _whole(second, config.b, device)
    size = (14, 14) if config.operation == "dgrad" else (3, 3)
    geometry = size, stride, (1, 1), (1, 1), problem_.operation
    product = ConvProduct(a, b, scale, scale, None, *geometry)
    got = launch.call_site(library, config, problem_, problem_, product)(product)
    product = ConvProduct(a.cpu(), b.cpu(), on_cpu, on_cpu, None, *geometry)
    return _differs(got, reference_result.conv2d_product(product))


def _differs(got: Tensor, want: Tensor) -> str:
    wrong = int((got.cpu() != want).sum())
    return f"{wrong} of {want.numel()} values differ" if wrong else ""


def _quantizer(device: torch.device) -> str:
    x, seed = torch.randn(513, 1030, device=device), torch.tensor([SEED], device=device)
    for rounding in ("nearest", "stochastic"):
        row = precision("int8")
        got = quantize_launch.quantize(x, seed, 3, row, rounding, ())  # type: ignore[arg-type]
        want = reference.quantize(x, seed, 3, row, rounding, ())  # type: ignore[arg-type]
        if not all(
            torch.equal(actual, expected) for actual, expected in zip(got, want, strict=True)
        ):
            return f"{rounding} rounding gives other bits than the reference"
    return ""


def _copy(device: torch.device) -> str:
    x = torch.randint(-127, 128, (513, 1030), dtype=torch.int8, device=device)
    got = layout_convert.laid_out(x.t(), 1040, 528, "row")
    return (
        ""
        if torch.equal(got[:1030, :513], x.t()) and not got[1030:].any() and not got[:, 513:].any()
        else "values moved"
    )


def _multiplier(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that runs a kernel's INT8 product, `a` row-major, `b` column-major; the
    operator's without kernels.

    The operator would leave a product this small to torch, except on GPUs before Ampere.
    """
    from qsync_fx.backend.cuda.runtime.device_state import known_of
    from qsync_fx.backend.operators.gemm.gemm import gemm

    arch = known_of(device).arch
    if arch is None:
        return lambda a, b: gemm(a, b, None, None, None)
    config = kinds(arch)["gemm int8"]
    library = kernel_registry.library(codegen.unit_of(config))
    assert library is not None

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        problem = GemmProblem(a.shape[0], b.shape[1], a.shape[1], "int8", "int8", config.out)
        x = GemmProduct(a, b, None, None, None)
        return launch.call_site(library, config, problem, problem, x)(x)

    return multiply


def streams_and_graphs(device: torch.device) -> dict[str, Any]:
    """Check that an INT8 product waits for its stream, and that a replay reads new operands."""
    multiply = _multiplier(device)
    a, b = _whole((256, 512), "int8", device), _whole((384, 512), "int8", device).t()
    bt = b.cpu()

    def right(got: Tensor) -> bool:
        return torch.equal(got.cpu(), (a.cpu().double() @ bt.double()).float())

    assert right(multiply(a, b)), "the product is wrong"
    side, late = torch.cuda.Stream(device), torch.zeros_like(a)
    torch.cuda.synchronize(device)
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(a)
        got = multiply(late, b)
    torch.cuda.current_stream(device).wait_stream(side)
    assert right(got), "the product did not wait for its stream"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = multiply(a, b)
    for _ in range(3):
        a.copy_(_whole((256, 512), "int8", device))
        graph.replay()
        assert right(got), "the replayed product is wrong"
    return {"side stream": "right", "CUDA graph": "right in three replays"}
