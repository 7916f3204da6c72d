"""Quantization kernels on a GPU, compared with a device copy, eager PyTorch and Inductor.
`qsync::quantize` computes its own scales and rounds stochastically. Runs are interleaved; times are
medians. "gb_s" counts the necessary traffic: the input twice, because the scale must be known
before the first value is rounded, and each output once. "of_copy" is this rate divided by the rate
of a copy of the input (target: 0.85), and "to_pytorch" the speedup over the eager sequence (target:
1.2). Inputs exceed the GPU's cache. `qsync::convert` reads an INT8 operand once and writes it
transposed, padded or dequantized to BF16, as GEMM kernels require.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qsync_fx.backend.cuda.problem.padding import laid_out
from qsync_fx.backend.operators.convert import convert
from qsync_fx.backend.operators.quantize import quantize, quantize_transposed
from qsync_fx.formats import precision

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import Call, Rows, Target, errors, measure, read
from benchmarks.support.harness import Row, by_size

BANDWIDTH = Target(">= 0.85 of copy bandwidth", least=0.85)
SEQUENCE = Target(">= 1.2 x the plain PyTorch sequence", least=1.2)
SHAPES = {"16384 x 8192": (16384, 8192), "8192 x 8192": (8192, 8192), "8192 x 3072": (8192, 3072)}
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = ("int8", "fp8")
BANDS = ("tensor", "row")


def by_torch(x: Tensor, fmt: str, per_row: bool) -> tuple[Tensor, Tensor]:
    """Return the quantized tensor and its scale by eager operators.

    FP8 is rounded to nearest: torch has no stochastic rounding to it.
    """
    row = precision(fmt)
    value = x.float()
    most = value.abs().amax(1, keepdim=True) if per_row else value.abs().amax()
    scale = (most / row.max).clamp_min(2.0**-126)
    scaled = value / scale
    if fmt == "int8":
        scaled = torch.floor(scaled + torch.rand_like(scaled))
    return scaled.clamp(-row.max, row.max).to(row.dtype), scale


def cases(
    x: Tensor, fmt: str, band: str, options: argparse.Namespace
) -> tuple[dict[str, Call], dict[str, int]]:
    """Return the calls, and the bytes that the native kernels and the copy move."""
    seed, keep, other = (
        torch.zeros(1, dtype=torch.int64, device=x.device),
        (0,) if band == "row" else (),
        torch.empty_like(x),
    )
    per_row = band == "row"
    result: dict[str, Call] = {
        "copy": lambda: other.copy_(x),
        "qsync::quantize": lambda: quantize(x, seed, 0, fmt, "stochastic", keep),
        "qsync::quantize nearest": lambda: quantize(x, seed, 0, fmt, "nearest", keep),
        "PyTorch": lambda: by_torch(x, fmt, per_row),
    }
    moved = {"copy": 2 * x.nbytes} | dict.fromkeys(
        ("qsync::quantize", "qsync::quantize nearest"), 2 * x.nbytes + x.numel()
    )
    if not per_row:
        result["qsync::quantize_transposed"] = lambda: quantize_transposed(
            x, seed, 0, fmt, "stochastic"
        )
        moved["qsync::quantize_transposed"] = 2 * x.nbytes + 2 * x.numel()
    if options.device.type == "cuda":
        compiled = torch.compile(by_torch, dynamic=False)
        result["Inductor"] = lambda: compiled(x, fmt, per_row)
    return result, moved


def rows_of(case: str, x: Tensor, fmt: str, band: str, options: argparse.Namespace) -> list[Row]:
    calls, moved = cases(x, fmt, band, options)
    times, failed = measure(calls, options, rounds=15)
    rate = {name: moved[name] / times.median(name) for name in times if name in moved}
    rows: list[Row] = []
    for name in times:
        row: dict[str, Any] = {"case": case, "name": name, "microseconds": times.median(name) * 1e6}
        if name in rate:
            row |= {"gb_s": rate[name] / 1e9, "of_copy": rate[name] / rate["copy"]}
        row["to_pytorch"] = 1 / times.ratio(name, "PyTorch")
        if name == "qsync::quantize":
            rows.append(row | BANDWIDTH.columns(row["of_copy"]))
            rows.append(
                {"case": case, "name": name, "what": "sequence", "to_pytorch": row["to_pytorch"]}
            )
            rows[-1] = dict(rows[-1]) | SEQUENCE.columns(row["to_pytorch"])
        else:
            rows.append(row)
    return rows + errors(case, failed)


@dataclass(frozen=True)
class Copied:
    """Copy to measure: bytes read and written, plain copy of the input, both implementations."""

    read: int
    written: int
    plain: Call
    ours: Call
    theirs: Call


COPIES = (
    "transposed",
    "transposed, padded from odd sizes",
    "padded from odd sizes",
    "transposed, to bf16",
)


def copies(kind: str, side: int, device: torch.device) -> Copied:
    """Return one of `COPIES`, for INT8 values."""
    x = torch.randint(-127, 128, (side, side), dtype=torch.int8, device=device)
    if "odd" in kind:
        x = x[: side - 2, : side - 1].contiguous()
    other, scale, transposed = (
        torch.empty_like(x),
        torch.tensor(0.01, device=device),
        "transposed" in kind,
    )

    def plain() -> Tensor:
        return other.copy_(x)

    if "bf16" in kind:
        return Copied(
            x.nbytes, 2 * x.nbytes, plain,
            lambda: convert(x, torch.bfloat16, scale, transposed),
            lambda: (x.t().float() * scale).bfloat16().contiguous(),
        )  # fmt: skip
    if "odd" not in kind:
        return Copied(
            x.nbytes,
            x.nbytes,
            plain,
            lambda: convert(x, transposed=transposed),
            lambda: x.t().contiguous(),
        )
    straight = x
    if transposed:
        straight = x.t()
    return Copied(
        x.nbytes,
        side * side,
        plain,
        lambda: convert(x, transposed=transposed, shape=(side, side)),
        lambda: laid_out(straight, side, side, "row"),
    )


def rows_of_copies(case: str, copied: Copied, options: argparse.Namespace) -> list[Row]:
    calls = {"copy": copied.plain, "qsync::convert": copied.ours, "PyTorch": copied.theirs}
    times, failed = measure(calls, options, rounds=15)
    rows: list[Row] = []
    for name in times:
        moved = 2 * copied.read if name == "copy" else copied.read + copied.written
        row: dict[str, Any] = {"case": case, "name": name, "microseconds": times.median(name) * 1e6}
        row["gb_s"] = moved / times.median(name) / 1e9
        row["of_copy"] = moved / (2 * copied.read) / times.ratio(name, "copy")
        if "PyTorch" not in failed:
            row["to_pytorch"] = 1 / times.ratio(name, "PyTorch")
        if name == "qsync::convert":
            row |= BANDWIDTH.columns(row["of_copy"])
        rows.append(row)
    return rows + errors(case, failed)


def main() -> None:
    options = read(__doc__)
    rows = Rows(options)
    shapes = by_size(options.quick, {"33 x 64": (33, 64)}, SHAPES)
    cases_by_name = {
        f"{shape} {source} -> {fmt}, a scale for each {band}": (size, dtype, fmt, band)
        for shape, size in shapes.items()
        for source, dtype in TYPES.items()
        for fmt in FORMATS
        for band in BANDS
    }
    side = by_size(options.quick, 64, 8192)
    copied = {f"{side} x {side} int8, {kind}": kind for kind in COPIES}
    for case in rows.wanted([*copied, *cases_by_name]):
        if case in copied:
            rows.add(*rows_of_copies(case, copies(copied[case], side, options.device), options))
            continue
        size, dtype, fmt, band = cases_by_name[case]
        torch.compiler.reset()
        x = torch.randn(size, device=options.device).to(dtype)
        rows.add(*rows_of(case, x, fmt, band, options))
    rows.finish()


if __name__ == "__main__":
    main()
