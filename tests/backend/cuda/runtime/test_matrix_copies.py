"""Calls of the matrix copy kernels from tensors with any strides: the launch wrapper,
`qsync::convert`, and the fallback to torch.

The kernels are compiled for the CPU, as in test_cuda_convert.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from qsync_fx.backend.cuda import codegen
from qsync_fx.backend.cuda.codegen import NUMBERS, TranslationUnit
from qsync_fx.backend.cuda.kernel_build import kernel_registry
from qsync_fx.backend.cuda.kernel_build.library import Library
from qsync_fx.backend.cuda.problem import GemmProblem, padding
from qsync_fx.backend.cuda.runtime import launch_utils, layout_convert
from qsync_fx.backend.cuda.runtime.device_state import assumed
from qsync_fx.backend.cuda.selection import select
from qsync_fx.backend.cuda.selection.select import decide
from qsync_fx.backend.operators.convert import TYPES, convert
from qsync_fx.errors import KernelError, PrecisionError
from tests.support.cuda.on_cpu.convert_on_cpu import DTYPES, assert_equal, bits, drawn, library


def lying(t: Tensor, layout: str) -> Tensor:
    match layout:
        case "turned":
            return t.t().contiguous().t()
        case "sliced":
            return t.new_zeros(t.shape[0] + 1, t.shape[1] + 5)[1:, 5:].copy_(t)
        case "shifted":
            return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
        case "sparse":
            return t.new_zeros(2 * t.shape[0], 3 * t.shape[1])[::2, ::3].copy_(t)
        case _:
            return t


@pytest.fixture
def by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Provide kernels for the CPU to the wrapper, and clear the recorded reasons."""

    def found(unit: TranslationUnit, wait: bool = True) -> Library:
        return library(
            "bits8" if unit.name.startswith("copy") else unit.name.removeprefix("convert_sm_80_")
        )

    launch_utils.forget()
    monkeypatch.setattr(kernel_registry, "library", found)


