"""Times of a GPU's library products in every format, for fitting the catalog's constants.
The products are cuBLAS matrix products and the three products of cuDNN convolutions (channels-last,
as under Inductor), on random data. As in DeepBench the same call is repeated with a warm cache.
--shapes names a folder with deepbench_gemm.csv and deepbench_conv.csv, which provide only sizes and
layouts; by default the layers of BERT-base and ResNet-50 are measured. "seconds" is the median per
call. Rows "copy" (1 KiB to 4 GiB) and "launch" give bandwidths and launch overhead.
benchmarks/published/catalog.py --measured FILE fits constants to the rows.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.gpu.measuring import CYCLES, Call, Rows, read, synchronize
from benchmarks.published import catalog
from benchmarks.support.harness import Row, by_size

GEMM = ("fp32", "tf32", "bf16", "fp16", "int8", "fp8")
CONVOLUTIONS = ("bf16", "fp16", "fp32", "tf32")
TYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int8": torch.int8, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
PRODUCTS = {
    "output": None,
    "input_gradient": (True, False, False),
    "weight_gradient": (False, True, False),
}
LINEAR = [(n, 8192, k, "tn") for n, k in ((768, 768), (3072, 768), (768, 3072))]
"""m, n, k and layout of BERT-base's linear layers."""
LAYERS = (
    (64, 56, 64, 3, 1),
    (128, 28, 128, 3, 1),
    (256, 14, 256, 3, 1),
    (512, 7, 512, 3, 1),
    (256, 56, 64, 1, 1),
    (256, 56, 512, 1, 2),
)
"""Channels, height and width, filters, filter size and stride of layers of ResNet-50."""
BATCH = 32

Gemm = tuple[int, int, int, str]
ROUNDS, CALLS, ENOUGH = 5, 8, 0.02


def gemms(folder: Path | None) -> list[Gemm]:
    """Return the distinct (m, n, k, layout) in BLAS notation."""
    if folder is None:
        return LINEAR
    return list(dict.fromkeys((*point.shape, point.layout) for point in catalog.gemms(folder)))  # type: ignore[misc]


def convolutions(folder: Path | None) -> list[tuple[int, ...]]:
    """Return the distinct convolution sizes, in the order of `catalog.SIZES`."""
    if folder is None:
        return [
            (BATCH, c, h, h, k, r, r, stride, stride, r // 2, r // 2)
            for c, h, k, r, stride in LAYERS
        ]
    return list(dict.fromkeys(point.shape for point in catalog.convolutions(folder)))


def values(shape: tuple[int, ...], precision: str, device: torch.device) -> Tensor:
    if precision == "int8":
        return torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
    return torch.randn(shape, device=device).to(TYPES[precision])


def product(shape: Gemm, precision: str, device: torch.device) -> Call:
    """Return a call of a matrix product.

    BLAS is column-major: its first operand is the second one here.
    """
    m, n, k, layout = shape

    def operand(rows: int, columns: int, order: str) -> Tensor:
        if order == "n":
            return values((rows, columns), precision, device)
        return values((columns, rows), precision, device).t()

    right, left = operand(k, m, layout[0]), operand(n, k, layout[1])
    if precision == "int8":
        return lambda: torch._int_mm(left, right)
    if precision == "fp8":
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16)
    return lambda: torch.mm(left, right)


def convolved(sizes: tuple[int, ...], kind: str, precision: str, device: torch.device) -> Call:
    n, c, h, w, k, r, s, *rest = sizes
    stride, padding = rest[:2], rest[2:]
    p, q = (h + 2 * padding[0] - r) // stride[0] + 1, (w + 2 * padding[1] - s) // stride[1] + 1
    x, weight, y = (
        values(shape, precision, device).contiguous(memory_format=torch.channels_last)
        for shape in ((n, c, h, w), (k, c, r, s), (n, k, p, q))
    )
    geometry = stride, padding, [1, 1], False, [0, 0], 1
    wanted = PRODUCTS[kind]
    if wanted is None:
        return lambda: torch.ops.aten.convolution.default(x, weight, None, *geometry)
    return lambda: torch.ops.aten.convolution_backward.default(
        y, x, weight, None, *geometry, list(wanted)
    )


def seconds(call: Call, device: torch.device) -> float:
    """Return the median seconds per call, over rounds that are enqueued while the GPU sleeps."""
    call()
    synchronize(device)
    since = time.perf_counter()
    call()
    synchronize(device)
    alone = time.perf_counter() - since
    calls = max(2, min(CALLS, round(ENOUGH / max(alone, 1e-6))))
    if device.type == "cpu":
        return alone
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda._sleep(int(min(0.002, 20e-6 * calls) * CYCLES))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3 / calls)
    return statistics.median(times)


def row_of(make: Callable[[], Call], device: torch.device, **fields: Any) -> Row:
    """Return a row with the seconds of a call, or with its error."""
    try:
        return {**fields, "seconds": seconds(make(), device)}
    except (
        RuntimeError,
        ValueError,
    ) as error:  # libraries do not support every size in every format
        return {**fields, "error": (str(error).splitlines() or [""])[0][:120]}


def copies(device: torch.device, quick: bool) -> Iterator[Row]:
    for power in range(10, by_size(quick, 20, 33)):
        size = 2**power
        source, other = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
        yield row_of(partial(partial, other.copy_, source), device, case="copy", bytes=size)
    number = torch.zeros(1, device=device)
    yield row_of(partial(partial, number.add_, 1), device, case="launch")


def gemm_rows(precision: str, device: torch.device, shapes: Sequence[Gemm]) -> Iterator[Row]:
    for shape in shapes:
        fields = {
            "case": "gemm",
            "precision": precision,
            "shape": list(shape[:3]),
            "layout": shape[3],
        }
        yield row_of(partial(product, shape, precision, device), device, **fields)


def convolution_rows(
    kind: str, precision: str, device: torch.device, shapes: Sequence[tuple[int, ...]]
) -> Iterator[Row]:
    for sizes in shapes:
        fields = {"case": kind, "precision": precision, "shape": list(sizes)}
        yield row_of(partial(convolved, sizes, kind, precision, device), device, **fields)


def measured(options: argparse.Namespace) -> dict[str, Callable[[], Iterator[Row]]]:
    """Return a function that measures each case."""
    device, few = options.device, by_size(options.quick, 2, None)
    result: dict[str, Callable[[], Iterator[Row]]] = {
        "copies": partial(copies, device, options.quick)
    }
    for precision in GEMM:
        result[f"gemm {precision}"] = partial(
            gemm_rows, precision, device, gemms(options.shapes)[:few]
        )
    for precision in CONVOLUTIONS:
        for kind in PRODUCTS:
            shapes = convolutions(options.shapes)[:few]
            result[f"{kind} {precision}"] = partial(
                convolution_rows, kind, precision, device, shapes
            )
    return result


def main() -> None:
    options = read(__doc__, shapes={"type": Path, "metavar": "FOLDER", "help": "DeepBench's sizes"})
    rows = Rows(options)
    cases = measured(options)
    for name in rows.wanted(list(cases)):
        by_tf32 = name.endswith("tf32")
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = by_tf32
        rows.add(*cases[name]())
    if options.json:
        rows.add()
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
