"""Launch wrapper of the quantizer kernel for any tensor and groups, compared bit for bit with the
reference.

The kernel is the CUDA source, compiled for the CPU. test_cuda_quantizer.py tests the kernel itself.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.kernel_build.kernel_cache import TEMPLATES
from qsync_fx.backend.cuda.kernel_build.library import Library, load
from qsync_fx.backend.cuda.runtime import launch_utils, quantize_launch
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.numerics import philox, reference
from qsync_fx.backend.operators.quantize import quantize_transposed
from qsync_fx.formats import precision
from qsync_fx.rounding import rounding_mode

SEED = torch.tensor([0x0123456789ABCDEF])
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp32",
}


@pytest.fixture(scope="session")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Library]:
    folder = tmp_path_factory.mktemp("quantizing")

    @functools.cache
    def compiled(source: str, fmt: str) -> Library:
        unit = codegen.quantizer("sm_80", source, fmt)
        (folder / f"{unit.name}.cpp").write_text(unit.source)
        host = Path(__file__).parents[3] / "support" / "cuda" / "on_cpu" / "cuda_on_cpu.h"
        flags = [
            "-std=c++17",
            "-O1",
            "-Wno-unknown-pragmas",
            "-shared",
            "-fPIC",
            "-include",
            str(host),
            f"-I{TEMPLATES}",
        ]
        subprocess.run(
            ["g++", *flags, folder / f"{unit.name}.cpp", "-o", folder / f"{unit.name}.so"],
            check=True,
        )
        return load(folder / f"{unit.name}.so", unit)

    return compiled


def laid_out(x: Tensor, layout: str) -> Tensor:
    match layout:
        case "last" if x.dim() == 4:
            return x.contiguous(memory_format=torch.channels_last)
        case "turned" if x.dim() > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "sliced":
            return x.new_empty([*x.shape[:-1], x.shape[-1] + 3])[..., 3:].copy_(x)
        case "sparse":
            return x.new_empty([2 * size for size in x.shape])[
                tuple(slice(None, None, 2) for _ in x.shape)
            ].copy_(x)
        case _:
            return x


SHAPES = st.lists(st.integers(1, 9), min_size=1, max_size=4)
LIES = st.sampled_from(["packed", "last", "turned", "sliced", "sparse"])


@settings(max_examples=60)
@given(
    SHAPES, LIES,
    st.sampled_from([("int8", torch.bfloat16), ("fp8", torch.float32), ("fp8", torch.float64)]),
    st.sampled_from(["nearest", "stochastic", "floor"]), st.data(),
)  # fmt: skip
def test_kernel_and_reference_get_equal_tensors(
    on_cpu: Callable[[str, str], Library],
    shape: list[int],
    lies: str,
    types: tuple[str, torch.dtype],
    rounding: str,
    data: st.DataObject,
) -> None:
    row, mode = precision(types[0]), rounding_mode(rounding)
    keep = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True))
    x = laid_out(torch.randn(shape).to(types[1]), lies)
    q = reference.empty_quantized(x, row.dtype)
    groups = quantize_launch.groups_of(q, keep)
    if groups is None:
        # Groups are neither rows nor columns of memory: the dimensions in `keep` are between
        # others or in another order.
        assert len([dim for dim in keep if shape[dim] > 1]) > 0
        return
    library = on_cpu(NAMES[types[1]], row.name)
    site = quantize_launch.QuantizerSite(library, x, q, row, mode, keep, groups)
    scale = site.fill(x, q, None, SEED, 7)
    want, scales = reference.quantize(
        x, SEED, 7, row, mode if mode != "stochastic" else "nearest", keep
    )
    assert torch.equal(scale, scales)
    if mode == "stochastic":
        rounded = reference.to_grid(x.float() / scales, row, mode, philox.uniform(q, SEED, 7))
        want = torch.empty_like(q).copy_(rounded)
    assert q.stride() == want.stride() and torch.equal(q.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize(
    ("shape", "stride", "keep", "groups"),
    [
        ((6, 5), (5, 1), [], (1, 30, 0)),
        ((6, 5), (5, 1), [0], (6, 5, 1)),
        ((6, 5), (5, 1), [1], (6, 5, 2)),
        ((6, 5), (5, 1), [0, 1], (30, 1, 1)),
        ((6, 5), (1, 6), [0], (5, 6, 2)),
        ((4, 6, 5), (30, 5, 1), [1], None),
        ((4, 6, 5), (30, 5, 1), [0, 1], (24, 5, 1)),
        ((4, 6, 5), (5, 20, 1), [0, 1], None),  # rows, but in another order than the scales
        ((2, 3, 4, 5), (60, 1, 15, 3), [1], (40, 3, 2)),  # channels last
        ((2, 3, 4, 5), (60, 1, 15, 3), [0], (2, 60, 1)),
        ((1, 5), (5, 1), [0], (1, 5, 0)),
        ((), (), [], (1, 1, 0)),
        ((0, 5), (5, 1), [0], None),
    ],
)
def test_groups_are_rows_or_columns_of_memory(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    keep: list[int],
    groups: tuple[int, int, int] | None,
) -> None:
    result = quantize_launch.groups_of(
        torch.empty_strided(shape, stride, dtype=torch.int8, device="meta"), keep
    )
    assert (result and (result.rows, result.columns, result.group)) == groups


def test_more_values_than_a_row_can_have_are_several() -> None:
    groups = quantize_launch.groups_of(torch.empty(8, 2**29, dtype=torch.int8, device="meta"), [])
    assert groups == quantize_launch.Groups(8, 2**29, 0)


def test_reference_is_used_without_a_kernel_with_a_reason() -> None:
    launch_utils.forget()
    x, row = torch.randn(8, 16), precision("int8")
    with assumed(None, on="cpu"):
        q, scale = quantize_launch.quantize(x, SEED, 3, row, "stochastic", [0])
    want = reference.quantize(x, SEED, 3, row, "stochastic", [0])
    assert torch.equal(q, want[0]) and torch.equal(scale, want[1])
    assert launch_utils.reasons() == {
        "quantize 8 x 16 fp32 -> int8": "the device is assumed to have no kernels"
    }


def test_kernel_is_selected_by_its_output_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that formats share a kernel if they differ only in the treatment of gradients, and that
    the reference computes formats without a kernel.
    """
    requested: list[str] = []
    monkeypatch.setattr(
        quantize_launch.launch_utils, "library", lambda unit, *_: requested.append(unit.name)
    )
    launch_utils.forget()
    x, int8 = torch.randn(8, 16), precision("int8")
    int4 = dataclasses.replace(int8, name="int4", bits=4, max=7.0)
    with assumed("sm_80", on="cpu"):
        for row in (int8, precision("int8_grad"), int4):
            q, scale = quantize_launch.quantize(x, SEED, 3, row, "nearest", ())
            want = reference.quantize(x, SEED, 3, row, "nearest", ())
            assert torch.equal(q, want[0]) and torch.equal(scale, want[1])
    assert requested == ["quantize_sm_80_fp32_int8"] * 2
    assert launch_utils.reasons() == {
        "quantize 8 x 16 fp32 -> int4": "qsync_fx has no quantization kernel for int4"
    }


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 70), (64, 64), (130, 33)])
def test_a_matrix_and_its_transpose(
    on_cpu: Callable[[str, str], Library], rows: int, columns: int
) -> None:
    x, row = torch.randn(rows, columns, dtype=torch.bfloat16), precision("int8")
    q, transpose = (
        torch.empty(shape, dtype=torch.int8) for shape in ((rows, columns), (columns, rows))
    )
    groups = quantize_launch.Groups(rows, columns, 0)
    library = on_cpu("bf16", "int8")
    site = quantize_launch.QuantizerSite(library, x, q, row, "nearest", (), groups)
    scale = site.fill(x, q, transpose, SEED, 3)
    want, scales = reference.quantize(x, SEED, 3, row, "nearest", ())
    assert torch.equal(q, want) and torch.equal(transpose, want.t()) and torch.equal(scale, scales)


def test_quantize_transposed_is_quantize_and_its_transpose() -> None:
    for x in (torch.randn(5, 9), torch.randn(9, 5).t(), torch.randn(0, 4), torch.randn(1, 7)):
        q, transpose, scale = quantize_transposed(x, SEED, 3, "fp8", "stochastic")
        want, scales = torch.ops.qsync.quantize.default(x, SEED, 3, "fp8", "stochastic", [])
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8)) and torch.equal(
            scale, scales
        )
        assert transpose.is_contiguous() and torch.equal(
            transpose.view(torch.uint8), want.t().view(torch.uint8)
        )
    arguments = torch.randn(5, 9), SEED, 3, "int8", "stochastic"
    torch.library.opcheck(torch.ops.qsync.quantize_transposed.default, arguments)