MATRICES = ["row", "turned", "sliced", "shifted"]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_matrices_are_copied_as_torch_copies_them(by_kernel: None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    kind = next(name for name, actual in DTYPES.items() if actual == dtype)
    with assumed("sm_80", on="cpu"):
        for shape, layout in [
            ((m, n), layout)
            for m, n in ((1, 1), (1, 40), (33, 1), (67, 130))
            for layout in MATRICES
        ]:
            x = lying(drawn(kind, shape, generator), layout)
            for major, more in (("row", 0), ("column", 0), ("row", 16), ("column", 3)):
                actual = layout_convert.laid_out(x, shape[0] + more, shape[1] + more, major)  # type: ignore[arg-type]
                want = padding.laid_out(x, shape[0] + more, shape[1] + more, major)  # type: ignore[arg-type]
                assert actual.stride() == want.stride() and torch.equal(bits(actual), bits(want))
    assert not launch_utils.reasons()


@settings(max_examples=40)
@given(
    st.tuples(st.integers(1, 3), st.integers(1, 20), st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from(["packed", "last", "sliced", "sliced last", "rows"]),
    st.integers(0, 20), st.integers(0, 2), st.sampled_from([torch.int8, torch.bfloat16]),
)  # fmt: skip
def test_images_are_copied_as_torch_copies_them(
    shape: tuple[int, ...], layout: str, channels: int, images: int, dtype: torch.dtype
) -> None:
    x = torch.randint(-128, 128, [size + 1 for size in shape]).to(dtype)
    x = x[1:, 1:] if layout.startswith("sliced") else x
    x = (x.contiguous(memory_format=torch.channels_last) if layout.endswith("last") else x)[
        : shape[0], : shape[1]
    ]
    x = x[:, :, 1:] if layout == "rows" else x if layout.startswith("sliced") else x.clone()
    lines = layout_convert.lines_of_images(x)
    want = padding.channels_last(x, x.shape[0] + images, x.shape[1] + channels)
    assert lines is not None
    n, c, h, w = want.shape
    kind = f"bits{8 * dtype.itemsize}"
    result = layout_convert.run(library(kind), x, lines, (kind, kind), (n, h * w, c), dtype, None)
    assert torch.equal(result.view(n, h, w, c).permute(0, 3, 1, 2), want)


def test_other_layouts_are_copied_by_torch(by_kernel: None) -> None:
    with assumed("sm_80", on="cpu"):
        sparse = lying(torch.ones(8, 8, dtype=torch.int8), "sparse")
        assert layout_convert.laid_out(sparse, 16, 8, "row").sum() == 64
        assert list(launch_utils.reasons().values()) == [layout_convert.NEITHER]
        images = torch.ones(2, 3, 8, 8, dtype=torch.int8)[:, :, ::2, ::2]
        assert (
            layout_convert.lines_of_images(images) is None
            and layout_convert.channels_last(images, 2, 4).sum() == 96
        )
        wide = torch.ones(8, 8, dtype=torch.float64)
        assert torch.equal(layout_convert.laid_out(wide, 8, 8, "column"), wide)
    assert "there is no kernel for these types" in launch_utils.reasons().values()
    launch_utils.forget()
    assert layout_convert.laid_out(wide.float(), 9, 8, "row").sum() == 64
    assert list(launch_utils.reasons().values()) == ["cpu has no kernels"]


def test_a_kernel_that_fails_is_torchs_to_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(unit: TranslationUnit, wait: bool = True) -> Library | None:
        if wait:
            raise KernelError("it was not compiled", where=unit.name)
        return None

    launch_utils.forget()
    monkeypatch.setattr(kernel_registry, "library", none)
    x = torch.ones(3, 5, dtype=torch.int8)
    with assumed("sm_80", on="cpu"):
        assert layout_convert.laid_out(x, 3, 16, "row").sum() == 15
        assert launch_utils.reasons() == {"copy 3 x 5 int8": "it was not compiled"}
        monkeypatch.setattr(launch_utils, "capturing", lambda device: True)
        assert layout_convert.laid_out(x, 3, 16, "row").sum() == 15
    assert "CUDA graph" in launch_utils.reasons()["copy 3 x 5 int8"]


def test_conversions_of_models_are_compiled_ahead_of_time() -> None:
    large = GemmProblem(
        4096, 4096, 4095, "int8", "int8", "bf16", a_scale="tensor", b_scale="tensor"
    )
    assert decide(large, "sm_90a").problem != large
    assert codegen.copier("sm_90a") in select.of_problems([large], "sm_90a", every_candidate=False)
    assert not select.of_problems([], "sm_90a", every_candidate=False)
    assert {
        codegen.copier("sm_80"),
        *(codegen.converter("sm_80", x) for x in NUMBERS),
    } <= set(select.of_all("sm_80"))


# The operator.


def wanted(
    x: Tensor, dtype: torch.dtype, scale: Tensor | None, transposed: bool, shape: tuple[int, int]
) -> Tensor:
    oriented = x.t() if transposed else x
    result = torch.zeros(shape).to(dtype)
    result[: oriented.shape[0], : oriented.shape[1]] = (
        (oriented.float() * scale).to(dtype) if scale is not None else oriented.to(dtype)
    )
    return result


CASES: list[dict[str, Any]] = [
    {},
    {"transposed": True, "shape": (48, 16)},
    {"dtype": torch.bfloat16, "scale": torch.tensor(0.3)},
    {"dtype": torch.float16, "scale": torch.tensor([700.0]), "transposed": True},
    {"dtype": torch.float32, "shape": (20, 50)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("source", TYPES, ids=str)
def test_the_operator_by_torch_and_by_a_kernel(
    by_kernel: None, source: torch.dtype, case: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(2)
    kind = next(name for name, actual in DTYPES.items() if actual == source)
    for layout in ("row", "turned"):
        x = lying(drawn(kind, (13, 41), generator), layout)
        dtype, scale, transposed = (
            case.get("dtype", source),
            case.get("scale"),
            case.get("transposed", False),
        )
        shape = case.get("shape") or ((41, 13) if transposed else (13, 41))
        want = wanted(x, dtype, scale, transposed, shape)
        actual = convert(x, **case)
        assert (
            actual.is_contiguous() and actual.dtype == dtype and actual.data_ptr() != x.data_ptr()
        )
        assert_equal(actual, want)
        with assumed("sm_80", on="cpu"):
            from_kernel = layout_convert.convert(x, scale, dtype, transposed, shape)
        assert from_kernel is not None
        assert_equal(from_kernel, want)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_conversion_is_an_operator_for_torch(case: dict[str, Any]) -> None:
    x = torch.randint(-128, 128, (13, 41), dtype=torch.int8)
    arguments = (x, case.get("dtype", torch.int8), case.get("scale"), case.get("transposed", False))
    shape = case.get("shape") or ((41, 13) if case.get("transposed") else (13, 41))
    torch.library.opcheck(torch.ops.qsync.convert.default, (*arguments, list(shape)))


def test_errors_of_the_operator() -> None:
    x = torch.ones(3, 5)
    with pytest.raises(PrecisionError, match="float64 cannot be converted"):
        convert(x.double())
    with pytest.raises(PrecisionError, match="cannot become"):
        convert(x, torch.int8)
    with pytest.raises(PrecisionError, match="with a scale"):
        convert(x.to(torch.int8), scale=torch.tensor(2.0))
    for wrong, message in (
        ({"shape": (3, 4)}, "do not fit"),
        ({"transposed": True, "shape": (3, 5)}, "do not fit"),
        ({"shape": (3,)}, "dimensions"),
        ({"scale": torch.ones(3)}, "single FP32"),
        ({"scale": torch.ones((), dtype=torch.float64)}, "single FP32"),
    ):
        with pytest.raises(RuntimeError, match=message):
            convert(x, **wrong)
    with pytest.raises(RuntimeError, match="dimensions"):
        convert(x[0], shape=(1, 5))
