"""Generate the tables of CUDA kernels and architectures from the code that selects them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from qsync_fx.backend.cuda import kernel_config
from qsync_fx.backend.cuda.problem import ConvProblem, GemmProblem, Problem
from qsync_fx.backend.cuda.problem.problem import format_name
from qsync_fx.backend.cuda.selection.select import decide
from qsync_fx.devices.format_support import row_at
from qsync_fx.formats import FORMATS, Precision, encoding
from tests.support.pages import markdown

GPUS = {
    "T4": (7, 5),
    "A100": (8, 0),
    "L40": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
    "RTX 50": (12, 0),
}
SIZE = 4096


def _name(row: Precision) -> str:
    return encoding(row).name if not row.plain else str(format_name(row.dtype))


def linear(row: Precision) -> list[Problem]:
    """Return the products of a linear layer in a format: output and both gradients."""
    fmt, gradient_fmt = _name(row), _name(row.gradient)
    scale: Any = "tensor" if row.scaled else "none"
    gradient_scale: Any = "tensor" if row.gradient.scaled else "none"
    saved = fmt if row.gradient.dtype.itemsize == 1 else gradient_fmt
    output = GemmProblem(SIZE, SIZE, SIZE, fmt, fmt, row.output.name, "row", "column", scale, scale)
    to_input = replace(
        output, a=gradient_fmt, b=saved, out="fp32", b_major="row", a_scale=gradient_scale
    )
    # The kernel that rounds a gradient with a scale also writes its transpose.
    return [output, to_input, replace(to_input, a_major="row" if row.gradient.scaled else "column")]


def convolution(row: Precision) -> list[Problem]:
    """Return the products of a convolution in a format."""
    fmt, gradient_fmt = _name(row), _name(row.gradient)
    scale: Any = "tensor" if row.scaled else "none"
    gradient_scale: Any = "tensor" if row.gradient.scaled else "none"
    saved = fmt if row.gradient.dtype.itemsize == 1 else gradient_fmt
    geometry = (64, 28, 28, 512, 512, 3, 3, (1, 1), (1, 1), (1, 1))
    output = ConvProblem("fprop", *geometry, fmt, fmt, row.output.name, scale, scale)
    to_input = replace(
        output, operation="dgrad", a=gradient_fmt, b=saved, out="fp32", a_scale=gradient_scale
    )
    return [output, to_input, replace(to_input, operation="wgrad")]


def products() -> str:
    """Return the products of a layer in each format that use kernels on each GPU."""

    def cell(problems: list[Problem], capability: tuple[int, int]) -> str:
        arch = kernel_config.target(capability)
        assert arch is not None
        names = ("output", "input gradient", "weight gradient")
        ours = [
            n for n, p in zip(names, problems, strict=True) if decide(p, arch).config is not None
        ]
        return "all three" if len(ours) == 3 else ", ".join(ours) or "torch's"

    def rows() -> Iterator[tuple[str, ...]]:
        for layer in (linear, convolution):
            for row in FORMATS.values():
                if not row.plain:
                    by_gpu = {version: layer(row_at(version, row)) for version in GPUS.values()}
                    yield (
                        f"{layer.__name__}, `{row.name}`",
                        *(cell(by_gpu[version], version) for version in GPUS.values()),
                    )

    return markdown(("layer and format", *GPUS), rows())


def architectures() -> str:
    """Return the compiled architecture for each compute capability."""
    gpus = {
        (7, 5): "T4, RTX 20", (8, 0): "A100, A30", (8, 6): "A10, A40, RTX 30", (8, 7): "Orin",
        (8, 9): "L4, L40, RTX 40",
        (9, 0): "H100, H200", (10, 0): "B200", (10, 3): "B300", (12, 0): "RTX 50, RTX PRO",
        (12, 1): "GB10",
    }  # fmt: skip

    def rows() -> Iterator[tuple[str, ...]]:
        for capability, name in gpus.items():
            suffix = "" if capability in kernel_config.BY_CAPABILITY else ", by its PTX"
            yield (
                ".".join(map(str, capability)),
                name,
                f"`{kernel_config.target(capability)}`{suffix}",
            )

    return markdown(("compute capability", "GPUs", "`--arch`"), rows())


TABLES: dict[str, Callable[[], str]] = {"products": products, "architectures": architectures}
